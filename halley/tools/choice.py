"""Show which strategy "auto" chooses for one layer, and the memory that ``fused`` needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final, get_args

import torch
import torch.distributed as dist

from halley.core.routing import local_experts
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Save
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task
from halley.distributed.mesh import ParallelGroups
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.symm_mem.access import peer_access
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of


if TYPE_CHECKING:
    from halley.fused.buffers import Workspace


@dataclass(frozen=True, kw_only=True)
class FusedBuffers:
    """Buffers of the fused kernels on one rank, in MiB; all layers of a shape share them.

    Attributes:
        routing_mib: flags, counts and routing that ranks exchange in each call.
        send_mib: the tokens of this rank, which its peers fetch. There are two send buffers, used
            alternately.
        combine_mib: the partial sums that the peers send back.
        weight_grads_mib: the gradients of routing weights that the peers send back.
        symm_mib: the four above together, which are symmetric memory.
        rows_mib: the fetched rows, in local memory.
        plan_mib: the dispatch plan, allocated anew in each call.
    """

    routing_mib: float
    send_mib: float
    combine_mib: float
    weight_grads_mib: float
    symm_mib: float
    rows_mib: float
    plan_mib: float


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Sizes of one call on one rank.

    Attributes:
        capacity_rows: rows that forward allocates for its experts before it knows the exact number.
        num_rows: rows that are allocated once the number is known.
        num_copies: token copies to fetch, each once; includes the spare capacity of forward.
        plan_words: int32 words of the dispatch plan.
        num_parts: partial gradients per routing weight.
    """

    capacity_rows: int
    num_rows: int
    num_copies: int
    plan_words: int
    num_parts: int


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, without tokens, weights and shared buffers.

    Attributes:
        saved: tensors saved from forward to backward.
        peak: the largest total during forward and backward, with the output and all gradients.
    """

    saved: int
    peak: int


def measure_buffers(workspace: "Workspace") -> FusedBuffers:
    """Return the sizes of the buffers of a workspace."""
    buffers = workspace.context()
    return FusedBuffers(
        routing_mib=buffers.routing_buffer.local.nbytes / 2**20,
        send_mib=buffers.send_buffer.local.nbytes / 2**20,
        combine_mib=buffers.combine_buffer.local.nbytes / 2**20,
        weight_grads_mib=buffers.dweight_buffer.local.nbytes / 2**20,
        symm_mib=workspace.symmetric_bytes / 2**20,
        rows_mib=workspace.rows_RD.nbytes / 2**20,
        plan_mib=workspace.layout.plan_words * torch.int32.itemsize / 2**20,
    )


def predict_memory(
    workspace: "Workspace", shape: LayerShape, groups: ParallelGroups
) -> dict[str, LayerMemory]:
    """Return the memory of a layer for each way to save activations; a collective.

    The numbers of rows are those of the last call, on the rank that has the most.

    Args:
        workspace: has run the layer forward.
        shape: of the layer.
        groups: the ranks of the layer.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import rows_with_margin
    from halley.fused.kernels.dispatch import num_dweight_columns
    from halley.fused.kernels.layout import TASK_ROWS

    size = workspace.read_plan()
    most = torch.tensor([size.num_rows, size.num_copies], device=workspace.heap.device)
    if groups.ep is not None:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep)
    num_rows, num_copies = most.tolist()
    counts = RowCounts(
        capacity_rows=rows_with_margin(num_rows, multiple=workspace.config.block_m),
        num_rows=num_rows,
        num_copies=rows_with_margin(num_copies, multiple=TASK_ROWS),
        plan_words=workspace.layout.plan_words,
        num_parts=num_dweight_columns(shape.intermediate_size, workspace.config),
    )
    return {save: layer_memory(shape, counts, save=save) for save in get_args(Save)}


def layer_memory(shape: LayerShape, counts: RowCounts, *, save: Save) -> LayerMemory:
    """Return the memory of ``fused_experts``, computed tensor by tensor in allocation order.

    Args:
        shape: the layer with the tokens of this rank.
        counts: the sizes of the call.
        save: the activations that are saved for backward.
    """
    size, inner_size = shape.itemsize, shape.intermediate_size
    num_rows = counts.num_rows
    rows = num_rows * shape.hidden_size * size
    pre = num_rows * shape.up_size * size
    activations = num_rows * inner_size * size
    forward_rows = counts.capacity_rows * shape.hidden_size * size
    forward_pre = counts.capacity_rows * shape.up_size * size
    forward_activations = counts.capacity_rows * inner_size * size
    copies = counts.num_copies * shape.hidden_size * size
    tokens = shape.num_tokens * shape.hidden_size * size
    plan = 4 * counts.plan_words
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    down = num_local * shape.hidden_size * inner_size * size
    up = num_local * shape.hidden_size * shape.up_size * size

    saved = plan + {"all": forward_rows + forward_pre, "inputs": copies, "recompute": 0}[save]
    forward = saved + forward_activations + tokens
    recomputed_rows, recomputed_pre = (0, 0) if save == "all" else (rows, pre)
    parts = 4 * num_rows * counts.num_parts
    weights = 4 * num_rows  # routing weights by row
    begun = saved + tokens + recomputed_rows
    held = begun - (copies if save == "inputs" else 0)  # until backward ends
    results = tokens + 4 * shape.num_tokens * shape.top_k
    # The gradients of pre, the weighted activations and the gradients of the rows.
    dispatched = held + recomputed_pre + pre + activations + rows + parts
    peak = max(
        forward,
        begun + recomputed_pre + (0 if save == "all" else activations),
        dispatched + weights,
        dispatched - recomputed_pre + results,
        dispatched - recomputed_pre - parts + results + down,
        held + pre + results + down + up,
    )
    return LayerMemory(saved=saved, peak=peak)


