"""Megatron-Core's MoE layer with everything from dispatch to combine run by a strategy."""

from dataclasses import replace
from functools import cache
from typing import Any, final

import torch

from halley.core.routing import local_experts
from halley.core.types import DROPPED, Routing
from halley.integrations.contract import ExpertParallelism, mark
from halley.integrations.megatron.grouped_experts import StackedExperts
from halley.integrations.megatron.mcore import megatron


# What a layer must be set to, by field of Megatron's configuration.
_WANTED: dict[str, Any] = {
    "expert_tensor_parallel_size": 1,
    "add_bias_linear": False,
    "moe_apply_probs_on_input": False,
    "moe_pad_expert_input_to_capacity": False,
    "moe_shared_expert_overlap": False,
    "moe_latent_size": None,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
}
_DISPATCHERS = ("allgather", "alltoall")


@cache
def _parallelism(strategy: str, strict: bool) -> ExpertParallelism:
    """Return what all layers share, buffers of the fused kernels among it."""
    return ExpertParallelism(strategy, strict=strict)


def find_problem(config: Any) -> str:
    """Return why a layer must be left to Megatron, or ""."""
    for name, wanted in _WANTED.items():
        found = getattr(config, name, wanted)
        if found != wanted and not (wanted is None and not found):
            return f"{name} ({found}) must be {wanted}"
    kind = config.moe_token_dispatcher_type
    if kind not in _DISPATCHERS:
        return f"moe_token_dispatcher_type ({kind}) must be one of {', '.join(_DISPATCHERS)}"
    return ""


@final
class HalleyMoELayer(megatron.MoELayer):
    """Megatron's layer; its router and shared experts are Megatron's, its experts stacked.

    The phases that Megatron's schedules call one by one stay: ``dispatch`` and ``combine`` pass
    on what they get, ``routed_experts_compute`` does their work too.

    Args:
        config, submodules, layer_number, pg_collection: as for Megatron's layer.
        strategy: "auto", "sequential", "chunked", "unfused" or "fused"; the last two also with what
            they keep for backward, as in "fused:inputs".
        strict: True raises where the default warns once and leaves the layer to Megatron.

    Raises:
        ValueError: there is no such strategy; the experts do not divide over the ranks; or, if
            strict, see ``find_problem``.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        strategy: str = "auto",
        strict: bool = False,
    ) -> None:
        parallelism = _parallelism(strategy, strict)
        groups = pg_collection or megatron.get_default_pg_collection()
        local_experts(config.num_moe_experts, ep_size=groups.ep.size())
        problem = find_problem(config)
        if problem:
            parallelism.refuse(problem, instead="Megatron runs the layer")
        else:
            experts = megatron.ModuleSpec(module=StackedExperts)
            submodules = replace(submodules, experts=experts)
        super().__init__(config, submodules, layer_number, groups)
        self._left, self._described = bool(problem), False
        self._parallelism = parallelism
        if problem:
            mark(self, f"megatron: {problem}")
            return
        self.token_dispatcher = PassingDispatcher(config, groups)
        if custom := self.experts.local_experts().reason:
            parallelism.check(custom)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the weighted sums over each token's experts, ``(T, D)``, and no bias.

        A collective of the expert-parallel group.

        Args:
            hidden_states: ``(T, D)``, as from ``dispatch``.
            probs: routing weights, ``(T, K)``, as from ``dispatch``.
        """
        if self._left:
            return super().routed_experts_compute(hidden_states, probs)
        experts, group = self.experts.local_experts(), self.ep_group
        routing = Routing(topk_idx_TK=self.token_dispatcher.take_ids(), topk_weights_TK=probs)
        x_TD = self.token_dispatcher.own(hidden_states)
        y_TD = self._parallelism.run(x_TD, routing, experts, group=group)
        if not self._described:
            self._described = True
            path = self._parallelism.describe(experts, top_k=probs.shape[1], group=group)
            mark(self, f"halley: {path}")
        return y_TD, None


@final
class PassingDispatcher(megatron.MoETokenDispatcher):
    """Hands tokens, their experts and weights on to ``routed_experts_compute``."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config, pg_collection)
        # The batch-overlap schedule frees a phase's inputs once it is through.
        self._frees_inputs = config.overlap_moe_expert_parallel_comm
        self._idx_TK: torch.Tensor | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, ``(T, D)``, and the weights of their experts, ``(T, K)``.

        Args:
            tokens: ``(S, B, D)``.
            routing_map: which experts a token goes to, ``(T, E)`` bool; at most K of them.
            probs: their weights, ``(T, E)``, 0 elsewhere.
        """
        self._shape = tokens.shape
        # By the map and not by the weights, of which a chosen one may be 0.
        chosen_TK, idx_TK = routing_map.int().topk(self.config.moe_router_topk, dim=1)
        weights_TK = probs.gather(1, idx_TK)
        self._idx_TK = idx_TK.masked_fill(chosen_TK == 0, DROPPED)
        return self.own(tokens.reshape(-1, tokens.shape[-1])), weights_TK

    def take_ids(self) -> torch.Tensor:
        """Return the expert ids that the last ``dispatch_preprocess`` found, ``(T, K)``."""
        ids, self._idx_TK = self._idx_TK, None
        assert ids is not None
        return ids

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy where the schedule will free it while it is needed."""
        return tensor.clone() if self._frees_inputs else tensor

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own(hidden_states), self.own(probs)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.own(hidden_states)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums in the shape of the tokens, ``(S, B, D)``."""
        return hidden_states.view(self._shape)
