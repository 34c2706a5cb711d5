"""One MoE layer to measure: its tensors on this rank, and the values that a run must give."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig
from halley.core.reference import moe_reference
from halley.core.routing import count_tokens_per_expert, local_experts
from halley.core.sharding import shard_size
from halley.core.skew import parse_load, sample_routing
from halley.core.types import Experts, Routing
from halley.moe.parallel import ParallelGroups
from halley.ops.exchange import gather_table
from halley.strategies.base import AbstractStrategy


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """What to measure: the MoE layer of a model under a given load.

    Attributes:
        num_tokens: of each rank.
        skew: as ``halley.core.skew.parse_load`` reads it.
    """

    model: ModelConfig
    num_tokens: int
    skew: str = "balanced"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """The tensors of a case on this rank; those that are differentiated want gradients."""

    x_TD: torch.Tensor
    routing: Routing
    experts: Experts
    grad_TD: torch.Tensor
    counts_WE: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that have gradients: tokens, routing weights, expert weights."""
        return [
            self.x_TD,
            self.routing.topk_weights_TK,
            self.experts.up_LGD,
            self.experts.down_LDF,
        ]

    @property
    def names(self) -> list[str]:
        """Return what ``outputs_of`` returns, in words."""
        return ["y", "x.grad", "weights.grad", "up.grad", "down.grad"]


def make_tensors(case: LayerCase, groups: ParallelGroups, *, device: torch.device) -> LayerTensors:
    """Draw tokens, routing, weights and output gradients of this rank; random, from the seed."""
    moe, hidden = case.model.moe, case.model.hidden_size
    num_local = local_experts(moe.num_experts, ep_size=groups.ep_size, tp_size=groups.tp_size)
    inner = shard_size(moe.intermediate_size, tp_size=groups.tp_size)
    on_cpu = torch.Generator().manual_seed(1_000_003 * case.seed + groups.ep_rank)
    generator = torch.Generator(device).manual_seed(1_000_003 * case.seed + groups.ep_rank)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        values = torch.empty(shape, dtype=case.dtype, device=device)
        return values.normal_(0.0, scale, generator=generator)

    load_E = parse_load(case.skew, num_experts=moe.num_experts, top_k=moe.top_k)
    routing = sample_routing(
        load_E, case.num_tokens, top_k=moe.top_k, generator=on_cpu, device=device
    )
    routing.topk_weights_TK.requires_grad_()
    up_size = inner * (2 if moe.activation == "swiglu" else 1)
    experts = Experts(
        up_LGD=draw(num_local, up_size, hidden, scale=hidden**-0.5).requires_grad_(),
        down_LDF=draw(num_local, hidden, inner, scale=moe.intermediate_size**-0.5).requires_grad_(),
        activation=moe.activation,
    )
    counts_E = count_tokens_per_expert(routing.topk_idx_TK, moe.num_experts)
    return LayerTensors(
        x_TD=draw(case.num_tokens, hidden, scale=1.0).requires_grad_(),
        routing=routing,
        experts=experts,
        grad_TD=draw(case.num_tokens, hidden, scale=1.0),
        counts_WE=gather_table(counts_E, group=groups.ep).cpu(),
    )


def outputs_of(
    strategy: AbstractStrategy, tensors: LayerTensors, *, backward: bool = True
) -> list[torch.Tensor]:
    """Run forward, and backward unless not; return output and gradients of ``leaves()``."""
    if not backward:
        with torch.no_grad():
            return [strategy.forward(tensors.x_TD, tensors.routing, tensors.experts)]
    y_TD = strategy.forward(tensors.x_TD, tensors.routing, tensors.experts)
    gradients = torch.autograd.grad(y_TD, tensors.leaves(), tensors.grad_TD)
    return [y_TD.detach(), *gradients]


def reference_outputs(tensors: LayerTensors, groups: ParallelGroups) -> list[torch.Tensor]:
    """Return what ``outputs_of`` must return, by the reference over all ranks' tokens.

    Each rank runs its own experts, or shards, for all tokens; the parts are summed over the ranks.
    """
    x_AD = _gather(tensors.x_TD.detach().float(), groups).requires_grad_()
    idx_AK = _gather(tensors.routing.topk_idx_TK, groups)
    weights_AK = _gather(tensors.routing.topk_weights_TK.detach(), groups).requires_grad_()
    routing = Routing(topk_idx_TK=idx_AK, topk_weights_TK=weights_AK)
    experts = tensors.experts
    first_expert = groups.ep_rank // groups.tp_size * experts.num_local_experts
    y_AD = moe_reference(x_AD, routing, experts, first_expert=first_expert)
    grad_AD = _gather(tensors.grad_TD.float(), groups)
    leaves = [x_AD, weights_AK, experts.up_LGD, experts.down_LDF]
    x_grad, weights_grad, *expert_grads = torch.autograd.grad(y_AD, leaves, grad_AD)
    y_AD = y_AD.detach()
    num_tokens = tensors.x_TD.shape[0]
    own = slice(groups.ep_rank * num_tokens, (groups.ep_rank + 1) * num_tokens)
    if groups.ep is not None:
        for part in (y_AD, x_grad, weights_grad):
            dist.all_reduce(part, group=groups.ep)
    return [y_AD[own], x_grad[own], weights_grad[own], *expert_grads]


def _gather(part: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Return the parts of all ranks of the expert-parallel group, one below another."""
    if groups.ep is None:
        return part
    parts = [torch.empty_like(part) for _ in range(groups.ep_size)]
    dist.all_gather(parts, part.contiguous(), group=groups.ep)
    return torch.cat(parts)
