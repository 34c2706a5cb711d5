"""Halley's name in the registries of transformers."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from halley.integrations.contract import ExpertParallelism
from halley.integrations.transformers.routed_experts import (
    DispatchedExperts,
    leave,
    run_local_experts,
)
from halley.integrations.transformers.seams import Seams, find_seams
from halley.integrations.transformers.weight_layout import find_problem


NAME = "halley"
_STYLE = "ep_dispatch_experts"
_DEFAULT = "auto"  # what an ep_implementation is when nobody names one


def register(strategy: str = "auto", *, strict: bool = False, default: bool = False) -> str:
    """Make Halley known to transformers; models that are made afterwards can use it.

    transformers 5.23 and newer run a model's experts by Halley where its ``DistributedConfig`` says
    ``ep_implementation="halley"``; 5.19 to 5.22 wherever ``ep_size`` is above 1; 5.0 to 5.18 after
    ``shard_experts``. In all of them ``experts_implementation="halley"`` runs the experts of one
    rank. May be called again: the last call counts.

    Args:
        strategy: how experts run: "auto", "sequential", "chunked", "unfused" or "fused"; the last
            two also with what they keep for backward, as in "fused:inputs".
        strict: True raises where the default warns once and leaves a module to transformers.
        default: also for models that name no implementation (5.23 and newer).

    Returns:
        A sentence that says what was registered.

    Raises:
        ValueError: there is no such strategy; transformers is missing, too old or too new.
    """
    parallelism = ExpertParallelism(strategy, strict=strict)
    seams = find_seams()
    function = partial(
        run_local_experts,
        parallelism=parallelism,
        otherwise=seams.experts_function("grouped_mm"),
    )
    seams.experts.ExpertsInterface.register(NAME, function)
    said = f"transformers {seams.version}: experts run by Halley (strategy {strategy}) "
    if seams.name == "ep_implementation":
        build = partial(_build_implementation, parallelism=parallelism, seams=seams)
        for name in (NAME, *([_DEFAULT] if default else [])):
            seams.parallel.EPImplementationInterface.register(name, build)
        return said + ("by default" if default else f'with ep_implementation="{NAME}"')
    if seams.name == "parallel_style":
        style = _style_class(seams.parallel.EpDispatchExpertsParallel, parallelism)()
        seams.parallel.ALL_PARALLEL_STYLES.register(_STYLE, style)
        return said + "with ep_size above 1"
    return said + "after halley.integrations.transformers.shard_experts"


def unregister() -> None:
    """Give transformers back what it had before ``register``; models that were made keep theirs.

    Raises:
        ValueError: as for ``register``.
    """
    seams = find_seams()
    seams.experts.ExpertsInterface._global_mapping.pop(NAME, None)
    if seams.name == "ep_implementation":
        interface = seams.parallel.EPImplementationInterface
        interface._global_mapping.pop(NAME, None)
        interface.register(_DEFAULT, seams.parallel.AutoEP)
    if seams.name == "parallel_style":
        built_in = seams.parallel.EpDispatchExpertsParallel()
        seams.parallel.ALL_PARALLEL_STYLES.register(_STYLE, built_in)


def _build_implementation(
    experts: nn.Module, ep_mesh: Any, tp_mesh: Any, *, parallelism: ExpertParallelism, seams: Seams
) -> Any:
    """Return what ``EPImplementationInterface`` wants for one experts module."""
    problem = find_problem(experts)
    if not problem and seams.parallel._uses_megamoe(experts):
        problem = f"experts module {type(experts).__name__} must not be deepgemm_megamoe's"
    if problem:
        leave(experts, problem, parallelism=parallelism)
        return seams.parallel.AutoEP(experts, ep_mesh, tp_mesh)
    return DispatchedExperts(experts, ep_mesh, tp_mesh=tp_mesh, parallelism=parallelism)


def _style_class(built_in: type, parallelism: ExpertParallelism) -> type:
    """Return the style "ep_dispatch_experts" with Halley's forward."""

    class HalleyExpertsParallel(built_in):
        def install_forward(self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None) -> Any:
            if problem := find_problem(module):
                leave(module, problem, parallelism=parallelism)
                return super().install_forward(module, ep_mesh, tp_mesh=tp_mesh)
            dispatched = DispatchedExperts(
                module, ep_mesh, tp_mesh=tp_mesh, parallelism=parallelism
            )

            whole = ep_mesh.size() == dist.get_world_size()

            def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
                if whole and hasattr(module, "set_force_sum_reduction_for_comms"):
                    # FSDP2 with one rank divides gradients itself; a forced sum, which transformers
                    # asks for until 5.23, divides them once more.
                    module.set_force_sum_reduction_for_comms(False)
                with self.context_around_forward(module, ep_mesh):
                    return dispatched(hidden_states, top_k_index, top_k_weights)

            module.forward = forward
            return module

    return HalleyExpertsParallel
