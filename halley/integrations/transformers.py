"""Run the routed experts of Hugging Face Transformers by Halley; see docs/transformers.md.

Call ``enable()`` before a model is loaded, or ``enable(model)`` after it is. Each version of
Transformers accepts other expert code at a different place: see ``ExtensionPoint``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from halley.core.types import local_experts
from halley.integrations.contract import (
    ExpertRunner,
    Framework,
    describe,
    find_module,
    warn_deprecated,
)
from halley.integrations.transformers_experts import (
    DispatchedExperts,
    find_problem,
    is_experts,
    leave_to_transformers,
    run_local_experts,
)


__all__ = [
    "NAME",
    "describe",
    "disable",
    "enable",
    "full_state_dict",
    "overlap_shared_experts",
    "register",
    "shard_experts",
    "unregister",
]

NAME = "halley"  # name of Halley's entries in the registries of Transformers
FRAMEWORK = Framework(
    package="transformers", install="'.[hf]' in a checkout of Halley", newest=(5, 24)
)

_STYLE = "ep_dispatch_experts"  # Transformers' name of its parallel style for experts
_DEFAULT = "auto"  # Transformers' own default ep_implementation, not Halley's "auto"
_EXPERTS = "transformers.integrations.moe"
# The module of Transformers' parallel styles since version 5.22, then that of older versions.
_STYLES = ("transformers.distributed.expert_parallel", "transformers.distributed.tensor_parallel")
# DistributedDataParallel skips the parameters whose names this attribute of the model lists.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True, kw_only=True)
class ExtensionPoint:
    """The registry or class by which the installed Transformers accepts other code for experts.

    There are three kinds:

    - "ep_implementation" (5.23 and newer): a registry of implementations by name.
    - "parallel_style" (5.19 to 5.22): one class, which all models use.
    - "experts_function" (5.0 to 5.18): Transformers has no all-to-all, only a registry of functions
      that compute the experts of one rank.
    """

    version: str
    kind: Literal["ep_implementation", "parallel_style", "experts_function"]
    experts: Any  # the Python module that has ``ExpertsInterface``
    parallel: Any  # the module of what ``enable`` extends; None for "experts_function"


def find_extension_point() -> ExtensionPoint:
    """Return the ``ExtensionPoint`` of the installed Transformers, detected by the classes it has.

    Raises:
        ValueError: Transformers is not installed, too old, or so new that these classes changed.
    """
    version = FRAMEWORK.find_version()
    experts = find_module(_EXPERTS, "ExpertsInterface")
    if experts is None:
        reason = "this one has no interface for experts"
        raise ValueError(f"transformers ({version}) must be 5.0 or newer: {reason}")
    FRAMEWORK.warn_if_newer(version)
    point = partial(ExtensionPoint, version=version, experts=experts)
    implementations = find_module(_STYLES[0], "EPImplementationInterface")
    if implementations is not None:
        init = implementations.EPImplementation.__init__
        FRAMEWORK.check_parameters(init, "self", "experts", "ep_mesh", "tp_mesh")
        return point(kind="ep_implementation", parallel=implementations)
    for place in _STYLES:
        styles = find_module(place, "EpDispatchExpertsParallel")
        if styles is not None:
            install = styles.EpDispatchExpertsParallel.install_forward
            FRAMEWORK.check_parameters(install, "self", "module", "ep_mesh", "tp_mesh")
            return point(kind="parallel_style", parallel=styles)
    return point(kind="experts_function", parallel=None)


def enable(
    model: nn.Module | None = None,
    *,
    group: Group = None,
    strategy: str = "auto",
    strict: bool = False,
    max_load: float = 0.0,
    default: bool = True,
) -> str:
    """Make Halley run the experts of ``model``; without ``model``, of models that are loaded later.

    Without ``model``, Halley runs models that are loaded afterwards with ``ep_size`` above 1
    (Transformers 5.19 and newer). On a single rank, it runs models that are loaded with
    ``experts_implementation="halley"``. A second call replaces the options of the first for models
    loaded after it. The returned sentence says what was enabled.

    With ``model``, Halley runs this model, which every rank has loaded in full (Transformers 5.0
    and newer). Each rank keeps its share of the experts, ``(E / W, ...)``, under the same parameter
    names. Call it before an optimizer or a wrapper sees the parameters. ``DistributedDataParallel``
    averages the gradients of the other parameters. It skips those of the experts, which are already
    gradients of the mean loss over all ranks.

    Args:
        model: a loaded model.
        group: with ``model``: the process group or mesh of all ranks; None also means all ranks.
        strategy: a name that ``halley.build_strategy`` accepts, such as "fused:inputs".
        strict: raise an error where the default warns once and leaves a module to Transformers.
        max_load: as for ``ExpertRunner``: for training steps in CUDA graphs, see the document.
        default: False restricts Halley to models with ``ep_implementation="halley"`` (5.23 and
            newer); True includes models that name no implementation.

    Raises:
        ValueError: ``strategy`` is unknown; ``max_load`` does not fit; Transformers is not
            installed, too old or too new; ``model`` has no experts, or their number is no multiple
            of the number of ranks; or ``strict``, and Halley cannot run a module.
    """
    runner = ExpertRunner(strategy, strict=strict, max_load=max_load)
    point = find_extension_point()
    said = f"transformers {point.version}: experts run by Halley (strategy {strategy}) in "
    if model is not None:
        shard_model(model, group, runner=runner)
        return f"{said}this {type(model).__name__}"
    fallback = point.experts.ExpertsInterface()["grouped_mm"]
    function = partial(run_local_experts, runner=runner, fallback=fallback)
    point.experts.ExpertsInterface.register(NAME, function)
    if point.kind == "ep_implementation":
        build = partial(_build_implementation, runner=runner, point=point)
        implementations = point.parallel.EPImplementationInterface
        implementations.register(NAME, build)
        implementations.register(_DEFAULT, build if default else point.parallel.AutoEP)
        if not default:
            return f'{said}models loaded with ep_implementation="{NAME}"'
    elif point.kind == "parallel_style":
        style = _style_class(point.parallel.EpDispatchExpertsParallel, runner)()
        point.parallel.ALL_PARALLEL_STYLES.register(_STYLE, style)
    else:
        return f"{said}models passed to enable(model)"
    return f"{said}models loaded with ep_size above 1"


def disable() -> None:
    """Restore the registries of Transformers; models with experts spread over ranks keep Halley.

    Models loaded with ``experts_implementation="halley"`` no longer run: the name is removed.
    ``ValueError`` if Transformers is not installed, too old or too new.
    """
    point = find_extension_point()
    point.experts.ExpertsInterface._global_mapping.pop(NAME, None)
    if point.kind == "ep_implementation":
        interface = point.parallel.EPImplementationInterface
        interface._global_mapping.pop(NAME, None)
        interface.register(_DEFAULT, point.parallel.AutoEP)
    if point.kind == "parallel_style":
        built_in = point.parallel.EpDispatchExpertsParallel()
        point.parallel.ALL_PARALLEL_STYLES.register(_STYLE, built_in)


def _build_implementation(
    experts: nn.Module, ep_mesh: Any, tp_mesh: Any, *, runner: ExpertRunner, point: ExtensionPoint
) -> Any:
    """Return ``DispatchedExperts`` for a module, or ``AutoEP`` if Halley cannot run it."""
    problem = find_problem(experts)
    if not problem and point.parallel._uses_megamoe(experts):
        problem = f"experts module {type(experts).__name__} must not be deepgemm_megamoe's"
    if problem:
        leave_to_transformers(experts, problem, runner=runner)
        return point.parallel.AutoEP(experts, ep_mesh, tp_mesh)
    return DispatchedExperts(experts, ep_mesh, tp_mesh=tp_mesh, runner=runner)


def _style_class(built_in: type, runner: ExpertRunner) -> type:
    """Return a parallel style class that replaces the forward of modules that Halley can run.

    ``built_in`` is Transformers' own style, which runs the modules that Halley cannot run.
    """

    class HalleyExpertsParallel(built_in):
        def install_forward(self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None) -> Any:
            if problem := find_problem(module):
                leave_to_transformers(module, problem, runner=runner)
                return super().install_forward(module, ep_mesh, tp_mesh=tp_mesh)
            dispatched = DispatchedExperts(module, ep_mesh, tp_mesh=tp_mesh, runner=runner)
            spans_all_ranks = ep_mesh.size() == dist.get_world_size()

            def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
                if spans_all_ranks and hasattr(module, "set_force_sum_reduction_for_comms"):
                    # FSDP2's group has one rank here, so FSDP2 divides gradients without a sum.
                    # Transformers 5.19 to 5.22 force a sum: it would divide gradients twice.
                    module.set_force_sum_reduction_for_comms(False)
                with self.context_around_forward(module, ep_mesh):
                    return dispatched(hidden_states, top_k_index, top_k_weights)

            module.forward = forward
            return module

    return HalleyExpertsParallel


def shard_model(model: nn.Module, group: Group, *, runner: ExpertRunner) -> list[str]:
    """Shard a model's experts in place and let Halley run them; return sharded parameters' names.

    Raises the same errors as ``enable``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model ({model!r}) must be a loaded model of transformers")
    group, rank, ep_size = _resolve(group)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ep_size != num_ranks:
        reason = "copies of experts need transformers 5.19 or newer"
        raise ValueError(f"group ({ep_size} ranks) must be all {num_ranks} ranks: {reason}")
    modules = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not modules:
        raise ValueError(f"model ({type(model).__name__}) must have experts to spread")
    divided: list[str] = []
    for prefix, module in modules:
        if problem := find_problem(module):
            leave_to_transformers(module, problem, runner=runner)
            continue
        if ep_size > 1:
            divided += _divide(module, prefix, rank=rank, ep_size=ep_size)
        module.forward = DispatchedExperts(module, group, tp_mesh=None, runner=runner)
    setattr(model, _DDP_IGNORES, [*getattr(model, _DDP_IGNORES, []), *divided])
    return divided


