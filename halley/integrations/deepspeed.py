"""MoE layers that DeepSpeed's AutoEP makes, run by Halley, by one call; see docs/deepspeed.md."""

from functools import partial
from typing import Any

import torch

from halley.core.routing import local_experts
from halley.core.types import Experts, Routing
from halley.integrations.contract import ExpertParallelism, LocalExperts, describe, mark
from halley.integrations.versions import check_arguments, find_version, import_parts


__all__ = ["NEWEST", "HalleyMoELayer", "describe", "disable", "enable"]

NEWEST = (0, 19)  # the newest minor version that the tests run with
_INSTALL, _LAYERS = "deepspeed", "deepspeed.module_inject.auto_ep_layer"

_AutoEPMoELayer, _RouterOutput, _comm, _layers = import_parts(
    "deepspeed",
    {
        "AutoEPMoELayer": _LAYERS,
        "RouterOutput": _LAYERS,
        "COMM_BACKEND": _LAYERS,
        "auto_ep_layer": "deepspeed.module_inject",
    },
    install=_INSTALL,
    newest=NEWEST,
)
_check = partial(check_arguments, package="deepspeed", newest=NEWEST)
_check(_AutoEPMoELayer._forward, ("self", "hidden_states"))
_check(_AutoEPMoELayer._finalize_output, ("self", "output", "x", "hidden_states", "hdim"))


def enable(strategy: str = "auto", *, strict: bool = False) -> str:
    """Have AutoEP make layers that Halley runs, in each ``deepspeed.initialize`` after this.

    May be called again: the last call counts.

    Args:
        strategy: how experts run: "auto", "sequential", "chunked", "unfused" or "fused"; the last
            two also with what they keep for backward, as in "fused:inputs".
        strict: True raises where the default warns once and leaves a layer to DeepSpeed.

    Returns:
        A sentence that says what was enabled.

    Raises:
        ValueError: there is no such strategy.
    """
    version = find_version("deepspeed", install=_INSTALL)

    class Layer(HalleyMoELayer):
        parallelism = ExpertParallelism(strategy, strict=strict)

    # AutoEP takes the class from its module whenever it makes a layer.
    _layers.AutoEPMoELayer = Layer
    return f"deepspeed {version}: experts of AutoEP's layers run by Halley (strategy {strategy})"


def disable() -> None:
    """Have AutoEP make its own layers again; models that were made keep theirs."""
    _layers.AutoEPMoELayer = _AutoEPMoELayer


class HalleyMoELayer(_AutoEPMoELayer):
    """AutoEP's layer with everything from dispatch to combine run by a strategy.

    Parameters, router and shared experts are those of the class that it stands for.
    """

    parallelism: ExpertParallelism  # of the class that ``enable`` makes, shared by all layers

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        local_experts(self.num_experts, ep_size=self.ep_size)
        self._described = False
        if problem := self._find_problem():
            self._leave(problem)
        elif custom := self._find_custom():
            self.parallelism.check(custom)

    def _forward(self, hidden_states: torch.Tensor) -> Any:
        if problem := self._find_problem():
            self._leave(problem)
            return super()._forward(hidden_states)
        shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, shape[-1])
        routed = _RouterOutput(*self.router(x_TD, self.expert_bias))
        with torch.no_grad():
            self.tokens_per_expert.add_(routed.num_tokens_per_expert)
        experts = self._local_experts(x_TD.dtype)
        routing = Routing(
            topk_idx_TK=routed.selected_experts.long(), topk_weights_TK=routed.top_scores
        )
        y_TD = self.parallelism.run(x_TD, routing, experts, group=self.ep_group)
        if not self._described:
            self._described = True
            path = self.parallelism.describe(experts, top_k=self.top_k, group=self.ep_group)
            mark(self, f"halley: {path}")
        return self._finalize_output(y_TD.view(shape), x_TD, hidden_states, shape[-1])

    def _find_problem(self) -> str:
        """Return why the layer must be left to DeepSpeed, or ""; some is known only in forward."""
        if self.score_apply != "post":
            return f"score_apply ({self.score_apply}) must be post"
        if self.comm_backend != _comm:
            return f"comm_backend ({self.comm_backend}) must be {_comm}"
        handles = self.folding_group_handles
        if handles is not None and handles.spec.tp_size > 1:
            return f"autotp_size ({handles.spec.tp_size}) must be 1"
        if hasattr(self.experts.w1, "ds_status"):
            return "ZeRO stage (3) must be 1 or 2"
        return ""

    def _find_custom(self) -> str:
        found = self.experts.activation
        return "" if found == "swiglu" else f"the experts' activation is {found}"

    def _leave(self, problem: str) -> None:
        self.parallelism.refuse(problem, instead="DeepSpeed runs the layer")
        mark(self, f"deepspeed: {problem}")

    def _local_experts(self, dtype: torch.dtype) -> LocalExperts:
        reason, stacked = self._find_custom(), None
        if not reason:
            gate, down, up = (
                weight.to(dtype) for weight in (self.experts.w1, self.experts.w2, self.experts.w3)
            )
            # Two parameters, one operand: a copy in each forward, which no view can save.
            stacked = Experts(up_LGD=torch.cat([gate, up], dim=1), down_LDF=down)
        return LocalExperts(
            num_local=self.num_local_experts,
            function=self._apply_own,
            stacked=stacked,
            reason=reason,
        )

    def _apply_own(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        return self.experts(rows_RD, torch.bincount(ids_R, minlength=self.num_local_experts))
