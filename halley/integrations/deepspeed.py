"""Run the MoE layers of DeepSpeed's AutoEP by a strategy of Halley; see docs/deepspeed.md."""

from functools import cache
from typing import Any

import torch

from halley.core.types import Routing, local_experts
from halley.integrations.contract import (
    ExpertRunner,
    Framework,
    LocalExperts,
    describe,
    set_description,
    shared_runner,
    stack_swiglu,
)


__all__ = ["FRAMEWORK", "HalleyMoELayer", "describe", "disable", "enable"]

FRAMEWORK = Framework(package="deepspeed", install="deepspeed", newest=(0, 19))
_LAYERS = "deepspeed.module_inject.auto_ep_layer"

_NAMES = dict.fromkeys(("AutoEPMoELayer", "RouterOutput", "COMM_BACKEND"), _LAYERS)
_deepspeed = FRAMEWORK.import_names({**_NAMES, "auto_ep_layer": "deepspeed.module_inject"})
FRAMEWORK.check_parameters(_deepspeed.AutoEPMoELayer._forward, "self", "hidden_states")
FRAMEWORK.check_parameters(
    _deepspeed.AutoEPMoELayer._finalize_output, "self", "output", "x", "hidden_states", "hdim"
)


def enable(strategy: str = "auto", *, strict: bool = False) -> str:
    """Make AutoEP build a subclass of ``HalleyMoELayer`` in every later ``deepspeed.initialize``.

    A second call replaces the options of the first for engines made after it. Existing engines keep
    their layers and options, and DeepSpeed still finds these layers. The returned sentence says
    what was enabled.

    Args:
        strategy: a name that ``halley.build_strategy`` accepts, such as "fused:inputs".
        strict: raise an error where the default warns once and leaves a layer to DeepSpeed.

    Raises:
        ValueError: ``strategy`` is unknown.
    """
    # AutoEP has no registry. It reads this attribute of its module whenever it builds a layer.
    _deepspeed.auto_ep_layer.AutoEPMoELayer = _layer_class(strategy, strict)
    version = FRAMEWORK.find_version()
    return f"deepspeed {version}: experts of AutoEP's layers run by Halley (strategy {strategy})"


def disable() -> None:
    """Make AutoEP build its own layers again; existing engines keep Halley's layers."""
    _deepspeed.auto_ep_layer.AutoEPMoELayer = _deepspeed.AutoEPMoELayer


class HalleyMoELayer(_deepspeed.AutoEPMoELayer):
    """AutoEP's MoE layer; Halley runs its dispatch, routed experts and combine where supported.

    Parameters, router and shared experts are AutoEP's. DeepSpeed runs all other layers.
    """

    runner: ExpertRunner  # shared by all layers of a subclass; ``_layer_class`` sets it

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        local_experts(self.num_experts, ep_size=self.ep_size)
        if problem := self._find_problem():
            self._leave_to_deepspeed(problem)
        elif reason := self._find_unsupported():
            self.runner.check_supported(reason)

    def _forward(self, hidden_states: torch.Tensor) -> Any:
        if problem := self._find_problem():
            self._leave_to_deepspeed(problem)
            return super()._forward(hidden_states)
        shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, shape[-1])
        routed = _deepspeed.RouterOutput(*self.router(x_TD, self.expert_bias))
        with torch.no_grad():
            self.tokens_per_expert.add_(routed.num_tokens_per_expert)
        routing = Routing(
            topk_idx_TK=routed.selected_experts.long(), topk_weights_TK=routed.top_scores
        )
        experts = self._local_experts(x_TD.dtype)
        y_TD = self.runner.run(x_TD, routing, experts, group=self.ep_group, module=self)
        return self._finalize_output(y_TD.view(shape), x_TD, hidden_states, shape[-1])

    def _find_problem(self) -> str:
        """Return why DeepSpeed must run this MoE layer itself, or "" if Halley can run it.

        ``_forward`` checks this again, because DeepSpeed sets some attributes after ``__init__``.
        """
        if self.score_apply != "post":
            return f"score_apply ({self.score_apply}) must be post"
        if self.comm_backend != _deepspeed.COMM_BACKEND:
            return f"comm_backend ({self.comm_backend}) must be {_deepspeed.COMM_BACKEND}"
        handles = self.folding_group_handles
        if handles is not None and handles.spec.tp_size > 1:
            return f"autotp_size ({handles.spec.tp_size}) must be 1"
        if hasattr(self.experts.w1, "ds_status"):
            return "ZeRO stage (3) must be 1 or 2"
        return ""

    def _find_unsupported(self) -> str:
        found = self.experts.activation
        return "" if found == "swiglu" else f"the experts' activation is {found}"

    def _leave_to_deepspeed(self, problem: str) -> None:
        self.runner.warn_or_raise(problem, fallback="DeepSpeed runs the layer")
        set_description(self, f"deepspeed: {problem}")

    def _local_experts(self, dtype: torch.dtype) -> LocalExperts:
        reason, own = self._find_unsupported(), self.experts
        num_local, function = self.num_local_experts, self._apply_experts
        stacked = None if reason else stack_swiglu(own.w1, own.w3, own.w2, dtype=dtype)
        return LocalExperts(num_local=num_local, function=function, stacked=stacked, reason=reason)

    def _apply_experts(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        return self.experts(rows_RD, torch.bincount(ids_R, minlength=self.num_local_experts))


class _HasAllLayers(type):
    """Metaclass of a class of which every AutoEP layer is an instance, for ``isinstance``.

    DeepSpeed looks for MoE layers by ``isinstance`` with the class that the last ``enable`` put in
    place of AutoEP's. It must also find layers of engines that were made before this call.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _deepspeed.AutoEPMoELayer)


@cache
def _layer_class(strategy: str, strict: bool) -> type[HalleyMoELayer]:
    """Return a subclass of ``HalleyMoELayer`` with these options, the same for equal options."""

    class Layer(HalleyMoELayer, metaclass=_HasAllLayers):
        runner = shared_runner(strategy, strict)

    return Layer