def full_state_dict(model: nn.Module, group: Group = None) -> dict[str, torch.Tensor]:
    """Return the state dict of the model with the experts of all ranks, on the CPU; a collective.

    ``model.save_pretrained(folder, state_dict=state)`` on the first rank writes the same files as
    for a model that was never divided. ``group`` is the one given to ``enable``.
    """
    group, _, ep_size = _resolve(group)
    divided = set(getattr(model, _DDP_IGNORES, []))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in divided:
            shares = [torch.empty_like(tensor) for _ in range(ep_size)]
            dist.all_gather(shares, tensor.contiguous(), group=group)
            tensor = torch.cat([share.cpu() for share in shares])
        state[name] = tensor.cpu()
    return state


def _resolve(group: Group) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (process group, rank in it, number of ranks); None means the default group, if any."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None, 0, 1
    return group, dist.get_rank(group), dist.get_world_size(group)


def _divide(experts: Any, prefix: str, *, rank: int, ep_size: int) -> list[str]:
    """Delete other ranks' experts from a module, in place; return its parameters' full names."""
    num_local = local_experts(experts.num_experts, ep_size=ep_size)
    names: list[str] = []
    for name, parameter in list(experts.named_parameters(recurse=False)):
        share = parameter.detach()[rank * num_local : (rank + 1) * num_local].clone()
        sharded = nn.Parameter(share, requires_grad=parameter.requires_grad)
        if sharded.requires_grad:
            # Divide: backward sums over the tokens of all ranks, but the loss is a mean over ranks.
            sharded.register_hook(lambda gradient: gradient / ep_size)
        setattr(experts, name, sharded)
        names.append(f"{prefix}.{name}")
    experts.num_experts = num_local
    return names


def register(strategy: str = "auto", *, strict: bool = False, default: bool = False) -> str:
    """Deprecated: use ``enable`` without ``model``. Here ``default`` is False unless given."""
    warn_deprecated("register", "halley.integrations.transformers.enable")
    return enable(strategy=strategy, strict=strict, default=default)


def unregister() -> None:
    """Deprecated name of ``disable``."""
    warn_deprecated("unregister", "halley.integrations.transformers.disable")
    disable()


def shard_experts(
    model: nn.Module, ep_group: Group, *, strategy: str = "auto", strict: bool = False
) -> list[str]:
    """Deprecated form of ``enable(model)``; returns the names of the sharded parameters."""
    warn_deprecated("shard_experts", "halley.integrations.transformers.enable(model, group=...)")
    return shard_model(model, ep_group, runner=ExpertRunner(strategy, strict=strict))


def overlap_shared_experts(model: nn.Module) -> list[str]:
    """Deprecated: warn and return []. Shared experts on a side stream gave no speed-up."""
    warn_deprecated("overlap_shared_experts", "no call in its place: it has no effect any more")
    return []
