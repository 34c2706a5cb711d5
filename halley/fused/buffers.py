"""Memory that fused layers of one shape share: symmetric buffers, scratch rows, status words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from halley.core.timeline import CURRENT_OPERATION
from halley.fused.config import KernelConfig
from halley.fused.kernels.layout import (
    NUM_COUNTERS,
    TASK_ROWS,
    KernelContext,
    Layout,
    make_layout,
)
from halley.fused.kernels.peer import HOST_STATUS_WORDS, STATUS_WORDS, check
from halley.fused.replay import LaunchCache
from halley.ops.kernels.launch import current_stream
from halley.symm_mem.heap import AbstractSymmHeap, SymmTensor


_CPU_BLOCK_SLOTS = 64  # fewer than on a GPU: the interpreter's time grows with their square
_FAILURE, _ROWS, _NEEDED_TOKENS, _COPIES = range(4)  # words of host_status, see kernels/peer.py
_STEPS = 64  # row counts are rounded in steps of 1/128 to 1/64 of the count
_GROWTH = 1.25  # a buffer grows to this multiple of the size that is needed
_TOKEN_MULTIPLE = 64


class BufferShape(NamedTuple):
    """The sizes that decide which layers can share buffers; equal on all ranks."""

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    tp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanSize:
    """Sizes of a dispatch plan that the host needs to allocate tensors."""

    num_rows: int  # of this rank's experts, padded to whole tiles, at least one tile
    num_copies: int  # length of the fetch list, with its unused entries
    needed_tokens: int = 0  # the most tokens of a rank if the buffers are too small, else 0


@dataclass(frozen=True, kw_only=True)
class _SymmetricBuffers:
    """Symmetric memory that kernels of the other ranks read and write, see ``KernelContext``."""

    layout: Layout
    plan_id: torch.Tensor
    tensors: list[SymmTensor]


@final
class Workspace:
    """Memory of one buffer shape, shared by layers that run one pass at a time in stream order.

    A pass is a forward, a recompute dispatch or a backward of a layer. All ranks begin the same
    passes in the same order.

    Args:
        heap: allocates the symmetric buffers and owns their memory.
        max_tokens: capacity in tokens of a rank, equal on all ranks. The buffers grow when a call
            has more.
        max_load, timeout_s, config: see ``Workspaces``.
        plan_ids: yields a new id for each layout.
        reserved_sms: SMs of the GPU that the kernels leave to other kernels.

    Attributes:
        layouts: layouts of plans, by plan id. It keeps old ones for the backward of old calls.
        max_rows: capacity in rows if ``max_load`` is set, else 0.
        rows_RD: scratch: the input rows of the first GEMM, then the output rows of the second GEMM.
        launches: recorded launches of earlier passes.
        compiled: kinds of layers whose kernels are compiled; ``FusedStrategy`` fills it.
    """

    def __init__(
        self,
        shape: BufferShape,
        *,
        heap: AbstractSymmHeap,
        config: KernelConfig,
        max_tokens: int,
        timeout_s: float,
        plan_ids: Iterator[int],
        max_load: float = 0.0,
        reserved_sms: int = 0,
    ) -> None:
        device = heap.device
        self.shape, self.heap, self.config, self.timeout_s = shape, heap, config, timeout_s
        self.num_sms = config.num_programs
        if self.num_sms == 0:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            self.num_sms = num_sms - reserved_sms
        on_gpu = device.type == "cuda"
        # Training may use tensors that were allocated under inference mode, and must write them.
        with torch.inference_mode(mode=False):
            self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device)
            self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            self.host_status = torch.zeros(HOST_STATUS_WORDS, dtype=torch.int64, pin_memory=on_gpu)
        self._host_words = self.host_status.numpy()  # same memory; a tensor would be slower to read
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._plan_event = torch.cuda.Event() if on_gpu and not max_load else None
        self._plan_ids = plan_ids
        self.layouts: dict[int, Layout] = {}
        self._last_size = PlanSize(num_rows=0, num_copies=0)
        self._last_sizes_by_layer: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.launches = LaunchCache()
        self.compiled: set[tuple[object, ...]] = set()
        self._buffers = self._allocate(max_tokens)
        balanced = max_tokens * shape.top_k * shape.tp_size
        num_rows = int((max_load or _GROWTH) * balanced) + config.block_m * self.layout.num_local
        num_rows = min(num_rows, self._most_rows())
        num_bytes = num_rows * shape.hidden_size * shape.dtype.itemsize
        try:
            self.rows_RD = heap.on_all_ranks(num_bytes, partial(self._make_rows, num_rows))
        except MemoryError:
            self._free(self._buffers.tensors)
            raise
        self.max_rows = self.row_capacity if max_load else 0

    @property
    def layout(self) -> Layout:
        """Offsets of the routing buffer and of new plans; changes when the buffers grow."""
        return self._buffers.layout

    @property
    def plan_id(self) -> torch.Tensor:
        """Id of ``layout``, one int64 on the CPU.

        It is a tensor because it is saved for backward beside each plan. Under activation
        checkpointing, forward may run again after the buffers have grown. Then the saved tensors
        are replaced, but attributes of the autograd context are not.
        """
        return self._buffers.plan_id

    @property
    def row_capacity(self) -> int:
        """Capacity in rows of the scratch ``rows_RD``."""
        return self.rows_RD.shape[0]

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of this rank's memory that kernels of the other ranks read and write."""
        return sum(tensor.local.nbytes for tensor in self._buffers.tensors)

    def context(self, layout: Layout | None = None) -> KernelContext:
        """Return the buffers and settings for the launches of a pass; by default, of ``layout``."""
        routing, send, combine, dweights = self._buffers.tensors
        return KernelContext(
            layout=self.layout if layout is None else layout,
            config=self.config,
            rank=self.heap.rank,
            num_sms=self.num_sms,
            routing_buffer=routing,
            send_buffer=send,
            combine_buffer=combine,
            dweight_buffer=dweights,
            counters=self.counters,
            status=self.status,
            host_status=self.host_status,
            timeout_ns=int(self.timeout_s * 1e9),
        )

    def begin_pass(self) -> None:
        """Begin a pass: raise failures of earlier ones, and wait for passes on other CUDA streams.

        Raises:
            RuntimeError: an earlier wait failed. The workspace stays unusable, because the ranks
                may have run different numbers of passes.
        """
        self.check()
        CURRENT_OPERATION.begin("a pass of a fused layer")
        if self._stream is None:
            return
        device = self.heap.device
        if current_stream(device.index) != self._stream.cuda_stream:
            stream = torch.cuda.current_stream(device)
            # The other stream may still use the scratch. A captured graph cannot wait for it: the
            # caller orders the replays of a graph.
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
                self._stream = stream

    def record_plan_event(self) -> None:
        """Record a CUDA event after the plan kernel, for which ``read_plan`` waits."""
        if self._plan_event is not None:
            self._plan_event.record(self._stream)

    def persistent_tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the workspace. Their addresses change only when it grows."""
        symmetric = [part for each in self._buffers.tensors for part in (each.local, each.ptrs_W)]
        return [self.status, self.counters, self.host_status, self.rows_RD, *symmetric]

    def check(self) -> None:
        """Raise an error if a kernel has reported a failure; do not wait for running kernels.

        Raises:
            RuntimeError: a wait of this rank failed. All later calls raise the same error.
        """
        if self._host_words[_FAILURE]:
            check(self.host_status, rank=self.heap.rank, timeout_s=self.timeout_s)

    def predict_size(self, up_LGD: torch.Tensor, *, part: int = 0) -> PlanSize:
        """Predict the sizes of a layer's next dispatch plan; 0 rows if there was no plan yet.

        The prediction is the size of the layer's last plan plus a margin, or that of the last plan
        of any layer. With it, the host launches a pass before it can read the plan. The first
        projection ``up_LGD`` identifies the layer, and ``part`` the call of a layer that runs its
        tokens in several calls.
        """
        if self.max_rows:
            return self._bounded_size()
        last: PlanSize = self._last_sizes_of(up_LGD).get(part, self._last_size)
        return PlanSize(
            num_rows=rows_with_margin(last.num_rows, multiple=self.config.block_m),
            num_copies=rows_with_margin(last.num_copies, multiple=TASK_ROWS),
        )

    def read_plan(self, up_LGD: torch.Tensor | None = None, *, part: int = 0) -> PlanSize:
        """Return the size of the newest dispatch plan, rounded up in coarse steps.

        Waits for the plan kernel, but not for later kernels. With ``max_load`` it returns the
        capacity without waiting. ``up_LGD`` and ``part`` are for the next ``predict_size``.

        Raises:
            RuntimeError: a peer did not publish its routing, or a CUDA graph is being captured and
                ``max_load`` is 0.
        """
        if self.max_rows:
            self.check()  # on a CPU the plan kernel has finished by now
            return self._bounded_size()
        if self._plan_event is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph of strategy fused needs max_load: without, the host reads how "
                    "many rows each call has"
                )
            with CURRENT_OPERATION.waiting("the plan of a fused layer"):
                self._plan_event.synchronize()
        self.check()
        block_m = self.config.block_m
        size = PlanSize(
            num_rows=round_up_rows(max(int(self._host_words[_ROWS]), block_m), multiple=block_m),
            num_copies=round_up_rows(int(self._host_words[_COPIES]), multiple=TASK_ROWS),
            needed_tokens=int(self._host_words[_NEEDED_TOKENS]),
        )
        if not size.needed_tokens:
            self._last_size = size
            if up_LGD is not None:
                self._last_sizes_of(up_LGD)[part] = size
        return size

    def _last_sizes_of(self, up_LGD: torch.Tensor) -> dict[int, PlanSize]:
        """Return the sizes of a layer's last dispatch plans, by number of the layer part."""
        if up_LGD not in self._last_sizes_by_layer:
            self._last_sizes_by_layer[up_LGD] = {}
        return self._last_sizes_by_layer[up_LGD]

    def grow_tokens(self, num_tokens: int) -> None:
        """Replace the symmetric buffers by buffers for more tokens; a collective.

        Raises:
            MemoryError: a rank has too little memory. All ranks raise it and keep the old buffers.
        """
        old, self._buffers = self._buffers, self._allocate(token_capacity(num_tokens))
        self.launches.clear()
        self._free(old.tensors)

    def grow_rows(self, num_rows: int) -> None:
        """Replace ``rows_RD`` by a buffer of more rows; the other ranks take no part."""
        grown = min(int(_GROWTH * num_rows), self._most_rows())
        self.rows_RD = self._make_rows(max(num_rows, grown))
        self.launches.clear()

    def _bounded_size(self) -> PlanSize:
        num_copies = min(self.max_rows + 2 * TASK_ROWS, self.layout.max_copies)
        return PlanSize(num_rows=self.max_rows, num_copies=num_copies)

    def _most_rows(self) -> int:
        return self.layout.max_tiles * self.config.block_m

    def _make_rows(self, num_rows: int) -> torch.Tensor:
        num_rows = round_up_rows(num_rows, multiple=self.config.block_m)
        shape = (num_rows, self.shape.hidden_size)
        return torch.empty(shape, dtype=self.shape.dtype, device=self.heap.device)

    def _allocate(self, max_tokens: int) -> _SymmetricBuffers:
        shape, num_ranks = self.shape, self.heap.num_ranks
        sizes = {"block_slots": _CPU_BLOCK_SLOTS} if self.heap.device.type == "cpu" else {}
        layout = make_layout(
            num_ranks=num_ranks,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            tp_size=shape.tp_size,
            # Kernels are compiled for each layout. Powers of two keep the number of layouts small.
            max_tokens=1 << (max_tokens - 1).bit_length(),
            block_m=self.config.block_m,
            **sizes,
        )
        tensors: list[SymmTensor] = []
        try:
            tensors.append(self.heap.zeros((layout.routing_words,), torch.int32))
            for count in (2, num_ranks):
                tensors.append(self.heap.zeros((count, max_tokens, shape.hidden_size), shape.dtype))
            tensors.append(self.heap.zeros((num_ranks, max_tokens, shape.top_k), torch.float32))
        except MemoryError:
            self._free(tensors)
            raise
        number = next(self._plan_ids)
        self.layouts[number] = layout
        with torch.inference_mode(mode=False):  # inference tensors cannot be saved for backward
            plan_id = torch.tensor([number])
        return _SymmetricBuffers(layout=layout, plan_id=plan_id, tensors=tensors)

    def _free(self, tensors: list[SymmTensor]) -> None:
        for tensor in tensors:
            self.heap.free(tensor)


def rows_with_margin(num_rows: int, *, multiple: int) -> int:
    """Predict the rows of the dispatch plan after one of ``num_rows``: 1/64 more, rounded up."""
    return round_up_rows(num_rows + num_rows // _STEPS, multiple=multiple)


def round_up_rows(num_rows: int, *, multiple: int) -> int:
    """Round a row count up to a multiple, in steps of at most 1/64 of the count.

    Coarse steps make the sizes of successive passes equal, so that recorded launches fit.
    """
    num_tiles = -(-num_rows // multiple)
    step = 1 << max(0, (num_tiles // _STEPS).bit_length() - 1)
    return -(-num_tiles // step) * step * multiple


def token_capacity(num_tokens: int) -> int:
    """Return the size of grown buffers: ``num_tokens`` plus 25 %, as a multiple of 64."""
    return -(-int(_GROWTH * num_tokens) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
