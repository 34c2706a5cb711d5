"""Save host time in fused passes: predict buffer sizes, record kernel launches and replay them.

While the sizes stay equal, the launches of a pass differ from call to call only in the addresses of
its tensors. The Python code that prepares launches takes longer than small kernels run. So it runs
once, and later passes only replace addresses. On a CPU nothing is recorded. Predicted sizes are
rounded in coarse steps, so that successive passes have equal sizes.
"""

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused.kernels.layout import TASK_ROWS
from halley.interpreter import INTERPRETED
from halley.ops.kernels.launch import (
    DirectLaunch,
    PreparedLaunch,
    current_stream,
    is_aligned,
    note_step,
    only_compiles,
    set_recording,
)


Results: TypeAlias = Sequence[torch.Tensor | None]
_Range: TypeAlias = tuple[int, int]  # first address, number of bytes
_MAX_RECORDINGS = 512
_STEPS = 64  # large row counts are rounded in steps of 1/128 to 1/64 of the count


class PlanSize(NamedTuple):
    """Sizes of a dispatch plan that the host needs to allocate tensors."""

    num_rows: int  # rows of this rank, each expert padded to whole tiles; then rounded up
    num_copies: int  # length of the fetch list, with its unused entries
    needed_tokens: int = 0  # largest token count of any rank if the buffers are too small, else 0


@final
class PlanSizes:
    """Sizes of the last dispatch plans of a workspace, from which the next sizes are predicted.

    The first projection ``up_LGD`` identifies a layer, and ``part`` is the number of the layer
    part. ``fixed`` is the size of all plans if ``max_load`` is set.
    """

    def __init__(self, block_m: int, *, fixed: PlanSize | None) -> None:
        self.block_m, self.fixed = block_m, fixed
        self.last = PlanSize(num_rows=0, num_copies=0)  # size of the newest plan of any layer
        self.by_layer: Any = WeakIdKeyDictionary()  # Any, because torch gives its methods no types

    def predict(self, up_LGD: torch.Tensor, *, part: int = 0) -> PlanSize:
        """Predict a plan's size from this layer part's last plan; if it has none, from any layer's.

        Before the first plan, the size is 0 rows; with ``max_load``, the size is always ``fixed``.
        """
        if self.fixed is not None:
            return self.fixed
        last: PlanSize = self.by_layer.get(up_LGD, {}).get(part, self.last)
        return PlanSize(
            num_rows=rows_with_margin(last.num_rows, multiple=self.block_m),
            num_copies=rows_with_margin(last.num_copies, multiple=TASK_ROWS),
        )

    def note(self, size: PlanSize, up_LGD: torch.Tensor | None, *, part: int) -> PlanSize:
        """Round up the sizes of a new dispatch plan; keep them for predictions and return them."""
        size = size._replace(
            num_rows=round_up_rows(max(size.num_rows, self.block_m), multiple=self.block_m),
            num_copies=round_up_rows(size.num_copies, multiple=TASK_ROWS),
        )
        if not size.needed_tokens:  # else the buffers are too small, and the call runs again
            self.last = size
            if up_LGD is not None:
                self.by_layer.setdefault(up_LGD, {})[part] = size
        return size


