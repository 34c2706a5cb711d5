"""Choose the strategy of each MoE layer by a local search for the least predicted step time.

A step with a combination of strategies is traced with the compiler passes of the run, and its time
is predicted. All layers between the first and the last get the same strategy. So a short model with
the same layers is traced instead of a deep one.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, final

import torch

from halley.core.config import RunConfig
from halley.core.routing import shard_size
from halley.core.timeline import Recorder
from halley.core.types import DTYPES, Experts, LayerShape
from halley.cost.hardware import CPU, Hardware, Predictor, predictor_of
from halley.cost.simulate import makespan_us
from halley.distributed.mesh import ParallelGroups, World
from halley.distributed.peers import all_gather_objects, peer_access
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.registry import (
    PLANNED,
    build_strategy,
    describe_strategies,
    split_strategies,
)


if TYPE_CHECKING:
    from halley.compiler import OrderReport

Progress = Callable[[str, int, int], None]  # arguments: text, traces done, total (0: unknown)

_IN_GRAPHS = ("functional", "fused")  # candidates of a run with compiler passes
_WITHOUT_PASSES = ("sequential", "chunked", "fused")  # candidates of a run without passes
_MOST_ROLES = 3  # roles: first MoE layer, all inner MoE layers, last MoE layer
_HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The chosen strategies, and predicted times of forward plus backward in microseconds."""

    strategies: tuple[str, ...]  # the strategy of each MoE layer
    step_us: float  # predicted time of a step with these strategies
    uniform_us: dict[str, float]  # time of a step with one strategy for all layers, by strategy
    unpassed_us: dict[str, float]  # like ``uniform_us``, of strategies that run only without passes
    problems: dict[str, str]  # the reason why a strategy cannot run, by strategy


def plan_strategies(
    config: RunConfig,
    *,
    num_ranks: int,
    hardware: Hardware,
    problems: Mapping[str, str],
    on_progress: Progress | None = None,
    **options: Any,
) -> StepPlan:
    """Return the fastest plan found, by predicted time; the process must have no process group.

    ``problems`` is a result of ``find_problems``. ``options`` are other options of ``plan_graphs``.
    """
    candidates = _WITHOUT_PASSES if config.passes == "none" else _IN_GRAPHS
    problems = {name: why for name, why in problems.items() if name in candidates}
    names = [name for name in candidates if name not in problems]
    if not names:
        reasons = "; ".join(f"not {name}: {why}" for name, why in problems.items())
        raise ValueError(f"strategy (planned) must leave one that can run: {reasons}")
    num_layers = config.model.num_moe_layers
    place = {"num_ranks": num_ranks, "hardware": hardware}
    times = StepTimes(config, on_progress=on_progress, **place, **options)
    strategies = choose_strategies(names, num_layers=num_layers, predict=times)
    others = _WITHOUT_PASSES if "functional" in names else ()
    unpassed = [name for name in others if name not in candidates]
    return StepPlan(
        strategies=strategies,
        step_us=times(strategies),
        uniform_us={name: times((name,) * num_layers) for name in names},
        unpassed_us={name: times((name,) * num_layers, with_passes=False) for name in unpassed},
        problems=problems,
    )


def find_problems(
    config: RunConfig, *, hardware: Hardware, fused_problem: str = ""
) -> dict[str, str]:
    """Return by name why "functional" or "fused" cannot run, without strategies that can run."""
    why = "expert_bias (true) must be false for it"
    found = {name: why for name in _IN_GRAPHS if config.model.moe.expert_bias}
    if fused_problem:
        found["fused"] = fused_problem
    elif not _HAS_TRITON:
        found["fused"] = "Triton is not installed"
    elif hardware.name != CPU.name and not hardware.runs_fused:
        found["fused"] = f"{hardware.name} cannot run its kernels"
    elif hardware.name != CPU.name and config.train.dtype == "float32":
        found["fused"] = "train.dtype (float32) must be bfloat16 for it on a GPU"
    return found


