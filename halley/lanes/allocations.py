"""Record the memory that a call allocates and frees on a GPU, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halley.lanes.segment_compiler import Call


@dataclass(frozen=True, kw_only=True)
class Allocations:
    """The memory that a call allocates and frees.

    Attributes:
        events: in order: an allocation's number and bytes, or its number and 0 when it is freed.
        owners: for each result of the call, the number of the allocation that it has; -1 if it has
            memory from before the call.
    """

    events: Sequence[tuple[int, int]]
    owners: Sequence[int]


def record_allocations(call: Call, args: list[Any]) -> tuple[Sequence[Any], Allocations | None]:
    """Return the results of a call, and what it allocated and freed on the current GPU.

    The source is torch's history of memory. The second result is None if a user already records
    this history, or if the allocator has none, such as "cudaMallocAsync".
    """
    is_recording = torch._C._cuda_isHistoryEnabled()  # pyright: ignore[reportPrivateUsage]
    if is_recording or torch.cuda.get_allocator_backend() != "native":
        return call(args), None
    memory, device = torch.cuda.memory, torch.cuda.current_device()
    memory._record_memory_history(context=None)  # pyright: ignore[reportPrivateUsage]
    try:
        marker = torch.empty(1, dtype=torch.uint8, device="cuda")
        results = call(args)
        history = memory._snapshot()["device_traces"][device]  # pyright: ignore[reportPrivateUsage]
    finally:
        memory._record_memory_history(None)  # pyright: ignore[reportPrivateUsage]
    # The history may begin before this call.
    places = [
        at
        for at, event in enumerate(history)
        if event["action"] == "alloc" and event["addr"] == marker.data_ptr()
    ]
    return results, _number(history[places[-1] + 1 :], results) if places else None


def _number(history: Sequence[dict[str, Any]], results: Sequence[Any]) -> Allocations:
    """Number a call's allocations in order of torch's history, and find those of its results."""
    events: list[tuple[int, int]] = []
    numbers: dict[int, int] = {}  # of allocations in use, by address
    num_allocations = 0
    for event in history:
        if event["action"] == "alloc":
            numbers[event["addr"]] = num_allocations
            events.append((num_allocations, event["size"]))
            num_allocations += 1
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            events.append((numbers.pop(event["addr"]), 0))
    owners = [
        numbers.get(each.untyped_storage().data_ptr(), -1) if isinstance(each, torch.Tensor) else -1
        for each in results
    ]
    return Allocations(events=events, owners=owners)
