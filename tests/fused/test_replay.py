"""A replay on new tensors makes the same launches as the pass itself would.

A fake driver records the launches, because there is no GPU. tests/strategies/test_fused_cuda.py
replays real passes.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused import replay
from halley.fused.replay import LaunchCache, Recording, share_memory
from halley.ops.kernels import launch as launch_module
from halley.ops.kernels.launch import MAP_BYTES, DirectLaunch, note_call, note_step


DESC = "tensordesc<fp32[2, 4]>"
TYPES = ("*fp32", "i32", DESC, "*i32", "i64", "*fp32", "constexpr")
Call = list[Any]  # number of attributes, stream, parameters of the kernel


def _read(stream: int, params: Any) -> Call:
    """Read the parameters as a GPU would, by their types."""
    begins = list(params)
    values: Call = [stream]
    for name in TYPES[:-1]:
        if name == DESC:
            values.append(ctypes.string_at(begins.pop(0), MAP_BYTES))
            kinds: list[Any] = [ctypes.c_int32] * 2 + [ctypes.c_int64] * 2
        else:
            kinds = [{"i32": ctypes.c_int32}.get(name, ctypes.c_int64)]
        values += [kind.from_address(begins.pop(0)).value for kind in kinds]
    assert [ctypes.c_int64.from_address(begin).value for begin in begins] == [0, 0]
    return values


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    made: list[Call] = []

    def launch(config: Any, function: Any, params: Any, extra: None) -> int:
        assert (function.value, extra) == (77, None)
        assert list(config._obj.grid) == [3, 1, 1]
        assert list(config._obj.block) == [128, 1, 1]
        assert config._obj.shared_bytes == 512
        attribute = config._obj.attributes[0]
        assert (attribute.id, attribute.value) == (6, 1)
        made.append([config._obj.num_attributes, *_read(config._obj.stream, params)])
        return 0

    monkeypatch.setattr(launch_module, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(DirectLaunch, "map_at", _map_at)
    monkeypatch.setattr(replay, "INTERPRETED", False)
    return made


def _map_at(launch: DirectLaunch, index: int, desc: Any, address: int) -> bytes:
    return struct.pack("=3q", index, address, desc.shape[0]).ljust(MAP_BYTES, b"\7")


def _make_launch(*, overlaps: bool = True) -> DirectLaunch:
    metadata = SimpleNamespace(
        global_scratch_size=0, profile_scratch_size=0, num_ctas=1, launch_cooperative_grid=False,
        tensordesc_meta=[{}], num_warps=4, shared=512, launch_pdl=overlaps,
    )  # fmt: skip
    source = SimpleNamespace(signature=dict(enumerate(TYPES)))
    binary = SimpleNamespace(metadata=metadata, src=source, name="kernel", function=77)
    return DirectLaunch(binary, 3)


def _desc(rows: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [2, 4])


class Pass:
    """Two launches on inputs, on tensors that the pass allocates, and on a persistent buffer."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.launches = [_make_launch() for _ in range(2)]
        self.buffer = torch.zeros(100, dtype=torch.int32)
        self.note = note
        self.made: list[torch.Tensor] = []

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, scratch, empty = torch.empty(3, 4), torch.empty(6, 4), torch.empty(2, 0)
        self._launch(0, (x, 5, _desc(scratch), self.buffer[8:], 2**40, weight[1]))
        note_call(self.note)
        self._launch(1, (scratch, -1, _desc(y), self.buffer, 7, x[2:]))
        self.made = [y, scratch]
        return y, None, empty

    def _launch(self, which: int, args: tuple[Any, ...]) -> None:
        self.launches[which](9, args)
        note_step((self.launches[which], args))


def _replay(
    recording: Recording, stream: int, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "current_stream", lambda device: stream)
        return recording.replay(list(inputs))


def record(
    run: Callable[[], tuple[torch.Tensor | None, ...]],
    inputs: Sequence[torch.Tensor],
    persistent: list[torch.Tensor],
) -> tuple[list[torch.Tensor | None], Recording]:
    """Run a pass under a new cache; return its outputs and the recording."""
    cache = LaunchCache()
    with cache.record(("key",), inputs, persistent) as outputs:
        outputs += run()
    found = cache.find(("key",), inputs)
    assert found is not None
    return outputs, found


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 4), torch.zeros(2, 4)