def rows_with_margin(num_rows: int, *, multiple: int) -> int:
    """Predict the row count of a plan from the last plan's ``num_rows``: 1/64 more, rounded up."""
    return round_up_rows(num_rows + num_rows // _STEPS, multiple=multiple)


def round_up_rows(num_rows: int, *, multiple: int) -> int:
    """Round a count up to a multiple of ``multiple``; steps are up to 1/64 of a large count."""
    num_tiles = -(-num_rows // multiple)
    step = 1 << max(0, (num_tiles // _STEPS).bit_length() - 1)
    return -(-num_tiles // step) * step * multiple


@final
class LaunchCache:
    """Recorded kernel launches of the forward and backward passes of one workspace.

    A key holds everything that the launches depend on except addresses: options, sizes, dtypes.
    """

    def __init__(self) -> None:
        self._recordings: dict[tuple[object, ...], Recording] = {}

    def clear(self) -> None:
        """Delete all recorded launches; called when buffers of the workspace have moved."""
        self._recordings.clear()

    def find(self, key: tuple[object, ...], inputs: Sequence[torch.Tensor]) -> "Recording | None":
        """Return the recording for a key, or None if there is none or it cannot be replayed now."""
        if INTERPRETED or only_compiles() or not all(map(is_aligned, inputs)):
            return None
        return self._recordings.get(key)

    @contextmanager
    def record(
        self,
        key: tuple[object, ...],
        inputs: Sequence[torch.Tensor],
        persistent: Iterable[torch.Tensor],
    ) -> Generator[list[torch.Tensor | None], None, None]:
        """Record the launches of the ``with`` block, which appends its outputs to the yielded list.

        A recording finds tensors by their addresses. So nothing is recorded for inputs that a
        launcher must copy, or that share memory; nor in the interpreter, which has no launches.
        The addresses of ``persistent`` tensors, those of the workspace, do not change. The pass
        must allocate its other tensors itself. A partial overlap of tensors is a ``RuntimeError``.
        """
        outputs: list[torch.Tensor | None] = []
        is_recorded = not (INTERPRETED or only_compiles())
        if not (is_recorded and all(map(is_aligned, inputs)) and not share_memory(inputs)):
            yield outputs
            return
        # The copied list keeps inputs alive that the pass releases, so that no new tensor gets
        # their memory before all addresses are recorded.
        inputs, steps = list(inputs), []
        set_recording(steps)
        try:
            yield outputs
        finally:
            set_recording(None)
        if len(self._recordings) == _MAX_RECORDINGS:
            self._recordings.clear()
        self._recordings[key] = Recording(steps, inputs, persistent, outputs)


def release(inputs: list[Any], index: int) -> None:
    """Drop the reference to an input tensor of a pass, now and in every replay of the pass."""
    note_step(_Release(index))
    inputs[index] = None


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors overlap in memory, as gradient and input do in ``y.backward(x)``."""
    ranges = sorted(_range_of(tensor) for tensor in tensors if tensor.numel())
    return any(begin + size > after for (begin, size), (after, _) in pairwise(ranges))


@dataclass(frozen=True)
class _Release:
    index: int


@dataclass(frozen=True, kw_only=True)
class _Allocation:
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(kw_only=True, slots=True)
class _LaunchStep:
    launch: DirectLaunch
    prepared: PreparedLaunch  # the launch with its parameters
    allocations: list[_Allocation] = field(default_factory=list)  # made before the launch
    frees: list[int] = field(default_factory=list)  # slots of tensors to free after the launch
    # One entry per pointer: index of the parameter, number of the tensor, byte offset in it.
    addresses: list[tuple[int, int, int]] = field(default_factory=list)
    # For each TMA map: the same three numbers as in ``addresses``, argument number, descriptor.
    maps: list[tuple[int, int, int, int, TensorDescriptor]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)  # addresses of ``slots`` in the last replay

    def move(self, addresses: Sequence[int]) -> None:
        for place, slot, offset in self.addresses:
            self.prepared.set_address(place, addresses[slot] + offset)
        for place, slot, offset, index, desc in self.maps:
            self.prepared.set_map(place, self.launch.map_at(index, desc, addresses[slot] + offset))


@final
class Recording:
    """The kernel launches of one forward or backward pass, for tensors of fixed sizes.

    Every tensor has a number, its slot: first the inputs, then the outputs, then temporary tensors.
    A launch argument belongs to the tensor whose memory contains it. ``steps`` are launches with
    their arguments, host calls and releases, in order.
    """

    def __init__(
        self,
        steps: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        persistent: Iterable[torch.Tensor],
        outputs: Results,
    ) -> None:
        self._lock = threading.Lock()  # replays change the parameters in place
        self._num_inputs = len(inputs)
        self._slots = [_range_of(tensor) for tensor in inputs]
        self._persistent = [_range_of(tensor) for tensor in persistent]
        self._unused: list[_Allocation] = []  # outputs that no launch uses (so far)
        self._output_slots: list[int | None] = []
        for tensor in outputs:
            self._output_slots.append(None if tensor is None else len(self._slots))
            if tensor is not None:
                self._unused.append(self._add(tensor))
        self._steps = [
            self._add_launch(*step) if isinstance(step, tuple) else step for step in steps
        ]
        self._find_frees()
        self._no_addresses = [0] * (len(self._slots) - self._num_inputs)

    def replay(self, inputs: list[Any]) -> list[torch.Tensor | None]:
        """Launch the recorded kernels on new inputs; return outputs, None if recorded as None.

        Where the pass released an input, its entry in ``inputs`` becomes None.
        """
        stream = current_stream(inputs[0].device.index)
        tensors: dict[int | None, torch.Tensor | None] = {None: None}
        with self._lock:
            addresses = [tensor.data_ptr() for tensor in inputs] + self._no_addresses
            for step in self._steps:
                if isinstance(step, _Release):
                    inputs[step.index] = None
                    continue
                if not isinstance(step, _LaunchStep):
                    step()
                    continue
                for each in step.allocations:
                    tensors[each.slot] = tensor = each.make()
                    addresses[each.slot] = tensor.data_ptr()
                used = [addresses[slot] for slot in step.slots]
                if used != step.current:  # the allocator often returns the same addresses
                    step.move(addresses)
                    step.current = used
                step.prepared(stream)
                for slot in step.frees:
                    del tensors[slot]
        for each in self._unused:
            tensors[each.slot] = each.make()
        return [tensors[slot] for slot in self._output_slots]

    def _add(self, tensor: torch.Tensor) -> _Allocation:
        self._slots.append(_range_of(tensor))
        shape, slot = tuple(tensor.shape), len(self._slots) - 1
        return _Allocation(slot=slot, shape=shape, dtype=tensor.dtype, device=tensor.device)

    def _add_launch(self, launch: DirectLaunch, args: tuple[object, ...]) -> _LaunchStep:
        step = _LaunchStep(launch=launch, prepared=PreparedLaunch(launch))
        values: list[Any] = []
        for index, arg in enumerate(args):
            place = len(values)
            values.extend(launch.flatten(index, arg))
            if isinstance(arg, int):
                continue
            tensor: Any = arg.base if isinstance(arg, TensorDescriptor) else arg
            if tensor.numel() == 0 or _find(tensor, self._persistent) is not None:
                continue
            slot = _find(tensor, self._slots)
            if slot is None:
                if _touches(tensor, [*self._slots, *self._persistent]):
                    raise RuntimeError(
                        f"argument {index} of {launch.name} ({tensor.shape}) reaches beyond a "
                        "tensor of the recorded pass: a replay cannot find its address"
                    )
                step.allocations.append(self._add(tensor))
                slot = step.allocations[-1].slot
            step.allocations.extend(each for each in self._unused if each.slot == slot)
            self._unused = [each for each in self._unused if each.slot != slot]
            offset = tensor.data_ptr() - self._slots[slot][0]
            if isinstance(arg, TensorDescriptor):
                desc = object.__new__(TensorDescriptor)
                desc.__dict__.update(arg.__dict__, base=None)  # base would keep the memory alive
                step.maps.append((place, slot, offset, index, desc))
            else:
                step.addresses.append((place, slot, offset))
            step.slots.append(slot)
        step.prepared.fill(values)
        return step

    def _find_frees(self) -> None:
        """Set ``frees`` of each launch: the temporary tensors whose memory can be freed after it.

        If a launch overlaps the previous one, the tensors of both are freed after the later launch.
        """
        lasts: dict[int, _LaunchStep] = {}
        running: list[int] = []
        for step in self._steps:
            if isinstance(step, _LaunchStep):
                running = step.slots + (running if step.launch.overlaps else [])
                lasts.update(dict.fromkeys(running, step))
        for slot, step in lasts.items():
            if slot >= self._num_inputs and slot not in self._output_slots:
                step.frees.append(slot)


def _range_of(tensor: torch.Tensor) -> _Range:
    return tensor.data_ptr(), tensor.nbytes


def _touches(tensor: torch.Tensor, ranges: Sequence[_Range]) -> bool:
    begin, num_bytes = _range_of(tensor)
    return any(first < begin + num_bytes and begin < first + size for first, size in ranges)


def _find(tensor: torch.Tensor, ranges: Sequence[_Range]) -> int | None:
    begin, num_bytes = _range_of(tensor)
    for index, (first, size) in enumerate(ranges):
        if first <= begin and begin + num_bytes <= first + size:
            return index
    return None
