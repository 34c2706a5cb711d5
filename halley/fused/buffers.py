"""Buffers of fused MoE layers: one workspace per layer shape, shared by all its layers."""

import itertools
import math
import weakref
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, final

import torch
import torch.distributed as dist

from halley.core.timeline import CURRENT_OPERATION
from halley.core.types import check_tp_size
from halley.distributed.peers import all_gather_objects, compare_ranks, rank_and_size
from halley.fused.config import ConfigTable, KernelConfig, TunedShape, default_config
from halley.fused.forward_count import ForwardCount
from halley.fused.kernels.layout import NUM_COUNTERS, TASK_ROWS, KernelContext, Layout, make_layout
from halley.fused.kernels.marks import ProgramRecords, make_status
from halley.fused.kernels.peer import HOST_STATUS_WORDS, check, is_overflow, overflow_rows
from halley.fused.replay import LaunchCache, PlanSize, PlanSizes, round_up_rows
from halley.ops.kernels.launch import current_stream
from halley.symm_mem.heap import AbstractSymmHeap, SymmTensor, open_heap


_CPU_BLOCK_SLOTS = 64  # slots of a block (GPU: 256); the interpreter's time grows with its square
_GROWTH = 1.25  # a buffer grows to this multiple of the size that is needed
_TOKEN_MULTIPLE = 64  # grown buffers hold a multiple of this number of tokens


class BufferShape(NamedTuple):
    """Sizes and dtype of a layer, equal on all ranks; layers with the same values share buffers."""

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    tp_size: int = 1


