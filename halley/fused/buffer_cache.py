"""The buffers of all fused layers of a group of ranks: one workspace for each buffer shape."""

import itertools
import weakref
from typing import final

import torch
import torch.distributed as dist

from halley.core.routing import check_tp_size
from halley.distributed.peers import all_gather_objects, compare_ranks, rank_and_size
from halley.fused.buffers import BufferShape, Workspace
from halley.fused.config import (
    ConfigTable,
    KernelConfig,
    TunedShape,
    config_path,
    default_config,
    tuning_environment,
)
from halley.fused.kernels.layout import Layout
from halley.symm_mem.heap import AbstractSymmHeap, open_heap


# The schema of a torch operator has no type for Python objects, so operators get an integer handle.
# The references are weak: the strategy owns the buffers.
_BY_HANDLE: "weakref.WeakValueDictionary[int, Workspaces]" = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


@final
class Workspaces:
    """Buffers of the fused layers of one group of ranks.

    Layers with the same object share memory. ``close``, or the end of the last reference, frees it.

    Args:
        group: ranks that share the experts; None for a single rank.
        device: of this rank.
        tp_size: consecutive ranks that hold shards of the same experts, split by intermediate size.
        max_tokens: first capacity in tokens of a rank; 0 takes the largest number of the first
            call. A call with more tokens makes the buffers grow.
        max_load: 0, or the capacity in rows as a multiple of the balanced load, equal on all ranks.
            With a capacity, the host never reads the number of rows, so that a CUDA graph can
            capture layers. More rows or tokens than the capacity are an error.
        timeout_s: time limit of a kernel's wait for a peer, in seconds. The default is that of
            NCCL: ranks are minutes apart when one of them compiles or writes a checkpoint.
        reserved_sms: SMs that the kernels leave to kernels of NCCL, which run at the same time.
        config: settings of the kernels; None uses tuned ones (``config.py``), or the defaults.

    Attributes:
        handle: integer that ``find_workspaces`` maps to this object.
        ordering_token: one int32 that keeps the passes of compiled graphs in order; see ``op.py``.

    Raises:
        ValueError: a size is out of range.
    """

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
    ) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens ({max_tokens}) must be at least 0")
        if max_load and not max_load >= 1:
            raise ValueError(f"max_load ({max_load}) must be at least 1, or 0 for any load")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s ({timeout_s}) must be above 0")
        device = _with_index(torch.device(device))
        self.group, self.device, self.timeout_s = group, device, timeout_s
        self.max_tokens, self.max_load = max_tokens, max_load
        self.reserved_sms = reserved_sms
        self.config = config or default_config(device)
        self.num_ranks, self.tp_size = rank_and_size(group)[1], tp_size
        check_tp_size(tp_size, num_ranks=self.num_ranks)
        self._tuned: ConfigTable | None = None
        if config is None:
            environment = tuning_environment(device, num_ranks=self.num_ranks, tp_size=tp_size)
            self._tuned = ConfigTable(config_path(), environment)
        self.handle = next(_next_handle)
        with torch.inference_mode(mode=False):  # training writes the token after inference
            self.ordering_token = torch.zeros(1, dtype=torch.int32, device=device)
        self._heap: AbstractSymmHeap | None = None
        self._by_shape: dict[BufferShape, Workspace] = {}
        self._plan_ids = itertools.count()
        _BY_HANDLE[self.handle] = self

    def num_experts(self, num_local: int) -> int:
        """Return the number of experts of all ranks if each rank holds ``num_local`` of them."""
        return num_local * self.num_ranks // self.tp_size

    def find(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, up_LGD: torch.Tensor
    ) -> Workspace:
        """Return the workspace of a layer; a collective if the workspace does not exist yet.

        Raises:
            ValueError: the ranks differ in the shape, or in arguments of this object.
            RuntimeError: the ranks cannot address each other's memory, or one of them is missing.
            MemoryError: a rank has too little memory.
        """
        num_experts = self.num_experts(up_LGD.shape[0])
        shape = BufferShape(
            x_TD.shape[1], num_experts, topk_idx_TK.shape[1], x_TD.dtype, self.tp_size
        )
        return self._by_shape.get(shape) or self._make(shape, x_TD.shape[0])

    def find_plan(self, plan_id: int) -> tuple[Workspace, Layout]:
        """Return the workspace that made a plan, and its layout; RuntimeError if it is closed."""
        for workspace in self._by_shape.values():
            if plan_id in workspace.layouts:
                return workspace, workspace.layouts[plan_id]
        raise RuntimeError("the workspaces of this plan were closed before its backward")

    def all(self) -> list[Workspace]:
        """Return the workspaces in the order in which they were made."""
        return list(self._by_shape.values())

    def check(self) -> None:
        """Raise a ``RuntimeError`` if a kernel has reported a failure; see ``Workspace.check``."""
        for workspace in self._by_shape.values():
            workspace.check()

    def close(self) -> None:
        """Free all memory; a collective. The next call of a layer makes new workspaces."""
        self._by_shape.clear()
        heap, self._heap = self._heap, None
        if heap is not None:
            heap.close()

    def _make(self, shape: BufferShape, num_tokens: int) -> Workspace:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a layer must run once before it is captured in a CUDA graph")
        # "fused" also for layers of strategy unfused, because both share the workspaces.
        values = {"strategy": "fused", **shape._asdict(), "max_load": self.max_load}
        values |= {"device": self.device.type, "workspaces": len(self._by_shape)}
        compare_ranks("an MoE layer", values, group=self.group)
        if self._heap is None:
            try:
                self._heap = open_heap(self.group, self.device)
            except RuntimeError as error:
                advice = "the strategies sequential and chunked need none"
                raise RuntimeError(f"{error}; {advice}") from error
        own = (num_tokens, self._find_config(shape, num_tokens))
        by_rank = all_gather_objects(
            own, group=self.group, operation="the making of buffers for a fused layer"
        )
        most_tokens = max(num_tokens for num_tokens, _ in by_rank)
        self._by_shape[shape] = Workspace(
            shape,
            heap=self._heap,
            reserved_sms=self.reserved_sms,
            config=by_rank[0][1],  # of the first rank, because the layout of records depends on it
            max_tokens=max(self.max_tokens, most_tokens, 1),
            timeout_s=self.timeout_s,
            plan_ids=self._plan_ids,
            max_load=self.max_load,
        )
        return self._by_shape[shape]

    def _find_config(self, shape: BufferShape, num_tokens: int) -> KernelConfig:
        if self._tuned is None:
            return self.config
        wanted = TunedShape(
            hidden_size=shape.hidden_size,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            dtype=str(shape.dtype).removeprefix("torch."),
            num_tokens=max(self.max_tokens, num_tokens),
        )
        return self._tuned.find(wanted, base=self.config)


def find_workspaces(handle: int) -> Workspaces:
    """Return the ``Workspaces`` of a handle; a RuntimeError if they no longer exist."""
    found = _BY_HANDLE.get(handle)
    if found is None:
        raise RuntimeError(f"workspaces ({handle}) no longer exist: their strategy was deleted")
    return found


def _with_index(device: torch.device) -> torch.device:
    """Return the device; a CUDA device without an index becomes the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
