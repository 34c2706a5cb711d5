"""Capture items as CUDA graphs, which share memory and replay in the order of a step."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halley.lanes.cut import Item
from halley.lanes.segment_compiler import Call


def can_capture(item: Item) -> bool:
    """Return whether a CUDA graph can replay an item: static sizes, no operator tagged unsafe."""
    targets = [node.target for node in item.code.nodes] if item.code else []
    unsafe = torch.Tag.cudagraph_unsafe
    return item.is_static and not any(unsafe in getattr(each, "tags", ()) for each in targets)


@final
class SegmentGraphs:
    """Captures items as CUDA graphs, which share a memory pool and replay in the order of capture.

    A CUDA graph has the addresses of its tensors. So no item has the graph of another microbatch's
    item, and a graph copies inputs whose addresses may change. It may use the memory of values
    whose last reader comes earlier in the order: the order is the same in each step. So a replay
    returns tensors that do not own their memory.

    Args:
        num_bytes: expected size of the pool, which then is one piece. Else torch allocates a piece
            for each large tensor, and cannot join free pieces for a larger tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        gc.collect()  # frees CUDA objects now: freeing them during a capture would break it
        torch.cuda.empty_cache()  # the pool needs the memory that earlier steps have freed
        size = {"dtype": torch.uint8, "device": "cuda"}
        self._first: list[torch.cuda.CUDAGraph] = []
        # If these two find no memory, torch allocates memory as the graphs need it.
        with suppress(torch.OutOfMemoryError):
            # The first GEMM of a stream allocates the workspace of cuBLAS. torch 2.11 never frees
            # it: as a part of the large piece, it would keep the piece when graphs are made again.
            # So each pool has a stream of its own: on that of an earlier pool, the workspace would
            # be in the memory of that pool, which may be freed.
            self._first += [self._record(lambda: torch.mm(*torch.ones(2, 16, 16, device="cuda")))]
            self._first += [self._record(lambda: torch.zeros(max(num_bytes, 1), **size))]

    def _record(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of what ``run`` does, with memory of the pool."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph

    def capture(
        self, call: Call, values: list[Any], fixed: Sequence[bool], *, kept: Sequence[bool]
    ) -> tuple[Call, list[bool]]:
        """Capture ``call`` as a CUDA graph without running it; return a function that replays it.

        The first replay must come before the next capture. Its results own their memory. The caller
        must keep them until their last reader has run, or has been captured if it is captured too:
        then later captures may use the memory.

        Args:
            values: tensors of the shapes to capture. ``call`` gets this list, with copies, and may
                empty it to free memory.
            fixed: for each value, whether it keeps its address.
            kept: for each result, whether no later capture may use its memory.

        Returns:
            The function, and for each result whether nothing but its replay writes to its memory.

        Raises:
            RuntimeError: the capture fails; or a tensor of ``values`` is on the CPU, where a replay
                cannot read its new value.
        """
        for value in values:
            if isinstance(value, torch.Tensor) and not value.is_cuda:
                raise RuntimeError(f"an input of shape {tuple(value.shape)} is on {value.device}")
        owned, copied = list[Sequence[Any]](), list[tuple[int, Any]]()
        storages: list[StorageWeakRef] = []

        def run() -> None:
            for at, is_fixed in enumerate(fixed):
                if not is_fixed:
                    values[at] = values[at].new_empty_strided(values[at].shape, values[at].stride())
                    copied.append((at, share_memory(values[at])))
            # While these weak references exist, no new storage gets the id of a freed one.
            storages.extend(StorageWeakRef(each) for each in _storages(values))
            owned.append(call(values))

        graph = self._record(run)
        num_users = Counter(each.cdata for each in storages)
        num_users.update(each._cdata for each in _storages(owned[0]))
        lasts = [
            is_kept and num_users[each.untyped_storage()._cdata] == 1
            for each, is_kept in zip(owned[0], kept, strict=True)
        ]
        outputs = [
            each if is_own else share_memory(each)
            for each, is_own in zip(owned[0], lasts, strict=True)
        ]

        def replay(values: list[Any]) -> Sequence[Any]:
            for at, copy in copied:
                copy.copy_(values[at])
            graph.replay()
            return owned.pop() if owned else outputs

        return replay, lasts


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in values if isinstance(each, torch.Tensor)]


def share_memory(value: Any) -> Any:
    """Return a tensor with the memory of another one, which it does not own.

    The memory must be that of a CUDA graph's pool, which stays mapped as long as the graph exists,
    or of a parameter. Numbers and CPU tensors are returned as they are.
    """
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), value.device, storage.nbytes()
    )
    shared = torch.empty(0, dtype=value.dtype, device=value.device)
    return shared.set_(memory, value.storage_offset(), value.shape, value.stride())
