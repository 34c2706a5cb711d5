"""Show which strategy "auto" chooses for one layer, and the memory that ``fused`` needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task
from halley.distributed.mesh import ParallelGroups
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.symm_mem.access import peer_access
from halley.tools.fused_memory import FusedBuffers, LayerMemory, measure_buffers, predict_memory
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of


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