def trace_step(config: RunConfig, strategies: Sequence[str], **options: Any) -> "list[OrderReport]":
    """Trace a step whose MoE layers have these strategies; return predictions for its graphs."""
    if _HAS_TRITON:
        # This import installs Halley's interpreter, which must precede Dynamo's import of Triton.
        import halley.interpreter  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from halley.planner.graph_plan import plan_graphs

    return plan_graphs(config, strategies=strategies, **options)


def choose_strategies(
    names: Sequence[str], *, num_layers: int, predict: Callable[[tuple[str, ...]], float]
) -> tuple[str, ...]:
    """Return a strategy for each MoE layer, by a local search for the least predicted time.

    The search starts with the best single strategy for all layers. It then changes one of three
    roles: the first layer, all inner layers, or the last layer. The first and the last layer have
    their own roles, because less other computation can overlap their all-to-alls. ``predict``
    returns the microseconds of a step, given the strategy of each layer.
    """
    num_roles = min(num_layers, _MOST_ROLES)

    def spread(roles: tuple[str, ...]) -> tuple[str, ...]:
        return (roles[0], *[roles[1]] * (num_layers - 2), roles[2]) if num_roles > 2 else roles

    def time_us(roles: tuple[str, ...]) -> float:
        return predict(spread(roles))

    found = min(((name,) * num_roles for name in names), key=time_us)
    best = None
    while found != best:
        best = found
        places = range(num_roles)
        changed = [(*best[:at], name, *best[at + 1 :]) for at in places for name in names]
        found = min([best, *changed], key=time_us)  # ``best`` if no change is faster
    return spread(found)


@final
class StepTimes:
    """Predicts the time of a step from the strategies of its MoE layers; caches each trace's time.

    The time of a deep model is extrapolated. Models with one and with two inner layers are traced,
    and the difference of their times is added for each further inner layer.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        num_ranks: int,
        hardware: Hardware,
        on_progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._config = config
        self._on_progress = on_progress or (lambda text, done, total: None)
        self._options = {"num_ranks": num_ranks, "hardware": hardware, **options}
        self._chunked_us = _chunked_us(config, num_ranks=num_ranks, hardware=hardware)
        self._known: dict[tuple[tuple[str, ...], str], float] = {}

    def __call__(self, strategies: tuple[str, ...], *, with_passes: bool = True) -> float:
        """Return the predicted time (us) of a step, with the run's passes if ``with_passes``."""
        num_further = len(strategies) - _MOST_ROLES - 1
        if num_further <= 0:
            return self._trace(strategies, with_passes=with_passes)
        first, inner, *_, last = strategies
        two_inner_us = self._trace((first, inner, inner, last), with_passes=with_passes)
        one_inner_us = self._trace((first, inner, last), with_passes=with_passes)
        return two_inner_us + num_further * (two_inner_us - one_inner_us)

    def _trace(self, strategies: tuple[str, ...], *, with_passes: bool) -> float:
        # Only functional and fused layers can be traced; others are traced as functional. A
        # sequential layer does nearly the same work. For a chunked layer, add ``_chunked_us``.
        in_graphs = tuple(name if name in _IN_GRAPHS else "functional" for name in strategies)
        passes = self._config.passes if with_passes else "none"
        if (in_graphs, passes) not in self._known:
            model = self._config.model
            left_out = (model.num_moe_layers - len(strategies)) * model.moe_interval
            model = dataclasses.replace(model, num_layers=model.num_layers - left_out)
            config = dataclasses.replace(self._config, model=model)
            text = f"predicting a step of {', '.join(in_graphs)} with passes {passes}"
            self._on_progress(text, len(self._known), 0)
            reports = trace_step(config, in_graphs, passes=passes, **self._options)
            self._known[in_graphs, passes] = sum(each.time_after.makespan_us for each in reports)
        return self._known[in_graphs, passes] + strategies.count("chunked") * self._chunked_us


