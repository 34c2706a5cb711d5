"""The workspaces of a group by shape: made when first needed, known to operators by number."""

import itertools
import weakref
from collections import deque
from typing import final

import torch
import torch.distributed as dist

from halley.core.sharding import check_tp_size
from halley.distributed.peers import compare_ranks
from halley.distributed.ranks import gather, place_in
from halley.fused.buffers import ShapeClass, Workspace
from halley.fused.tuned import KnobTable, TunedShape, knobs_path, tuning_environment
from halley.ops.kernels.gemm_config import GemmTile, Knobs
from halley.symm_mem.heap import AbstractSymmHeap, RangeHook
from halley.symm_mem.open import open_heap


# An interpreted program costs the same whatever its size is: few programs, few and small tasks.
CPU_KNOBS = Knobs(
    num_programs=2,
    block_m=16,
    up=GemmTile(block_n=64, block_k=64, group=2),
    down=GemmTile(block_n=64, block_k=64, group=2),
    down_grad=GemmTile(block_n=64, block_k=64, group=2),
    up_grad=GemmTile(block_n=64, block_k=64, group=2),
    weight=GemmTile(block_n=64, block_k=16, group=2, beside=1),
    fetch_elements=4096,
    combine_rows=64,
    combine_stages=2,
    chunk_columns=64,
    home_rows=64,
)


def default_knobs(device: torch.device) -> Knobs:
    """Return the knobs of a device for which nothing was measured."""
    return CPU_KNOBS if device.type == "cpu" else Knobs()


# The schemas of operators know no objects, so they name workspaces by number.
_ALL: "weakref.WeakValueDictionary[int, Workspaces]" = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


