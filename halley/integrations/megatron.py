"""Run the routed experts of Megatron-Core by a strategy of Halley; see docs/megatron.md.

``enable(spec)`` returns a model spec with Halley's layers. ``megatron_experts.py`` has the weights.
"""

import importlib
import sys
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from halley.core.types import DROPPED, Routing, local_experts
from halley.integrations.contract import describe, set_description, shared_runner, warn_deprecated
from halley.integrations.megatron_experts import FRAMEWORK, StackedExperts


__all__ = [
    "HalleyMoELayer",
    "StackedExperts",
    "describe",
    "enable",
    "job_spec",
    "layer_spec",
    "use_halley",
]

_NAMES = {
    "MoELayer": "megatron.core.transformer.moe.moe_layer",
    "MoETokenDispatcher": "megatron.core.transformer.moe.token_dispatcher",
    "get_default_pg_collection": "megatron.core.transformer.moe.moe_utils",
}
_mcore = FRAMEWORK.import_names(_NAMES)
for _method in (_mcore.MoELayer.dispatch, _mcore.MoELayer.routed_experts_compute):
    FRAMEWORK.check_parameters(_method, "self", "hidden_states", "probs")

# Fields of Megatron's configuration, and the values of each that Halley supports. A field that is
# missing is accepted. If only None is supported, so are False, 0 and "".
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "expert_gtp_weight_remat_size": (1,),
    "add_bias_linear": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_shared_expert_overlap": (False,),
    "overlap_dispatch_backward_with_experts_wgrad": (False,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "fp8": (None,),
    "fp4": (None,),
    "cuda_graph_impl": ("none",),
    "transformer_impl": ("local", "transformer_engine"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
}


def find_problem(config: Any) -> str:
    """Return a message on the first setting that Halley does not support, or "" if none."""
    for name, accepted in _REQUIRED.items():
        found = getattr(config, name, accepted[0])
        if found not in accepted and (found or accepted != (None,)):
            rule = accepted[0] if len(accepted) == 1 else f"one of {', '.join(accepted)}"
            return f"{name} ({found}) must be {rule}"
    return ""


def find_order_problem(groups: Any) -> str:
    """Return a message if the ranks that share experts are not adjacent in ``tp_ep``, or ""."""
    all_ranks = dist.get_process_group_ranks(groups.tp_ep)
    sharing = dist.get_process_group_ranks(groups.expt_tp)
    first = all_ranks.index(sharing[0])
    if all_ranks[first : first + len(sharing)] == sharing:
        return ""
    return f"expert-tensor-parallel ranks ({sharing}) must be adjacent in {all_ranks}"


@final
class HalleyMoELayer(_mcore.MoELayer):
    """Megatron's MoE layer; Halley runs its routed experts if ``find_problem`` finds no problem.

    Megatron runs the router and shared experts. It calls the phases of a layer one by one.
    Here ``routed_experts_compute`` does the work; ``dispatch`` and ``combine`` return their inputs.

    Args:
        config, submodules, pg_collection, further: as for Megatron's layer.
        strategy: a name that ``halley.build_strategy`` accepts, such as "fused:inputs".
        strict: raise an error where the default warns once and leaves the layer to Megatron.

    Raises:
        ValueError: ``strategy`` is unknown; the number of experts is no multiple of the number of
            ranks; the experts' size is no multiple of the tensor-parallel size; or ``strict``, and
            Halley cannot run the layer.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        *,
        pg_collection: Any = None,
        strategy: str = "auto",
        strict: bool = False,
        **further: Any,
    ) -> None:
        runner = shared_runner(strategy, strict)
        groups = pg_collection or _mcore.get_default_pg_collection()
        local_experts(config.num_moe_experts, ep_size=groups.ep.size())
        problem = find_problem(config) or find_order_problem(groups)
        if problem:
            runner.warn_or_raise(problem, fallback="Megatron runs the layer")
        else:
            submodules = replace(submodules, experts=StackedExperts)
        super().__init__(config, submodules, pg_collection=groups, **further)
        self._runner, self._groups = runner, groups
        self._is_megatrons = bool(problem)
        if problem:
            set_description(self, f"megatron: {problem}")
            return
        self.token_dispatcher = PassThroughDispatcher(config, groups)
        if reason := self.experts.local_experts().reason:
            runner.check_supported(reason)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run dispatch, experts and combine by Halley, or Megatron's own code of this phase.

        A collective of all ranks that hold the layer's experts. The arguments are the results of
        ``dispatch``: tokens ``(T, D)`` and routing weights ``(T, K)``. Halley returns ``(T, D)``
        sums and None.
        """
        if self._is_megatrons:
            return super().routed_experts_compute(hidden_states, probs)
        expert_ids_TK = self.token_dispatcher.pop_expert_ids()
        routing = Routing(topk_idx_TK=expert_ids_TK, topk_weights_TK=probs)
        x_TD = self.token_dispatcher.copy_if_freed(hidden_states)
        where = {"group": self._groups.tp_ep, "tp_size": self._groups.expt_tp.size()}
        experts = self.experts.local_experts()
        return self._runner.run(x_TD, routing, experts, module=self, **where), None


@final
class PassThroughDispatcher(_mcore.MoETokenDispatcher):
    """Token dispatcher that converts routing maps to expert ids; it sends no tokens."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config, pg_collection)
        # With this option, Megatron frees the inputs of a phase after it. So phases return copies.
        self._inputs_are_freed = config.overlap_moe_expert_parallel_comm
        self._expert_ids_TK: torch.Tensor | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens ``(T, D)`` and weights ``(T, K)``; store expert ids for ``pop_expert_ids``.

        ``tokens`` is ``(S, B, D)`` with T = S * B. ``routing_map``, ``(T, E)`` bool, is true for
        at most K experts of each token, and ``probs`` is 0 for the other experts.
        """
        self._shape = tokens.shape
        # Take the top-k of the map, not of the weights: a chosen expert may have the weight 0.
        chosen_TK, ids_TK = routing_map.int().topk(self.config.moe_router_topk, dim=1)
        weights_TK = probs.gather(1, ids_TK)
        self._expert_ids_TK = ids_TK.masked_fill(chosen_TK == 0, DROPPED)
        return self.copy_if_freed(tokens.reshape(-1, tokens.shape[-1])), weights_TK

    def pop_expert_ids(self) -> torch.Tensor:
        """Return the expert ids ``(T, K)`` of the last ``dispatch_preprocess``, and clear them."""
        ids_TK, self._expert_ids_TK = self._expert_ids_TK, None
        assert ids_TK is not None
        return ids_TK

    def copy_if_freed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._inputs_are_freed else tensor

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.copy_if_freed(hidden_states), self.copy_if_freed(probs)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.copy_if_freed(hidden_states)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return a view of the outputs, ``(T, D)``, in the layer's input shape ``(S, B, D)``."""
        return hidden_states.view(self._shape)


def enable(spec: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Return a copy of a spec in which Halley's layer replaces each MoE layer of Megatron.

    Build the model from the returned spec; ``spec`` itself and Megatron do not change.

    Args:
        spec: a ``ModuleSpec``, or a ``TransformerBlockSubmodules`` as Megatron's
            ``get_gpt_decoder_block_spec`` returns it.
        strategy, strict: as for ``HalleyMoELayer``.

    Raises:
        ValueError: the spec has no MoE layer.
    """
    replaced = _replace_layers(spec, strategy=strategy, strict=strict)
    if replaced is spec:
        raise ValueError(f"spec ({type(spec).__name__}) must have a layer of class MoELayer")
    return replaced


def _replace_layers(part: Any, **options: Any) -> Any:
    """Replace MoE layers in a part of a spec: return a copy, or ``part`` if it has no MoE layer."""
    if isinstance(part, partial):  # the form of an MoE layer since Megatron-Core 0.18
        if part.func is not _mcore.MoELayer:
            return part
        return partial(HalleyMoELayer, *part.args, **{**part.keywords, **options})
    if isinstance(part, list | tuple):
        items = [_replace_layers(item, **options) for item in part]
        is_same = all(new is old for new, old in zip(items, part, strict=True))
        return part if is_same else type(part)(items)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {name: _replace_layers(value, **options) for name, value in values.items()}
    if changed.get("module") is _mcore.MoELayer:  # the form before Megatron-Core 0.18
        changed["module"] = HalleyMoELayer
        changed["params"] = {**(values["params"] or {}), **options}
    is_same = all(changed[name] is value for name, value in values.items())
    return part if is_same else replace(part, **changed)


def job_spec() -> Any:
    """Return the spec of the running Megatron-LM job with Halley's layers; None outside of a job.

    This function builds the spec that Megatron-LM builds without ``--spec``, and enables Halley.

    Raises:
        ValueError: the job has virtual pipeline stages, and dense layers among its MoE layers, so
            that the stages need different specs.
    """
    training: Any = sys.modules.get("megatron.training")  # imported if this is a Megatron-LM job
    try:
        arguments = training.get_args()
    except (AttributeError, AssertionError):  # Megatron-LM is not imported or not started
        return None
    frequency = arguments.moe_layer_freq
    mixed = frequency != 1 and frequency != [1] * arguments.num_layers
    if mixed and getattr(arguments, "virtual_pipeline_model_parallel_size", None):
        rule = "1 with virtual pipeline stages"
        remedy = "each has another spec, which a script of your own can give to enable"
        raise ValueError(f"moe_layer_freq ({frequency}) must be {rule}: {remedy}")
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = importlib.import_module("megatron.training.arguments")
    job = config.core_transformer_config_from_args(arguments)
    options = {
        "use_transformer_engine": arguments.transformer_impl == "transformer_engine",
        "normalization": arguments.normalization,
        "qk_l2_norm": arguments.qk_l2_norm,
    }
    if mixed:
        return enable(specs.get_gpt_decoder_block_spec(job, **options))
    # All layers are alike, so the spec of a single layer fits every pipeline stage.
    return enable(specs.get_gpt_decoder_layer_specs(job, **options)[0])


# Megatron-LM's ``--spec`` names a spec object, not a function: so the import makes the object.
layer_spec = job_spec()


def use_halley(spec: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Deprecated name of ``enable``."""
    warn_deprecated("use_halley", "halley.integrations.megatron.enable")
    return enable(spec, strategy=strategy, strict=strict)
