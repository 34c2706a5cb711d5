"""Plan the strategies of a training run on rank 0, and share the plan with all ranks."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from halley.core.config import RunConfig
from halley.core.sharding import shard_size
from halley.core.timeline import Recorder
from halley.core.types import DTYPES, Experts
from halley.distributed.mesh import ParallelGroups
from halley.distributed.peers import all_gather_objects
from halley.distributed.world import World
from halley.strategies.registry import (
    PLANNED,
    build_strategy,
    describe_strategies,
    predictor_of,
    split_strategies,
)
from halley.symm_mem.access import peer_access


if TYPE_CHECKING:
    from halley.planner.step_plan import StepPlan


def check_strategies(config: RunConfig) -> None:
    """Check the names of a run's strategies, and that their number fits the MoE layers.

    Raises:
        ValueError: a name is unknown, or the number is wrong.
    """
    if config.strategy != PLANNED:
        split_strategies(config.strategy, num_layers=config.model.num_moe_layers)


def plan_run(config: RunConfig, world: World, groups: ParallelGroups) -> "StepPlan | None":
    """Return the plan of a run with strategy "planned", else None; a collective.

    All ranks get the same plan, and raise the same error.

    Raises:
        ValueError: no strategy can run.
        RuntimeError: rank 0 could not make a plan.
    """
    if config.strategy != PLANNED:
        return None
    from halley.planner.step_plan import find_problems, plan_strategies

    hardware = predictor_of(world.device).hardware
    problem = all_gather_objects(_find_problem(config, world, groups), group=groups.world)
    plan: StepPlan | Exception | None = None
    if world.is_first:
        why = next(filter(None, problem), "")
        problems = find_problems(config, hardware=hardware, fused_problem=why)
        try:
            # A separate process, because a plan needs a fake process group and leaves compiler
            # state behind.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                plan = pool.submit(
                    plan_strategies,
                    config,
                    num_ranks=world.num_ranks,
                    hardware=hardware,
                    problems=problems,
                ).result()
        except ValueError as error:  # the other ranks wait for the result
            plan = error
        except Exception as error:
            plan = RuntimeError(f"rank 0 made no plan: {error!r}")
    plan = all_gather_objects(plan, group=groups.world)[0]
    if isinstance(plan, Exception):
        raise plan
    return plan


def describe_plan(plan: "StepPlan") -> str:
    """Return the plan as one line: chosen strategies, alternatives and excluded strategies."""
    times = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in plan.uniform_us.items())
    left_out = "".join(f"; not {name}: {why}" for name, why in plan.problems.items())
    return (
        f"planned: {describe_strategies(plan.strategies)}, {plan.step_us / 1e3:.2f} ms forward and "
        f"backward, predicted; one for all layers: {times}{left_out}"
    )


def _find_problem(config: RunConfig, world: World, groups: ParallelGroups) -> str:
    """Return why the fused kernels cannot run on this rank's group, or ""; a collective."""
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
    recorder = Recorder(world.device, enabled=False)
    fused = build_strategy(
        "fused", groups.ep, recorder=recorder, device=world.device, tp_size=groups.tp_size
    )
    return fused.find_problem(experts, top_k=moe.top_k)