def test_replay_uses_the_addresses_of_the_new_tensors(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    layer = Pass(lambda: order.append(len(calls)))
    first = _inputs()
    (y, nothing, empty), recording = record(lambda: layer.run(*first), first, [layer.buffer])
    assert y is layer.made[0]
    assert nothing is None
    assert empty is not None
    assert order == [1]  # after the first launch
    calls.clear()

    others = _inputs()  # the first inputs still exist, so these have other addresses
    made: list[torch.Tensor] = []
    empty_of = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty_of(*a, **k)) or made[-1])
    outputs = _replay(recording, 11, others)
    monkeypatch.undo()
    scratch, y_again, empty_again = made
    assert outputs == [y_again, None, empty_again]
    assert [(t.shape, t.dtype) for t in made] == [
        ((6, 4), torch.float32), ((3, 4), torch.float32), ((2, 0), torch.float32),
    ]  # fmt: skip
    assert order == [1, 1]

    x, weight = others
    buffer = layer.buffer.data_ptr()
    sizes = {6: (6, 4, 4, 1), 3: (3, 4, 4, 1)}
    scratch_map = struct.pack("=3q", 2, scratch.data_ptr(), 6).ljust(MAP_BYTES, b"\7")
    y_map = struct.pack("=3q", 2, y_again.data_ptr(), 3).ljust(MAP_BYTES, b"\7")
    weight_row, x_rows = weight.data_ptr() + 16, x.data_ptr() + 32
    assert calls == [
        [1, 11, x.data_ptr(), 5, scratch_map, *sizes[6], buffer + 32, 2**40, weight_row],
        [1, 11, scratch.data_ptr(), -1, y_map, *sizes[3], buffer, 7, x_rows],
    ]


@pytest.mark.parametrize(
    ("overlapping", "ends"), [((), [0, 1, 2]), ((1,), [1, 1, 2]), ((1, 2), [2, 2, 2])]
)
def test_temporary_tensors_are_freed_after_their_last_launch(
    calls: list[Call], overlapping: tuple[int, ...], ends: list[int]
) -> None:
    """Three launches, each the last to use one tensor; some run beside the one before."""
    launches = [_make_launch(overlaps=index in overlapping) for index in range(3)]
    x, buffer = torch.zeros(4, 4), torch.zeros(100, dtype=torch.int32)

    def run() -> tuple[torch.Tensor | None, ...]:
        made = [torch.empty(3, 4) for _ in launches]
        y = torch.empty(6, 4)
        for launch, rows in zip(launches, made, strict=True):
            args = (x, 5, _desc(rows), buffer, 7, y)
            launch(9, args)
            note_step((launch, args))
        return (y,)

    _, recording = record(run, [x], [buffer])
    found = [step.frees for step in recording._steps if not callable(step)]
    assert [index for index, slots in enumerate(found) for _ in slots] == ends
    freed = sorted(slot for slots in found for slot in slots)
    assert freed == [2, 3, 4]  # slots 0 and 1 are x and y
    assert [call[0] for call in calls] == [int(index in overlapping) for index in range(3)]


def test_an_error_ends_the_recording(calls: list[Call]) -> None:
    layer, first = Pass(lambda: None), _inputs()

    def fail() -> tuple[torch.Tensor | None, ...]:
        layer.run(*first)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        record(fail, first, [layer.buffer])
    layer.run(*first)  # not recorded
    _, recording = record(lambda: layer.run(*first), first, [layer.buffer])
    assert len(recording._steps) == 3
    assert len(calls) == 6


def test_refused_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(cuLaunchKernelEx=lambda *_: 700)
    monkeypatch.setattr(launch_module, "_driver", lambda: library)
    monkeypatch.setattr(DirectLaunch, "map_at", _map_at)
    with pytest.raises(RuntimeError, match="launch of kernel failed with CUDA error 700"):
        Pass(lambda: None).run(*_inputs())


def test_argument_beyond_the_tensors_of_a_pass_is_an_error(calls: list[Call]) -> None:
    layer, (x, weight) = Pass(lambda: None), _inputs()
    with pytest.raises(RuntimeError, match=r"argument 0 of kernel .* reaches beyond a tensor"):
        record(lambda: layer.run(x, weight), (x[:3], weight), [layer.buffer])
    with pytest.raises(RuntimeError, match=r"argument 3 of kernel .* reaches beyond a tensor"):
        record(lambda: layer.run(x, weight), (x, weight), [layer.buffer[:50]])


def test_inputs_that_overlap() -> None:
    rows = torch.zeros(4, 4)
    assert share_memory([rows, torch.zeros(2), rows])
    assert share_memory([rows[1:3], torch.zeros(2), rows])
    assert not share_memory([rows[:2], torch.zeros(2), rows[2:], torch.zeros(4, 0), rows[:0]])