Progress = Callable[[str, int, int], None]

_RUNS = 4  # runs of each candidate by AutoStrategy: one that compiles, three that are timed


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The choice of strategy "auto" for the forward pass of one layer.

    Attributes:
        model, num_tokens, num_ranks, dtype: the layer; tokens per rank.
        strategy: the chosen strategy.
        times_us: time of each candidate on the slowest rank; empty if nothing was measured.
        reason: why auto chose this strategy, and why other strategies are no candidates.
        access_problem: why the ranks cannot address each other's memory; "" if they can.
        buffers: of the fused kernels on this rank; None if they did not run.
        no_buffers: why the fused kernels did not run; "" if they did.
        memory: memory of a training step with fused on the rank that needs most, without the
            buffers, for each way to save activations.
    """

    model: str
    num_tokens: int
    num_ranks: int
    dtype: str
    strategy: str
    times_us: dict[str, float]
    reason: str
    access_problem: str
    buffers: FusedBuffers | None
    no_buffers: str
    memory: dict[str, LayerMemory]


def choose_strategy(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    on_progress: Progress | None = None,
) -> LayerChoice:
    """Let strategy "auto" measure and choose for a layer without gradients; a collective.

    On a CPU, ``fused`` is no candidate: the interpreter would run its kernels for minutes.

    Args:
        case: the layer and its load.
        groups: the expert-parallel group runs the layer.
        device: of this rank.
        on_progress: called before each run of a candidate with a text, the runs done and the total.

    Raises:
        ValueError: the experts do not divide over the ranks.
        RuntimeError: a candidate failed.
        MemoryError: a rank has too little memory for the buffers.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffer_cache import Workspaces

    report = on_progress or (lambda text, done, total: None)
    workspaces = None if device.type == "cpu" else Workspaces(groups.ep, device)
    recorder = Recorder(device, enabled=False)
    where = {"recorder": recorder, "device": device, "workspaces": workspaces}
    auto = build_strategy("auto", groups.ep, **where)
    assert isinstance(auto, AutoStrategy)
    auto.candidates = _announced(auto.candidates, report)
    report(f"drawing the weights of {case.model.name}", 0, _RUNS * len(auto.candidates) + 1)
    outputs_of(auto, make_tensors(case, groups, device=device), backward=False)
    (reason,) = auto.reasons
    access_problem = peer_access(groups.ep, device)
    no_buffers = access_problem
    if workspaces is None:
        no_buffers = access_problem or "its kernels are interpreted on a CPU"
    elif case.model.moe.expert_bias:
        reason += "; measured without the experts' biases, with which fused cannot run"
    shape = _shape(case, groups)
    used = [] if workspaces is None else workspaces.all()
    buffers = [measure_buffers(each) for each in used]
    memory = [predict_memory(each, shape, groups) for each in used]
    if workspaces is not None:
        workspaces.close()
    return LayerChoice(
        model=case.model.name,
        num_tokens=case.num_tokens,
        num_ranks=groups.ep_size,
        dtype=str(case.dtype).removeprefix("torch."),
        strategy=auto.choice(shape, gradients=False),
        times_us=auto.times_us(shape, gradients=False),
        reason=reason,
        access_problem=access_problem,
        buffers=buffers[0] if buffers else None,
        no_buffers="" if buffers else no_buffers,
        memory=memory[0] if memory else {},
    )


def _announced(
    candidates: dict[str, AbstractStrategy], report: Progress
) -> dict[str, AbstractStrategy]:
    """Wrap the candidates so that each one reports its runs before they start."""
    total, num_runs = _RUNS * len(candidates) + 1, 0  # one more: the layer's own call at the end

    def announce(name: str) -> None:
        nonlocal num_runs
        report(f"running strategy {name}", num_runs, total)
        num_runs += 1

    return {name: _Announced(name, each, announce) for name, each in candidates.items()}


@final
class _Announced(AbstractStrategy):
    """A strategy that calls a function with its name before each run."""

    def __init__(
        self, name: str, strategy: AbstractStrategy, announce: Callable[[str], None]
    ) -> None:
        self.tp_size = strategy.tp_size
        self._name, self._strategy, self._announce = name, strategy, announce

    @property
    def gemm(self) -> str:
        return self._strategy.gemm

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        self._announce(self._name)
        return self._strategy.forward(x_TD, routing, experts)

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return self._strategy.find_problem(experts, top_k=top_k)

    def release(self) -> None:
        self._strategy.release()

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return self._strategy.tasks(shape, predictor)


def _shape(case: LayerCase, groups: ParallelGroups) -> LayerShape:
    moe = case.model.moe
    return LayerShape(
        num_tokens=case.num_tokens,
        hidden_size=case.model.hidden_size,
        intermediate_size=moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        ep_size=groups.ep_size,
        itemsize=case.dtype.itemsize,
        activation=moe.activation,
    )
