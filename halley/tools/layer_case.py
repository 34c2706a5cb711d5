"""One MoE layer to measure: its tensors on this rank, and the values that a run must give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig
from halley.core.placement import ExpertPlacement, choose_replicas, replica_choices
from halley.core.reference import moe_reference
from halley.core.routing import count_tokens_per_expert, local_experts
from halley.core.sharding import shard_size
from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, Routing
from halley.distributed.mesh import ParallelGroups
from halley.ops.exchange import gather_table
from halley.ops.replicas import Replicas, share_gradients
from halley.planner.expert_balance import plan_placement
from halley.strategies.base import AbstractStrategy
from halley.tools.skew import parse_load, sample_routing


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """What to measure: the MoE layer of a model under a given load.

    Attributes:
        num_tokens: of each rank.
        skew: as ``halley.tools.skew.parse_load`` reads it.
        spare: experts that a rank may hold beyond its share, in a placement that is planned from
            the very routing; None for the plain placement.
    """

    model: ModelConfig
    num_tokens: int
    skew: str = "balanced"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    spare: int | None = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where the experts of a case are, if not in their plain places.

    Attributes:
        placement: of all ranks.
        rank: this rank.
        choices: as from ``core.placement.replica_choices``.
        replicas: exchanges gradients; None if there are no replicas.
    """

    placement: ExpertPlacement
    rank: int
    choices: tuple[torch.Tensor, torch.Tensor]
    replicas: Replicas | None


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """The tensors of a case on this rank; those that are differentiated want gradients.

    Attributes:
        counts_WE: slots of each rank for each expert; for each replica if experts are placed.
        placed: where they are; None for the plain placement.
    """

    x_TD: torch.Tensor
    routing: Routing
    experts: Experts
    grad_TD: torch.Tensor
    counts_WE: torch.Tensor
    placed: Placed | None = None

    def run(self, strategy: AbstractStrategy) -> torch.Tensor:
        """Return the layer's output, as ``MoELayer`` makes it behind its router."""
        experts = self.experts
        if self.placed is not None and self.placed.replicas is not None:
            experts = share_gradients(experts, self.placed.replicas)
        return strategy.forward(self.x_TD, self.routed(), experts)

    def routed(self) -> Routing:
        """Return the routing as strategies take it, with replicas for experts that are placed."""
        if self.placed is None:
            return self.routing
        idx_TK, rank = self.routing.topk_idx_TK, self.placed.rank
        replicas_TK = choose_replicas(idx_TK, *self.placed.choices, rank=rank)
        return replace(self.routing, topk_idx_TK=replicas_TK)

    def layer(self) -> tuple[torch.Tensor, Routing, Experts]:
        """Return what a strategy takes."""
        return self.x_TD, self.routed(), self.experts

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


def make_tensors(
    case: LayerCase,
    groups: ParallelGroups,
    *,
    device: torch.device,
    recorder: Recorder | None = None,
) -> LayerTensors:
    """Draw tokens, routing, weights and output gradients of this rank; random, from the seed.

    Args:
        recorder: marks the time spent waiting for the gradients of replicas.
    """
    moe, hidden = case.model.moe, case.model.hidden_size
    on_cpu = torch.Generator().manual_seed(1_000_003 * case.seed + groups.ep_rank)
    generator = torch.Generator(device).manual_seed(1_000_003 * case.seed + groups.ep_rank)
    load_E = parse_load(case.skew, num_experts=moe.num_experts, top_k=moe.top_k)
    routing = sample_routing(
        load_E, case.num_tokens, top_k=moe.top_k, generator=on_cpu, device=device
    )
    routing.topk_weights_TK.requires_grad_()
    counts_WE = _count(routing, moe.num_experts, groups)
    placed = None
    if case.spare is not None:
        counts_E = counts_WE.sum(0).tolist()
        recorder = recorder or Recorder(device, enabled=False)
        placed = _place(counts_E, groups, spare=case.spare, device=device, recorder=recorder)
    experts = _draw_experts(case, groups, placed, generator=generator)

    def draw() -> torch.Tensor:
        values = torch.empty((case.num_tokens, hidden), dtype=case.dtype, device=device)
        return values.normal_(0.0, 1.0, generator=generator)

    tensors = LayerTensors(
        x_TD=draw().requires_grad_(),
        routing=routing,
        experts=experts,
        grad_TD=draw(),
        counts_WE=counts_WE,
        placed=placed,
    )
    if placed is None:
        return tensors
    num_replicas = placed.placement.num_ranks * placed.placement.num_local
    return replace(tensors, counts_WE=_count(tensors.routed(), num_replicas, groups))


def _count(routing: Routing, num_experts: int, groups: ParallelGroups) -> torch.Tensor:
    counts_E = count_tokens_per_expert(routing.topk_idx_TK, num_experts)
    return gather_table(counts_E, group=groups.ep).cpu()


