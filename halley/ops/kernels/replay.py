"""Repeat the launches of a pass with other tensors, with little work on the host.

The launches of a pass differ from call to call in the addresses of its tensors alone, as long as
their sizes stay. What leads to them is Python, which takes longer than small kernels run: it runs
once, and a tape keeps what it launched. On a CPU every pass runs as it is written.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.ops.kernels.driver import DirectLaunch, Prepared


Results: TypeAlias = Sequence[torch.Tensor | None]
_Range: TypeAlias = tuple[int, int]  # of addresses: first, number of bytes
_recording = threading.local()


def note_launch(launch: DirectLaunch, args: tuple[object, ...]) -> None:
    """Keep a launch that was made, if the pass of this thread is recorded."""
    steps = getattr(_recording, "steps", None)
    if steps is not None:
        steps.append((launch, args))


def note_call(call: Callable[[], None]) -> None:
    """Call something on the host amid the launches, now and whenever they are repeated."""
    steps = getattr(_recording, "steps", None)
    if steps is not None:
        steps.append(call)
    call()


def drop(tensor: torch.Tensor) -> None:
    """Let go of the memory of an input of the pass, which nobody reads any more.

    Where the pass is recorded, it goes when that is done: no other tensor must get its address.
    """
    steps = getattr(_recording, "steps", None)
    if steps is None:
        tensor.untyped_storage().resize_(0)
    else:
        steps.append(_Dropped(tensor))


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether some of the tensors overlap."""
    ranges = sorted(_range_of(tensor) for tensor in tensors if tensor.numel())
    return any(begin + size > after for (begin, size), (after, _) in pairwise(ranges))


def record(
    run: Callable[[], Results], inputs: Sequence[torch.Tensor], lasting: Iterable[torch.Tensor]
) -> tuple[Results, "Tape"]:
    """Run a pass; return its outputs and the tape of its launches.

    Args:
        run: the pass. All it does on the device are launches of this package's kernels.
        inputs: the tensors that it gets, contiguous, on multiples of 16 bytes, none over another.
        lasting: the other tensors that outlive the tape, at their places. All else that is
            launched on is made by the pass.

    Raises:
        RuntimeError: a launch works on more than a tensor that the pass was given: on memory that
            no one says is the pass's.
    """
    steps: list[Any] = []
    _recording.steps = steps
    try:
        outputs = run()
    finally:
        _recording.steps = None
    tape = Tape(steps, inputs, lasting, outputs)
    for step in steps:
        if isinstance(step, _Dropped):
            step.tensor.untyped_storage().resize_(0)
    return outputs, tape


@dataclass(frozen=True)
class _Dropped:
    """An input whose memory goes at this place."""

    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A tensor that the pass makes."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(kw_only=True, slots=True)
class _Launch:
    """One launch: what it gets, and which of that depends on the address of which tensor.

    Attributes:
        launch: what is launched; ``prepared``, with the parameters of this pass.
        makes: tensors that it is the first to use.
        ends: slots of tensors that are not used any more, of those that are no outputs.
        addresses: place among the parameters, slot of the tensor, offset in bytes.
        maps: the same for maps of tensor memory, then index and descriptor of the argument.
        slots: of all these tensors; ``at``, their addresses of the last time.
    """

    launch: DirectLaunch
    prepared: Prepared
    makes: list[_Made] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    addresses: list[tuple[int, int, int]] = field(default_factory=list)
    maps: list[tuple[int, int, int, int, TensorDescriptor]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)

    def move(self, at: Sequence[int]) -> None:
        """Set what depends on the addresses of the tensors, of all slots."""
        for place, slot, offset in self.addresses:
            self.prepared.set_address(place, at[slot] + offset)
        for place, slot, offset, index, desc in self.maps:
            self.prepared.set_map(place, self.launch.map_at(index, desc, at[slot] + offset))


