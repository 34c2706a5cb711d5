"""Predict the memory of the values between a step's items, for any order of the items.

The first step records the storages of the items' results. The values that are alive after each item
of an order then follow from the first and the last item that has each of them.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple, final

import torch
from torch import nn

from halley.lanes.action import Order, group_items
from halley.lanes.allocations import Allocations, record_allocations
from halley.lanes.cut import Item
from halley.lanes.graph_pool import PIECE, PoolModel
from halley.lanes.segment_compiler import Call


# The predicted pool grows by 1/256 of its size until all tensors have a place.
_GROWTH_DIVISOR = 256


@dataclass(frozen=True, kw_only=True)
class ResultStorage:
    """The storage of one result of an item.

    Attributes:
        owner: name of the first value that has the storage: an input of the item, an earlier result
            of the item, or the result itself if the storage is new.
        num_bytes: of the whole storage, of which the result may be a part; 0 for a number.
    """

    owner: str
    num_bytes: int


# Storages of an item's results by (microbatch, item index). Results of items that are missing here
# count as 0 bytes: sums over lanes are missing, and have one number for each expert.
Storages = Mapping[tuple[int, int], Sequence[ResultStorage]]


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The memory of a step, for predictions of its peak in other orders.

    Attributes:
        inside_bytes: on GPUs, the most bytes that an item of a microbatch has allocated at a time.
        input_bytes: of each input of an item of a microbatch; 0 for a parameter or a number.
        allocations: by index of an item, what it allocates in order; equal in all microbatches.
        rest_bytes: memory that is allocated before the step.
        captured: indices of the items that CUDA graphs will run.
    """

    storages: Storages = field(default_factory=dict)
    inside_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    input_bytes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    allocations: Mapping[int, Allocations] = field(default_factory=dict)
    rest_bytes: int = 0
    captured: frozenset[int] = frozenset()


@final
class StorageRecorder:
    """Records the storages of all results of a step, whose microbatches call each item in order.

    Args:
        keys: for the index of each item that a CUDA graph will run, the hash of its code. The
            second call of each hash records what it allocates: in the first one, the compiler may
            try kernels.

    Attributes:
        calls: the functions of the items; the first call of each microbatch is recorded.
        storages: the record so far.
        inside_bytes: on GPUs, most bytes that an item has allocated at a time, with its results.
        input_bytes: of each input of an item; 0 for a parameter or a number.
    """

    def __init__(
        self,
        items: Sequence[Item],
        calls: Sequence[Call],
        keys: Mapping[int, str],
        *,
        num_microbatches: int,
    ) -> None:
        self.storages: dict[tuple[int, int], tuple[ResultStorage, ...]] = {}
        self.inside_bytes: dict[tuple[int, int], int] = {}
        self.input_bytes: dict[tuple[int, int], list[int]] = {}
        self.calls: list[Call] = [
            partial(self._record, index, item, call)
            for index, (item, call) in enumerate(zip(items, calls, strict=True))
        ]
        self._keys = keys
        self._num_microbatches = num_microbatches
        self._num_calls = [0] * len(items)
        self._num_calls_of_key: Counter[str] = Counter()
        self._allocations: dict[str, Allocations] = {}

    def record(self, *, rest_bytes: int) -> MemoryRecord:
        """Return the record so far. For the argument, see ``MemoryRecord``."""
        return MemoryRecord(
            storages=self.storages,
            inside_bytes=self.inside_bytes,
            input_bytes=self.input_bytes,
            allocations={
                index: self._allocations[key]
                for index, key in self._keys.items()
                if key in self._allocations
            },
            rest_bytes=rest_bytes,
            captured=frozenset(self._keys),
        )

    def _record(self, index: int, item: Item, call: Call, args: list[Any]) -> Sequence[Any]:
        if (microbatch := self._num_calls[index]) == self._num_microbatches:
            return self._call(index, call, args)
        inputs = [*args]  # alive during the call: no result can get the storage of a freed input
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        results = self._call(index, call, args)
        if on_gpu:
            inside_bytes = torch.cuda.max_memory_allocated() - before
            self.inside_bytes[microbatch, index] = inside_bytes
        self.storages[microbatch, index] = _describe(item, [*inputs, *results])
        self.input_bytes[microbatch, index] = [
            each.nbytes
            if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)
            else 0
            for each in inputs
        ]
        self._num_calls[index] += 1
        return results

    def _call(self, index: int, call: Call, args: list[Any]) -> Sequence[Any]:
        key = self._keys.get(index, "")
        self._num_calls_of_key[key] += 1
        if not key or self._num_calls_of_key[key] != 2:
            return call(args)
        inputs = [*args]  # alive during the call, as during a capture
        results, allocations = record_allocations(call, args)
        if allocations is not None:
            self._allocations[key] = allocations
        del inputs
        return results