@final
class Workspaces:
    """The workspaces of the ranks of one group, made when a layer first needs them.

    Layers share what they share by sharing this object. Memory goes with ``close``, or with the
    last reference to it.

    Args:
        group: the ranks over which experts are spread; None for a rank on its own.
        device: of this rank.
        tp_size: neighbours in rank that share each expert, by its intermediate size.
        max_tokens: tokens a rank that there is room for from the start; 0 is what the ranks bring
            at the first call. More are no error, but the call that brings them makes room first.
        max_load: 0, or for how many times the rows of a balanced load each rank makes room. With it
            no call asks the device how many rows it has: layers can be captured in a CUDA graph,
            and rows or tokens for which there is no room raise an error. All ranks say the same.
        timeout_s: how long a kernel waits for a peer; as long as NCCL, unless said otherwise, since
            ranks are apart for minutes where one writes a checkpoint or compiles.
        knobs: of the kernels; None for those that were tuned on this machine, see ``tuned``, else
            the defaults of the device.

    Attributes:
        num_ranks: of the group.
        handle: the number by which operators name this object.
        turn: what holds the passes of compiled layers in place, see ``turns``.
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
        knobs: Knobs | None = None,
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
        self.knobs = knobs or default_knobs(device)
        self.num_ranks, self.tp_size = place_in(group)[1], tp_size
        check_tp_size(tp_size, num_ranks=self.num_ranks)
        self._tuned: KnobTable | None = None
        if knobs is None:
            environment = tuning_environment(device, num_ranks=self.num_ranks, tp_size=tp_size)
            self._tuned = KnobTable(knobs_path(), environment)
        self.handle = next(_next_handle)
        with torch.inference_mode(mode=False):  # training may come later
            self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._heap: AbstractSymmHeap | None = None
        self._by_shape: dict[ShapeClass, Workspace] = {}
        self._by_plan: dict[tuple[object, ...], Workspace] = {}
        self._last: Workspace | None = None
        self._plan: int | None = None  # the address of the last plan
        self._overtaken: deque[int] = deque(maxlen=64)
        _ALL[self.handle] = self

    def num_experts(self, num_local: int) -> int:
        """Return the experts of all ranks where each rank holds, or shares, that many."""
        return num_local * self.num_ranks // self.tp_size

    def get(self, shape: ShapeClass, *, num_tokens: int) -> Workspace:
        """Return the workspace of a shape class; a collective when there is none yet.

        Args:
            num_tokens: of this rank; decides nothing but the size of a new workspace.

        Raises:
            ValueError: the ranks differ in the shape, or in arguments of this object.
            RuntimeError: the ranks cannot address each other's memory, or one of them did not come.
            MemoryError: a rank has too little memory.
        """
        found = self._by_shape.get(shape)
        return found or self._make(shape, num_tokens)

    def of_plan(
        self,
        plan: torch.Tensor,
        *,
        num_experts: int,
        top_k: int,
        rows: tuple[int, torch.dtype] | None = None,
    ) -> Workspace:
        """Return a workspace that makes such plans.

        Args:
            num_experts: of all ranks.
            rows: columns and dtype of the rows that it must have buffers for; None for any.

        Raises:
            RuntimeError: there is none any more.
        """
        key = (plan.shape[0], num_experts, top_k, rows)
        found = self._by_plan.get(key)
        if found is not None:
            return found
        for shape, workspace in self._by_shape.items():
            has_routing = (shape.num_experts, shape.top_k) == (num_experts, top_k)
            has_rows = rows is None or rows == (shape.hidden_size, shape.dtype)
            if has_routing and has_rows and workspace.made(plan):
                self._by_plan[key] = workspace
                return workspace
        raise RuntimeError("the workspaces of this plan were closed before its backward")

    def dispatched(self, workspace: Workspace, plan: torch.Tensor) -> None:
        """Note that this plan is the next to be combined."""
        # By address, since the operator that combines may get another tensor for the same memory.
        if self._plan is not None:
            self._overtaken.append(self._plan)
        self._last, self._plan = workspace, plan.data_ptr()
        if self._plan in self._overtaken:  # memory of a plan that is gone
            self._overtaken.remove(self._plan)

    def combining(self, plan: torch.Tensor) -> Workspace:
        """Return the workspace of the last plan, which this one must be.

        Raises:
            RuntimeError: another plan was made after this one, so that peers may have overwritten
                what its sums go through; or an earlier wait failed.
        """
        if self._last is None or plan.data_ptr() in self._overtaken:
            raise RuntimeError("gemm_combine must follow the dispatch_gemm that made its plan")
        self._last.check()
        return self._last

    def all(self) -> list[Workspace]:
        """Return the workspaces that there are, in the order in which they were made."""
        return list(self._by_shape.values())

    def check(self) -> None:
        """Raise what a kernel wrote down, see ``Workspace.check``."""
        for workspace in self._by_shape.values():
            workspace.check()

    def close(self) -> None:
        """Give all memory back; a collective. The next call of a layer makes new workspaces."""
        self._by_shape.clear()
        self._by_plan.clear()
        self._last = self._plan = None
        self._overtaken.clear()
        heap, self._heap = self._heap, None
        if heap is not None:
            heap.close()

    def _make(self, shape: ShapeClass, num_tokens: int) -> Workspace:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a layer must run once before it is captured in a CUDA graph")
        # "fused" is the kind of kernel: strategy unfused shares the workspaces.
        values = {"strategy": "fused", **shape._asdict(), "max_load": self.max_load}
        values |= {"device": self.device.type, "workspaces": len(self._by_shape)}
        compare_ranks("an MoE layer", values, group=self.group)
        if self._heap is None:
            self._heap = self._open_heap()
        own = (num_tokens, self._find_knobs(shape, num_tokens))
        told = gather(own, group=self.group, what="the making of buffers for a fused layer")
        most = max(num_tokens for num_tokens, _ in told)
        self._by_shape[shape] = Workspace(
            shape,
            heap=self._heap,
            knobs=told[0][1],  # of one rank: what ranks tell each other depends on them
            max_tokens=max(self.max_tokens, most, 1),
            timeout_s=self.timeout_s,
            max_load=self.max_load,
        )
        return self._by_shape[shape]

    def _find_knobs(self, shape: ShapeClass, num_tokens: int) -> Knobs:
        if self._tuned is None:
            return self.knobs
        wanted = TunedShape(
            hidden_size=shape.hidden_size,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            dtype=str(shape.dtype).removeprefix("torch."),
            num_tokens=max(self.max_tokens, num_tokens),
        )
        return self._tuned.find(wanted, base=self.knobs)

    def _open_heap(self) -> AbstractSymmHeap:
        hooks: dict[str, RangeHook] = {}
        if self.device.type == "cpu":
            # Only here: what it imports is of no use where Triton compiles.
            from halley.interpreter.sanitizer import register, unregister

            mapped: set[int] = set()

            def on_map(address: int, num_bytes: int) -> None:
                register(address, num_bytes)
                mapped.add(address)

            def on_unmap(address: int, num_bytes: int) -> None:
                unregister(address)
                mapped.remove(address)

            # Addresses come again when memory is gone without a close.
            gone = weakref.finalize(self, lambda: [unregister(address) for address in mapped])
            gone.atexit = False
            hooks = {"on_map": on_map, "on_unmap": on_unmap}
        try:
            return open_heap(self.group, self.device, **hooks)
        except RuntimeError as error:
            advice = "the strategies sequential and chunked need none"
            raise RuntimeError(f"{error}; {advice}") from error


def _with_index(device: torch.device) -> torch.device:
    """Return the device; a CUDA device without an index is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def find_workspaces(handle: int) -> Workspaces:
    """Return the object of that number.

    Raises:
        RuntimeError: it is gone.
    """
    found = _ALL.get(handle)
    if found is None:
        raise RuntimeError(f"workspaces ({handle}) are gone with the strategy that they were of")
    return found