@final
class Tape:
    """The launches of one pass, for tensors of the same sizes; see ``record``.

    Args:
        steps: launches with their arguments, and calls, in order.
        inputs, lasting, outputs: of the pass that was recorded.
    """

    def __init__(
        self,
        steps: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        lasting: Iterable[torch.Tensor],
        outputs: Results,
    ) -> None:
        self._lock = threading.Lock()  # parameters are changed in place
        self._num_inputs = len(inputs)
        self._slots = [_range_of(tensor) for tensor in inputs]
        self._lasting = [_range_of(tensor) for tensor in lasting]
        self._unused: list[_Made] = []  # outputs that no launch has used yet
        self._output_slots: list[int | None] = []
        for tensor in outputs:
            self._output_slots.append(None if tensor is None else len(self._slots))
            if tensor is not None:
                self._unused.append(self._add(tensor))
        self._steps = [self._step(step) for step in steps]
        self._find_ends()
        self._later = [0] * (len(self._slots) - self._num_inputs)  # addresses of what it makes

    def repeat(self, stream: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Launch the pass on other inputs of the same sizes; return its outputs."""
        made: dict[int | None, torch.Tensor | None] = {None: None}
        with self._lock:
            at = [tensor.data_ptr() for tensor in inputs] + self._later
            for step in self._steps:
                if isinstance(step, int):
                    inputs[step].untyped_storage().resize_(0)
                    continue
                if not isinstance(step, _Launch):
                    step()
                    continue
                for each in step.makes:
                    tensor = torch.empty(each.shape, dtype=each.dtype, device=each.device)
                    made[each.slot], at[each.slot] = tensor, tensor.data_ptr()
                used = [at[slot] for slot in step.slots]
                if used != step.at:  # mostly memory comes again
                    step.move(at)
                    step.at = used
                step.prepared(stream)
                for slot in step.ends:
                    del made[slot]
        for each in self._unused:
            made[each.slot] = torch.empty(each.shape, dtype=each.dtype, device=each.device)
        return [made[slot] for slot in self._output_slots]

    def _add(self, tensor: torch.Tensor) -> _Made:
        self._slots.append(_range_of(tensor))
        shape, slot = tuple(tensor.shape), len(self._slots) - 1
        return _Made(slot=slot, shape=shape, dtype=tensor.dtype, device=tensor.device)

    def _step(self, step: Any) -> Any:
        """Return a launch, a call, or for an input that goes its index."""
        if isinstance(step, _Dropped):
            slot = _find(step.tensor, self._slots[: self._num_inputs])
            assert slot is not None
            return slot
        return self._keep(*step) if isinstance(step, tuple) else step

    def _keep(self, launch: DirectLaunch, args: tuple[object, ...]) -> _Launch:
        step = _Launch(launch=launch, prepared=Prepared(launch))
        values: list[Any] = []
        for index, arg in enumerate(args):
            place = len(values)
            values.extend(launch.flatten(index, arg))
            if isinstance(arg, int):
                continue
            tensor: Any = arg.base if isinstance(arg, TensorDescriptor) else arg
            if tensor.numel() == 0 or _find(tensor, self._lasting) is not None:
                continue
            slot = _find(tensor, self._slots)
            if slot is None:
                if _touches(tensor, [*self._slots, *self._lasting]):
                    raise RuntimeError(
                        f"argument {index} of {launch.name} ({tensor.shape}) reaches beyond a "
                        "tensor that the pass was given or made: a tape cannot tell where it is"
                    )
                step.makes.append(self._add(tensor))
                slot = step.makes[-1].slot
            step.makes.extend(each for each in self._unused if each.slot == slot)
            self._unused = [each for each in self._unused if each.slot != slot]
            offset = tensor.data_ptr() - self._slots[slot][0]
            if isinstance(arg, TensorDescriptor):
                desc = object.__new__(TensorDescriptor)
                desc.__dict__.update(arg.__dict__, base=None)  # lest the tape keep its memory
                step.maps.append((place, slot, offset, index, desc))
            else:
                step.addresses.append((place, slot, offset))
            step.slots.append(slot)
        step.prepared.fill(values)
        return step

    def _find_ends(self) -> None:
        """Note where memory is free again: not before a launch that runs beside its last user."""
        lasts: dict[int, _Launch] = {}
        beside: list[int] = []  # slots that launches use which the next may run beside
        for step in self._steps:
            if isinstance(step, _Launch):
                beside = step.slots + (beside if step.launch.overlaps else [])
                lasts.update(dict.fromkeys(beside, step))
        for slot, step in lasts.items():
            if slot >= self._num_inputs and slot not in self._output_slots:
                step.ends.append(slot)


def _range_of(tensor: torch.Tensor) -> _Range:
    return tensor.data_ptr(), tensor.nbytes


def _touches(tensor: torch.Tensor, ranges: Sequence[_Range]) -> bool:
    """Return whether a tensor shares memory with a range."""
    begin, num_bytes = _range_of(tensor)
    return any(first < begin + num_bytes and begin < first + size for first, size in ranges)


def _find(tensor: torch.Tensor, ranges: Sequence[_Range]) -> int | None:
    """Return the range in which a tensor lies."""
    begin, num_bytes = _range_of(tensor)
    for index, (first, size) in enumerate(ranges):
        if first <= begin and begin + num_bytes <= first + size:
            return index
    return None