def _chunked_us(config: RunConfig, *, num_ranks: int, hardware: Hardware) -> float:
    """Predict by how many microseconds a chunked MoE layer is slower than a sequential layer."""
    model, predictor = config.model, Predictor(hardware)
    tp_size = config.expert_tp_size  # sequential and chunked layers treat each shard as an expert
    shape = LayerShape(
        num_tokens=config.train.batch_size * config.data.seq_len, hidden_size=model.hidden_size,
        intermediate_size=model.moe.intermediate_size // tp_size,
        num_experts=model.moe.num_experts * tp_size, top_k=model.moe.top_k * tp_size,
        ep_size=config.ep_size or num_ranks, itemsize=DTYPES[config.train.dtype].itemsize,
        activation=model.moe.activation,
    )  # fmt: skip
    num_chunks = config.num_chunks or choose_num_chunks(shape, predictor)
    tasks = all_to_all_tasks(shape, predictor, num_chunks=num_chunks)
    return makespan_us(tasks) - makespan_us(all_to_all_tasks(shape, predictor, num_chunks=1))


def check_strategies(config: RunConfig) -> None:
    """Raise ``ValueError`` unless a run names "planned", a known strategy, or one per MoE layer."""
    if config.strategy != PLANNED:
        split_strategies(config.strategy, num_layers=config.model.num_moe_layers)


def plan_run(config: RunConfig, world: World, groups: ParallelGroups) -> StepPlan | None:
    """Return the plan of a run with strategy "planned", else None; a collective.

    All ranks get the same plan, or raise the same error: a ``ValueError`` if no strategy can run, a
    ``RuntimeError`` if rank 0 could not make a plan.
    """
    if config.strategy != PLANNED:
        return None
    hardware = predictor_of(world.device).hardware
    found = all_gather_objects(_find_fused_problem(config, world, groups), group=groups.world)
    plan: StepPlan | Exception | None = None
    if world.is_first:
        fused_problem = next(filter(None, found), "")
        problems = find_problems(config, hardware=hardware, fused_problem=fused_problem)
        options = {"num_ranks": world.num_ranks, "hardware": hardware, "problems": problems}
        try:
            # Use a separate process: a plan needs a fake process group, but this process is in a
            # real one. Planning also changes the state of torch's compiler.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                plan = pool.submit(plan_strategies, config, **options).result()
        except ValueError as error:
            plan = error  # sent to the other ranks, which wait for the plan
        except Exception as error:
            plan = RuntimeError(f"rank 0 made no plan: {error!r}")
    plan = all_gather_objects(plan, group=groups.world)[0]
    if isinstance(plan, Exception):
        raise plan
    return plan


def describe_plan(plan: StepPlan) -> str:
    """Return a plan as one line: strategies, predicted times, and strategies that cannot run."""
    times = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in plan.uniform_us.items())
    left_out = "".join(f"; not {name}: {why}" for name, why in plan.problems.items())
    return (
        f"planned: {describe_strategies(plan.strategies)}, {plan.step_us / 1e3:.2f} ms forward and "
        f"backward, predicted; one for all layers: {times}{left_out}"
    )


def _find_fused_problem(config: RunConfig, world: World, groups: ParallelGroups) -> str:
    """Return why this rank's expert-parallel group cannot run fused layers, or ""; a collective."""
    if world.device.type == "cpu":
        return "its kernels are interpreted on a CPU"
    if no_access := peer_access(groups.ep, world.device):
        return no_access
    moe, num_sets = config.model.moe, groups.ep_size // groups.tp_size
    inner_size = shard_size(moe.intermediate_size, tp_size=groups.tp_size)
    up_size = inner_size * (2 if moe.activation == "swiglu" else 1)

    def empty(*shape: int) -> torch.Tensor:
        dtype = DTYPES[config.train.dtype]
        return torch.empty(moe.num_experts // num_sets, *shape, dtype=dtype, device=world.device)

    experts = Experts(
        up_LGD=empty(up_size, config.model.hidden_size),
        down_LDF=empty(config.model.hidden_size, inner_size),
        activation=moe.activation,
    )
    place = {"recorder": Recorder(world.device, enabled=False), "device": world.device}
    fused = build_strategy("fused", groups.ep, tp_size=groups.tp_size, **place)
    return fused.find_problem(experts, top_k=moe.top_k)
