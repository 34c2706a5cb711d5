"""Find which strategy ``auto`` picks for one layer on these ranks, and the memory of ``fused``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final, get_args

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Save
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.distributed.mesh import ParallelGroups
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.symm_mem.access import peer_access
from halley.tools.fused_memory import LayerMemory, RowCounts, layer_memory
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of


if TYPE_CHECKING:
    from halley.fused.buffers import Workspace


Progress = Callable[[str, int, int], None]

_RUNS = 4  # of each candidate, by AutoStrategy: one that compiles, three that are timed


@dataclass(frozen=True, kw_only=True)
class FusedBuffers:
    """Memory of the fused kernels on one rank, in MiB.

    Attributes:
        mailbox_mib: what ranks tell each other of a call.
        stage_mib: the rank's tokens, which its peers fetch; twice, as passes take turns.
        home_mib: the sums that its peers send.
        weights_home_mib: the gradients of routing weights that its peers send.
        symm_mib: these four, which peers address.
        rows_mib: scratch of this rank alone.
        plan_mib: made anew by each call.
    """

    mailbox_mib: float
    stage_mib: float
    home_mib: float
    weights_home_mib: float
    symm_mib: float
    rows_mib: float
    plan_mib: float


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """How strategy auto runs a layer forward.

    Attributes:
        num_tokens: of each rank.
        strategy: what auto picked.
        times_us: of each candidate, on the slowest rank; none where nothing was measured.
        reason: auto's own words, and why others are no candidates.
        access_problem: why the ranks cannot address each other's memory; "" where they can.
        buffers: of this rank; None where the fused kernels did not run.
        no_buffers: why they did not run; "" where they did.
        memory: what training the layer with fused takes on the rank that takes most, beside the
            buffers, by what is kept for backward.
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
    """Let strategy auto measure and choose for a layer without gradients; a collective.

    On a CPU fused is left out: its kernels are interpreted there, for minutes a call.

    Args:
        case: the layer and its load.
        groups: its expert-parallel group runs the layer.
        device: of this rank.
        on_progress: called before each run of a candidate, with text, runs done and runs to do.

    Raises:
        ValueError: sizes that do not fit the ranks.
        RuntimeError: a candidate failed.
        MemoryError: a rank has too little memory for the buffers.
    """
    # Only here: commands that need no kernels run where there is no Triton.
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
    made = [] if workspaces is None else workspaces.all()
    buffers = [_measure_buffers(each) for each in made]
    memory = [_memory(each, shape, groups) for each in made]
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
    """Wrap the candidates so that each reports its runs before they start."""
    total, num_runs = _RUNS * len(candidates) + 1, 0  # and the call itself, by the fastest

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


def _memory(
    workspace: "Workspace", shape: LayerShape, groups: ParallelGroups
) -> dict[str, LayerMemory]:
    """Return what each way to save takes, for the plan that was made last; a collective."""
    from halley.fused.buffers import rows_in_steps, rows_with_margin
    from halley.fused.kernels.dispatch_gemm import dgrad_columns
    from halley.fused.kernels.layout import TASK_ROWS

    size = workspace.read_plan()
    most = torch.tensor([size.num_rows, size.num_sends], device=workspace.heap.device)
    if groups.ep is not None:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep)
    num_rows, num_sends = most.tolist()
    counts = RowCounts(
        room_rows=rows_with_margin(num_rows, block_m=workspace.knobs.block_m),
        num_rows=rows_in_steps(num_rows, block_m=workspace.knobs.block_m),
        num_sends=rows_with_margin(num_sends, block_m=TASK_ROWS),
        plan_words=workspace.layout.plan_words,
        num_parts=dgrad_columns(shape.intermediate_size, workspace.knobs),
    )
    return {save: layer_memory(shape, counts, save=save) for save in get_args(Save)}


def _measure_buffers(workspace: "Workspace") -> FusedBuffers:
    return FusedBuffers(
        mailbox_mib=workspace.words.local.nbytes / 2**20,
        stage_mib=workspace.stage.local.nbytes / 2**20,
        home_mib=workspace.home.local.nbytes / 2**20,
        weights_home_mib=workspace.weights_home.local.nbytes / 2**20,
        symm_mib=workspace.symmetric_bytes / 2**20,
        rows_mib=workspace.rows_RD.nbytes / 2**20,
        plan_mib=workspace.layout.plan_words * torch.int32.itemsize / 2**20,
    )