@final
class Workspace:
    """Buffers of all fused layers of one shape, which run one pass at a time in stream order.

    A pass is a forward, a recompute dispatch or a backward of a layer. All ranks begin the same
    passes in the same order.

    Args:
        max_tokens: initial capacity in tokens per rank, equal on all ranks; the buffers can grow.
        max_load, timeout_s, reserved_sms, records: as for ``Workspaces``.
        plan_ids: yields a new id for each layout.

    Attributes:
        layout: offsets in the routing buffer and in new plans; changes when the buffers grow.
        plan_id: id of ``layout``, one int64 on the CPU. A tensor, because it is saved for backward
            beside each plan. If activation checkpointing runs forward again after the buffers have
            grown, it replaces the saved tensors, but not attributes of the autograd context.
        layouts: by plan id, also old layouts, which the backward of earlier calls needs.
        max_rows: capacity in rows if ``max_load`` is set, else 0; ``ended`` then counts forwards.
        compiled: kinds of layers whose kernels are compiled; ``FusedStrategy`` fills it.
    """

    def __init__(
        self,
        shape: BufferShape,
        *,
        heap: AbstractSymmHeap,
        config: KernelConfig,
        max_tokens: int,
        max_load: float,
        timeout_s: float,
        reserved_sms: int,
        records: ProgramRecords | None,
        plan_ids: Iterator[int],
    ) -> None:
        device = heap.device
        self.shape, self.heap, self.config, self.timeout_s = shape, heap, config, timeout_s
        self.num_sms = config.num_programs or (
            torch.cuda.get_device_properties(device).multi_processor_count - reserved_sms
        )
        on_gpu = device.type == "cuda"
        # Leave inference mode (evaluation may use it): training cannot write tensors made in it.
        with torch.inference_mode(mode=False):
            self.status = make_status(records, device)
            self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            self.host_status = torch.zeros(HOST_STATUS_WORDS, dtype=torch.int64, pin_memory=on_gpu)
        self._records, self._plan_ids = records, plan_ids
        self._host_words = self.host_status.numpy()  # same memory; a tensor would be slower to read
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._plan_event = torch.cuda.Event() if on_gpu and not max_load else None
        self.ended = ForwardCount(device)
        self.layouts: dict[int, Layout] = {}
        self.launches = LaunchCache()
        self.compiled: set[tuple[object, ...]] = set()
        self.layout, self.plan_id, self._symmetric = self._allocate(max_tokens)
        self._max_tokens = max_tokens
        self.max_rows = self.rows_for(max_tokens, load=max_load) if max_load else 0
        bound = min(self.max_rows + 2 * TASK_ROWS, self.layout.max_copies)
        fixed = PlanSize(num_rows=self.max_rows, num_copies=bound) if max_load else None
        self.plan_sizes = PlanSizes(config.block_m, fixed=fixed)

    @property
    def symmetric_bytes(self) -> int:
        """Number of bytes of this rank's buffers that kernels of other ranks read or write."""
        return sum(tensor.local.nbytes for tensor in self._symmetric)

    def rows_for(self, num_tokens: int, *, load: float = _GROWTH) -> int:
        """Return the rows of a rank that gets ``load`` times the mean of ``num_tokens`` a rank."""
        num_rows = int(load * num_tokens * self.shape.top_k * self.shape.tp_size)
        num_rows += self.config.block_m * self.layout.num_local  # each expert's last tile
        num_rows = min(num_rows, self.layout.max_tiles * self.config.block_m)
        return round_up_rows(num_rows, multiple=self.config.block_m)

    def needed_load(self) -> float:
        """Return a ``max_load`` with room for the rows of an overflow, or 0 without one."""
        num_rows = overflow_rows(self.host_status) - self.config.block_m * self.layout.num_local
        balanced = self._max_tokens * self.shape.top_k * self.shape.tp_size
        return max(0, math.ceil(100 * num_rows / balanced)) / 100

    def context(self, layout: Layout | None = None) -> KernelContext:
        """Return buffers and settings for kernels; ``layout`` defaults to the newest layout."""
        routing, send, combine, dweights = self._symmetric
        return KernelContext(
            layout=layout or self.layout,
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
        """Raise if a kernel has failed; wait for the previous pass if it ran on another stream.

        After a failure the workspace stays unusable, because the ranks may have run different
        numbers of passes. While a CUDA graph is captured, no stream waits.
        """
        self.check()
        CURRENT_OPERATION.begin("a pass of a fused layer")
        device, previous = self.heap.device, self._stream
        if previous is None or current_stream(device.index) == previous.cuda_stream:
            return
        # The previous stream may still use the buffers. A captured graph cannot wait for that
        # stream, so the caller must order the replays of a graph.
        if not torch.cuda.is_current_stream_capturing():
            self._stream = torch.cuda.current_stream(device)
            self._stream.wait_stream(previous)

    def record_plan_event(self) -> None:
        """Record the CUDA event (if any) on which ``read_plan`` waits; call after ``make_plan``."""
        if self._plan_event is not None:
            self._plan_event.record(self._stream)

    def persistent_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the workspace; their addresses change only when it grows."""
        symmetric = [part for each in self._symmetric for part in (each.local, each.ptrs_W)]
        return [self.status, self.counters, self.host_status, *symmetric]

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a kernel of this workspace has ever reported a failure."""
        is_repeated = Workspaces.in_bounded_step and is_overflow(self.host_status)
        if self._host_words[0] and not is_repeated:  # the failure code, see ``kernels/peer.py``
            check(self.host_status, rank=self.heap.rank, timeout_s=self.timeout_s)

    def read_plan(self, up_LGD: torch.Tensor | None = None, *, part: int = 0) -> PlanSize:
        """Wait for the newest plan, return its sizes; with ``max_load``, only return fixed sizes.

        A failed wait, or capture of a CUDA graph without ``max_load``, is a ``RuntimeError``.
        """
        if self._plan_event is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph of strategy fused needs max_load: without, the host reads how "
                    "many rows each call has"
                )
            with CURRENT_OPERATION.waiting("the plan of a fused layer"):
                self._plan_event.synchronize()
        self.check()
        if self.plan_sizes.fixed is not None:
            return self.plan_sizes.fixed
        _, num_rows, needed_tokens, num_copies = self._host_words.tolist()
        size = PlanSize(num_rows=num_rows, num_copies=num_copies, needed_tokens=needed_tokens)
        return self.plan_sizes.note(size, up_LGD, part=part)

    def grow_tokens(self, num_tokens: int) -> None:
        """Collectively replace the symmetric buffers by ones for more than ``num_tokens`` tokens.

        If a rank has too little memory, all ranks raise a ``MemoryError`` and keep the old buffers.
        """
        capacity = -(-int(_GROWTH * num_tokens) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        old = self._symmetric
        self.layout, self.plan_id, self._symmetric = self._allocate(capacity)
        self.launches.clear()
        self._free(old)

    def _allocate(self, max_tokens: int) -> tuple[Layout, torch.Tensor, list[SymmTensor]]:
        """Allocate symmetric buffers; return layout, plan id and buffers. A collective."""
        shape, num_ranks = self.shape, self.heap.num_ranks
        sizes = {"block_slots": _CPU_BLOCK_SLOTS} if self.heap.device.type == "cpu" else {}
        sizes["max_marks"] = self._records.max_marks if self._records else 0
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
        return layout, plan_id, tensors

    def _free(self, tensors: list[SymmTensor]) -> None:
        for tensor in tensors:
            self.heap.free(tensor)


# The schema of an operator has no type for Python objects. Weak: strategies own the buffers.
_BY_HANDLE: "weakref.WeakValueDictionary[int, Workspaces]" = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


@final
class Workspaces:
    """Buffers of the fused layers of one group of ranks: a ``Workspace`` for each layer shape.

    Layers with the same ``Workspaces`` share memory; ``close`` or deletion of the object frees it.

    Args:
        group: ranks that share the experts; None for a single rank.
        tp_size: number of consecutive ranks that each hold one shard of the same experts.
        max_tokens: initial capacity in tokens per rank; 0 means the largest number of tokens of
            any rank in the first call. A later call with more tokens makes the buffers grow.
        max_load: 0, or the capacity in rows as a multiple of the balanced load, equal on all ranks.
            With a capacity, the host never reads the number of rows, so that a CUDA graph can
            capture layers. More rows or tokens than the capacity are an error.
        timeout_s: time limit of a kernel's wait for a peer, in seconds; the default is NCCL's.
        reserved_sms: SMs that the kernels leave to kernels of NCCL, which run at the same time.
        records: memory in which all CTAs of the kernels record their phases; None records nothing.
        config: settings of the kernels; None uses tuned ones (``config.py``), or the defaults.

    Attributes:
        handle: integer that ``find_workspaces`` maps to this object.
        bounded: buffers with ``max_load``, for calls in a ``BoundedStep``; None for these buffers.
        ordering_token: one int32 that keeps the passes of compiled graphs in order; see ``op.py``.
    """

    in_bounded_step: ClassVar[bool] = False  # whether a ``BoundedStep`` runs, see ``bounded.py``

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        *,
        tp_size: int = 1,
        max_tokens: int = 0,
        max_load: float = 0.0,
        timeout_s: float = 600.0,
        config: KernelConfig | None = None,
        reserved_sms: int = 0,
        records: ProgramRecords | None = None,
    ) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens ({max_tokens}) must be at least 0")
        if max_load and not max_load >= 1:
            raise ValueError(f"max_load ({max_load}) must be at least 1, or 0 for any load")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s ({timeout_s}) must be above 0")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.device, self.tp_size, self.max_tokens = group, device, tp_size, max_tokens
        self.num_ranks = rank_and_size(group)[1]
        check_tp_size(tp_size, num_ranks=self.num_ranks)
        self.config = config or default_config(device)
        self._tuned = None
        if config is None:
            self._tuned = ConfigTable.load(device, num_ranks=self.num_ranks, tp_size=tp_size)
        self.handle = next(_next_handle)
        self.bounded: Workspaces | None = None
        with torch.inference_mode(mode=False):  # inference tensors cannot be written in training
            self.ordering_token = torch.zeros(1, dtype=torch.int32, device=device)
        self._limits = {"max_load": max_load, "timeout_s": timeout_s, "reserved_sms": reserved_sms}
        self._records = records
        self._heap: AbstractSymmHeap | None = None
        self._by_shape: dict[BufferShape, Workspace] = {}
        self._plan_ids = itertools.count()
        _BY_HANDLE[self.handle] = self

    def num_experts(self, num_local: int) -> int:
        """Return how many experts all ranks hold if each holds ``num_local`` experts or shards."""
        return num_local * self.num_ranks // self.tp_size

    def find(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, up_LGD: torch.Tensor
    ) -> Workspace:
        """Return the workspace for a layer's shape; a shape's first call makes it, collectively.

        Raises:
            ValueError: the ranks differ in the shape, or in arguments of this object.
            RuntimeError: the ranks cannot address each other's memory, or one of them is missing.
            MemoryError: a rank has too little memory.
        """
        num_experts, top_k = self.num_experts(up_LGD.shape[0]), topk_idx_TK.shape[1]
        shape = BufferShape(x_TD.shape[1], num_experts, top_k, x_TD.dtype, self.tp_size)
        return self._by_shape.get(shape) or self._make(shape, x_TD.shape[0])

    def find_plan(self, plan_id: int) -> tuple[Workspace, Layout]:
        """Return the workspace and layout of a plan; RuntimeError if the workspace was closed."""
        for workspace in self._by_shape.values():
            if plan_id in workspace.layouts:
                return workspace, workspace.layouts[plan_id]
        raise RuntimeError("the workspaces of this plan were closed before its backward")

    def all(self) -> list[Workspace]:
        """Return the workspaces of all layer shapes, oldest first."""
        return list(self._by_shape.values())

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a kernel of any workspace has reported a failure."""
        for workspace in self._by_shape.values():
            workspace.check()

    def close(self) -> None:
        """Free the memory of all workspaces; a collective. The next layer call allocates again."""
        self._by_shape.clear()
        for each in (self._heap, self.bounded):
            if each is not None:
                each.close()
        self._heap = None

    def _make(self, shape: BufferShape, num_tokens: int) -> Workspace:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a layer must run once before it is captured in a CUDA graph")
        # The name is "fused" for unfused layers too: fused and unfused layers share workspaces.
        values = {"strategy": "fused", **shape._asdict(), "max_load": self._limits["max_load"]}
        values |= {"device": self.device.type, "workspaces": len(self._by_shape)}
        compare_ranks("an MoE layer", values, group=self.group)
        if self._heap is None:
            try:
                self._heap = open_heap(self.group, self.device)
            except RuntimeError as error:
                advice = "the strategies sequential and chunked need none"
                raise RuntimeError(f"{error}; {advice}") from error
        config = self.config
        if self._tuned is not None:
            wanted = TunedShape(
                hidden_size=shape.hidden_size,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                dtype=str(shape.dtype).removeprefix("torch."),
                num_tokens=max(self.max_tokens, num_tokens),
            )
            config = self._tuned.find(wanted, base=config)
        operation = "the making of buffers for a fused layer"
        by_rank = all_gather_objects((num_tokens, config), group=self.group, operation=operation)
        most_tokens = max(self.max_tokens, 1, *(num_tokens for num_tokens, _ in by_rank))
        self._by_shape[shape] = Workspace(
            shape,
            heap=self._heap,
            config=by_rank[0][1],  # rank 0's, because all ranks need the same layout of records
            max_tokens=most_tokens,
            plan_ids=self._plan_ids,
            records=self._records,
            **self._limits,
        )
        return self._by_shape[shape]


def find_workspaces(handle: int) -> Workspaces:
    """Return the ``Workspaces`` of this handle for a call now; RuntimeError if they are deleted."""
    found = _BY_HANDLE.get(handle)
    if found is None:
        raise RuntimeError(f"workspaces ({handle}) no longer exist: their strategy was deleted")
    return found.bounded if Workspaces.in_bounded_step and found.bounded else found