def _describe(item: Item, values: Sequence[Any]) -> tuple[ResultStorage, ...]:
    """Return the storages of an item's results; ``values`` are its inputs, then its results."""
    owners: dict[int, str] = {}
    found: list[ResultStorage] = []
    for name, value in zip((*item.inputs, *item.outputs), values, strict=True):
        owner, num_bytes = name, 0
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            owner, num_bytes = owners.setdefault(storage._cdata, name), storage.nbytes()
        found.append(ResultStorage(owner=owner, num_bytes=num_bytes))
    return tuple(found[len(item.inputs) :])


class StepMemory(NamedTuple):
    """The most bytes that a step needs: in the pool of its CUDA graphs, and in all."""

    graph_bytes: int
    total_bytes: int


class _PoolStep(NamedTuple):
    """The memory that one item takes from the pool and gives back, in bytes."""

    copied: Sequence[int]  # of copies of inputs
    events: Sequence[tuple[int, int]]  # as in ``Allocations``
    made: Mapping[tuple[int, str], int]  # number of the allocation of each new result
    freed: Sequence[tuple[int, str]]  # results of this and earlier items that no later item reads


def predict_memory(
    items: Sequence[Item], memory: MemoryRecord, order: Order, *, most_bytes: float = inf
) -> StepMemory:
    """Return the memory of a step: that of its CUDA graphs, and with the peak of all other memory.

    CUDA graphs keep their memory for the whole step. If they need more than ``most_bytes``, the
    result is more than that, but may be less than they need.
    """
    ends = _find_ends(items, order)
    ends |= _gradient_ends(items, order, ends, memory.captured)
    # A gradient of the first microbatch counts to the end: it becomes ``.grad``, or ``.grad`` is a
    # copy of equal size.
    ends |= {(0, name): len(order) for item in items for name, _ in item.gradients}
    others = frozenset(range(len(items))) - memory.captured
    alive = [0, *_alive_bytes(items, memory.storages, order, ends, others)]
    inside = [memory.inside_bytes.get(each, 0) if each[1] in others else 0 for each in order]
    peak = max(*alive, *(sum(pair) for pair in zip(alive[:-1], inside, strict=True)))
    copied = _copied_bytes(items, memory)
    changes = _changes(items, memory.storages, order, ends, memory.captured)
    steps = [
        _pool_step(items, memory, each, made, freed, copied.get(each, ()))
        for each, (made, freed) in zip(order, changes, strict=True)
    ]
    graph_bytes = _fill(0, steps).least_bytes
    while not (pool := _fill(graph_bytes, steps)).has_all and graph_bytes <= most_bytes:
        graph_bytes += max(graph_bytes // _GROWTH_DIVISOR, PIECE)
    total_bytes = memory.rest_bytes + graph_bytes + pool.small_bytes + peak
    return StepMemory(graph_bytes, total_bytes)


def _gradient_ends(
    items: Sequence[Item],
    order: Order,
    ends: Mapping[tuple[int, str], int],
    captured: Container[int],
) -> dict[tuple[int, str], int]:
    """Return the position in ``order`` at which each gradient is freed: after a whole CUDA graph.

    Only after a graph are its gradients added to ``.grad``, or to those of other microbatches.
    """
    graph_ends: list[int] = []
    for group in group_items(items, order, captured):
        graph_ends += [len(graph_ends) + len(group) - 1] * len(group)
    return {
        (microbatch, name): graph_ends[ends.get((microbatch, name), at)]
        for at, (microbatch, index) in enumerate(order)
        for name, _ in items[index].gradients
    }


def _pool_step(
    items: Sequence[Item],
    memory: MemoryRecord,
    each: tuple[int, int],
    made: Mapping[tuple[int, str], int],
    freed: Sequence[tuple[int, str]],
    copied: Sequence[int],
) -> _PoolStep:
    """Return the step of an item; without a record, all temporary tensors count as one."""
    index = each[1]
    if index not in memory.captured:
        return _PoolStep(copied, (), {}, freed)
    if (allocations := memory.allocations.get(index)) is not None:
        owners = dict(zip(items[index].outputs, allocations.owners, strict=True))
        numbers = {value: owners[value[1]] for value in made}
        return _PoolStep(copied, allocations.events, numbers, freed)
    numbers = {value: number for number, value in enumerate(made, 1)}
    temporary = max(0, memory.inside_bytes.get(each, 0) - sum(made.values()))
    events = [(0, temporary), *((numbers[value], size) for value, size in made.items()), (0, 0)]
    return _PoolStep(copied, events, numbers, freed)


def _fill(num_bytes: int, steps: Sequence[_PoolStep]) -> PoolModel:
    """Run the steps in a pool of that size."""
    pool, places = PoolModel(num_bytes), dict[tuple[int, str], int]()
    for copied, events, made, freed in steps:
        inside = [pool.allocate(size) for size in copied]
        numbers: dict[int, int] = {}
        for number, size in events:
            if size:
                numbers[number] = pool.allocate(size)
            elif number in numbers:
                pool.free(numbers.pop(number))
        places |= {
            value: numbers.pop(number) for value, number in made.items() if number in numbers
        }
        ended = [places.pop(value) for value in freed if value in places]
        for place in (*inside, *numbers.values(), *ended):
            pool.free(place)
    return pool


def _copied_bytes(items: Sequence[Item], memory: MemoryRecord) -> dict[tuple[int, int], list[int]]:
    """Return the sizes of the inputs that captured items copy: all but results of captured items.

    Parameters are not copied either, and have 0 bytes in the record.
    """
    fixed = {name for index in memory.captured for name in items[index].outputs}
    return {
        each: [
            size
            for name, size in zip(items[each[1]].inputs, sizes, strict=False)
            if size and name not in fixed
        ]
        for each, sizes in memory.input_bytes.items()
        if each[1] in memory.captured
    }


def predict_peak(
    items: Sequence[Item], storages: Storages, order: Order, captured: Container[int] = ()
) -> int:
    """Return the largest number of bytes of values that are alive after an item of ``order``.

    A value is alive until its last reader has run, and an input of a collective until its wait. A
    unit that runs later keeps its operands alive. A gradient is alive until the same gradient of
    all earlier microbatches is there, and until its CUDA graph has run if ``captured`` has the
    index of its item. Inputs of the step (parameters and the batch), ``.grad``, and
    memory inside of items are not counted.
    """
    ends = _find_ends(items, order)
    ends |= _gradient_ends(items, order, ends, captured)
    return max(0, *_alive_bytes(items, storages, order, ends, range(len(items))))


def _alive_bytes(
    items: Sequence[Item],
    storages: Storages,
    order: Order,
    ends: Mapping[tuple[int, str], int],
    chosen: Container[int],
) -> list[int]:
    """Return the bytes of ``chosen`` items' results that are alive after each item of ``order``."""
    num_bytes: dict[tuple[int, str], int] = {}
    alive, found = 0, list[int]()
    for made, freed in _changes(items, storages, order, ends, chosen):
        num_bytes |= made
        alive += sum(made.values()) - sum(map(num_bytes.pop, freed))
        found.append(alive)
    return found


def _changes(
    items: Sequence[Item],
    storages: Storages,
    order: Order,
    ends: Mapping[tuple[int, str], int],
    chosen: Container[int],
) -> Iterator[tuple[dict[tuple[int, str], int], list[tuple[int, str]]]]:
    """Yield the storages that each item of ``order`` makes, with their bytes, and those it frees.

    A storage is named by its first value. Storages of other items than ``chosen`` are left out.
    """
    ending: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for value, at in ends.items():
        ending[at].append(value)
    owners: dict[tuple[int, str], tuple[int, str]] = {}
    num_alive: Counter[tuple[int, str]] = Counter()  # by owner: values of its storage
    held: set[tuple[int, str]] = set()
    for at, (microbatch, index) in enumerate(order):
        made: dict[tuple[int, str], int] = {}
        for name, result in zip(
            items[index].outputs, storages.get((microbatch, index), ()), strict=False
        ):
            value, owner = (microbatch, name), (microbatch, result.owner)
            owners[value] = owner = owners.get(owner, owner)
            if owner == value and index in chosen:
                made[value] = result.num_bytes
            num_alive[owner] += value in ends
        held |= made.keys()
        ended = [owners[value] for value in ending[at] if value in owners]
        num_alive.subtract(ended)
        freed = [each for each in dict.fromkeys((*made, *ended)) if not num_alive[each]]
        freed = [each for each in freed if each in held]
        held.difference_update(freed)
        yield made, freed


def _find_ends(items: Sequence[Item], order: Order) -> dict[tuple[int, str], int]:
    """Return the position in ``order`` at which each value is freed, if a later item reads it."""
    num_microbatches = len({microbatch for microbatch, _ in order})
    place = {each: at for at, each in enumerate(order)}
    ends: dict[tuple[int, str], int] = {}

    def keep(lane: int, names: Iterable[str], until: int) -> None:
        for name in names:
            ends[lane, name] = max(until, ends.get((lane, name), 0))

    for at, (microbatch, index) in enumerate(order):
        item = items[index]
        for lane in item.read_lanes(microbatch, num_microbatches):
            keep(lane, item.inputs, at)
        if item.kind == "wait":  # until then, the process group keeps what the collective reads
            for need in item.needs:
                keep(microbatch, items[need].inputs if items[need].kind == "start" else (), at)
        added_at = max(place[each, index] for each in range(microbatch + 1))
        if added_at > at:  # a gradient that waits for an earlier microbatch
            keep(microbatch, (name for name, _ in item.gradients), added_at)
    return ends