def _place(
    counts_E: list[float],
    groups: ParallelGroups,
    *,
    spare: int,
    device: torch.device,
    recorder: Recorder,
) -> Placed:
    rank = groups.ep_rank
    placement = plan_placement(counts_E, num_ranks=groups.ep_size, spare=spare)
    choices_EC, num_choices_E = replica_choices(placement, rank=rank)
    replicas: Replicas | None = None
    if groups.ep is not None and placement.replicated:
        replicas = Replicas(placement, rank=rank, group=groups.ep, device=device, recorder=recorder)
    return Placed(
        placement=placement,
        rank=rank,
        choices=(choices_EC.to(device), num_choices_E.to(device)),
        replicas=replicas,
    )


def _draw_experts(
    case: LayerCase, groups: ParallelGroups, placed: Placed | None, *, generator: torch.Generator
) -> Experts:
    """Draw the weights of this rank's experts; those of replicas by their expert alone."""
    moe, hidden = case.model.moe, case.model.hidden_size
    inner = shard_size(moe.intermediate_size, tp_size=groups.tp_size)
    up_size = inner * (2 if moe.activation == "swiglu" else 1)
    if placed is None:
        num_local = local_experts(moe.num_experts, ep_size=groups.ep_size, tp_size=groups.tp_size)
    else:
        num_local = placed.placement.num_local
    place = {"dtype": case.dtype, "device": generator.device}
    up_LGD = torch.empty((num_local, up_size, hidden), **place)
    down_LDF = torch.empty((num_local, hidden, inner), **place)

    def fill(up: torch.Tensor, down: torch.Tensor, generator: torch.Generator) -> None:
        up.normal_(0.0, hidden**-0.5, generator=generator)
        down.normal_(0.0, moe.intermediate_size**-0.5, generator=generator)

    if placed is None:
        fill(up_LGD, down_LDF, generator)
    else:
        for index, expert in enumerate(placed.placement.experts_WL[placed.rank]):
            of_expert = torch.Generator(generator.device)
            of_expert.manual_seed(1_000_003 * case.seed + groups.ep_size + expert)
            fill(up_LGD[index], down_LDF[index], of_expert)
    return Experts(
        up_LGD=up_LGD.requires_grad_(),
        down_LDF=down_LDF.requires_grad_(),
        activation=moe.activation,
    )


def outputs_of(
    strategy: AbstractStrategy, tensors: LayerTensors, *, backward: bool = True
) -> list[torch.Tensor]:
    """Run forward, and backward unless not; return output and gradients of ``leaves()``."""
    if not backward:
        with torch.no_grad():
            return [tensors.run(strategy)]
    y_TD = tensors.run(strategy)
    gradients = torch.autograd.grad(y_TD, tensors.leaves(), tensors.grad_TD)
    return [y_TD.detach(), *gradients]


def reference_outputs(tensors: LayerTensors, groups: ParallelGroups) -> list[torch.Tensor]:
    """Return what ``outputs_of`` must return, by the reference over all ranks' tokens.

    Each rank runs its own experts, or shards, for all tokens; the parts are summed over the ranks.
    """
    x_AD = _gather(tensors.x_TD.detach().float(), groups).requires_grad_()
    idx_AK = _gather(tensors.routing.topk_idx_TK, groups)
    weights_AK = _gather(tensors.routing.topk_weights_TK.detach(), groups).requires_grad_()
    experts, grad_AD = tensors.experts, _gather(tensors.grad_TD.float(), groups)
    own_set, num_sets = groups.ep_rank // groups.tp_size, groups.ep_size // groups.tp_size
    placement = ExpertPlacement.plain(tensors.counts_WE.shape[1], num_ranks=num_sets)
    if tensors.placed is not None:
        placement = tensors.placed.placement
    held = placement.experts_WL[own_set]

    def sum_of(some: Sequence[int]) -> torch.Tensor:
        """Return the sum over some of this rank's experts; others are as if dropped."""
        places_E = torch.full((placement.num_experts + 1,), DROPPED, device=idx_AK.device)
        for expert in some:
            places_E[expert] = held.index(expert)
        routing = Routing(topk_idx_TK=places_E[idx_AK], topk_weights_TK=weights_AK)
        return moe_reference(x_AD, routing, experts)

    # Of replicas the first counts, though each has the gradient of all tokens.
    first = [expert for expert in held if placement.ranks_of(expert)[0] == own_set]
    y_AD = sum_of(first)
    tokens, weights = [x_AD, weights_AK], [experts.up_LGD, experts.down_LDF]
    if len(first) == len(held):
        x_grad, weights_grad, *expert_grads = torch.autograd.grad(y_AD, tokens + weights, grad_AD)
    else:
        x_grad, weights_grad = torch.autograd.grad(y_AD, tokens, grad_AD)
        expert_grads = torch.autograd.grad(sum_of(held), weights, grad_AD)
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
