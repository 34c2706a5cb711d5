"""Draw the tensors of one MoE layer for a measurement, and compute its correct outputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig
from halley.core.placement import ExpertPlacement, choose_replicas, replica_choices
from halley.core.reference import moe_reference
from halley.core.routing import count_tokens_per_expert, local_experts, shard_size
from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, Routing
from halley.distributed.mesh import ParallelGroups
from halley.ops.exchange import Replicas, gather_table, share_gradients
from halley.planner.expert_balance import plan_placement
from halley.strategies.base import AbstractStrategy
from halley.tools.skew import parse_load, sample_routing


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """The MoE layer of a model under a given load.

    Attributes:
        model: sizes of the layer.
        num_tokens: tokens per rank.
        skew: the load of the experts, in the syntax of ``halley.tools.skew.parse_load``.
        dtype: of tokens and expert weights.
        seed: of tokens, weights and routing.
        spare: most experts of a rank beyond an even share, in a placement planned for the drawn
            routing; None for the plain placement.
    """

    model: ModelConfig
    num_tokens: int
    skew: str = "balanced"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    spare: int | None = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A placement of the benchmark layer's experts that was planned for its load.

    Attributes:
        placement: the experts of all ranks.
        rank: this rank.
        choices: the result of ``core.placement.replica_choices``.
        replicas: sums the gradients of replicas; None if no expert has several replicas.
    """

    placement: ExpertPlacement
    rank: int
    choices: tuple[torch.Tensor, torch.Tensor]
    replicas: Replicas | None


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """The tensors of a benchmark layer on this rank. Tokens and all weights require gradients.

    Attributes:
        x_TD: tokens.
        routing: the experts of each token.
        experts: weights of this rank's experts.
        grad_TD: gradient of the layer's output.
        counts_WE: routed rows from each rank to each expert, or to each replica of placed experts.
        placed: the planned placement of the experts; None for the plain one.
    """

    x_TD: torch.Tensor
    routing: Routing
    experts: Experts
    grad_TD: torch.Tensor
    counts_WE: torch.Tensor
    placed: Placed | None = None

    def run(self, strategy: AbstractStrategy) -> torch.Tensor:
        """Return the output of the layer, computed as ``MoELayer`` does after its router."""
        experts = self.experts
        if self.placed is not None and self.placed.replicas is not None:
            experts = share_gradients(experts, self.placed.replicas)
        return strategy.forward(self.x_TD, self.routed(), experts)

    def routed(self) -> Routing:
        """Return the routing for a strategy; with ``placed``, its ids are those of replicas."""
        if self.placed is None:
            return self.routing
        idx_TK, rank = self.routing.topk_idx_TK, self.placed.rank
        replicas_TK = choose_replicas(idx_TK, *self.placed.choices, rank=rank)
        return replace(self.routing, topk_idx_TK=replicas_TK)

    def layer(self) -> tuple[torch.Tensor, Routing, Experts]:
        """Return the arguments of ``AbstractStrategy.forward``."""
        return self.x_TD, self.routed(), self.experts

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that require gradients: tokens, routing weights, expert weights."""
        weights_TK, experts = self.routing.topk_weights_TK, self.experts
        return [self.x_TD, weights_TK, experts.up_LGD, experts.down_LDF]


def make_tensors(
    case: LayerCase,
    groups: ParallelGroups,
    *,
    device: torch.device,
    recorder: Recorder | None = None,
) -> LayerTensors:
    """Draw random tokens, routing, weights and output gradients of this rank from the seed.

    Args:
        case: the layer and its load.
        groups: the ranks of the layer.
        device: of this rank.
        recorder: records the waits for the gradients of replicas.
    """
    moe, hidden = case.model.moe, case.model.hidden_size
    # The routing is drawn on the CPU, so that it is the same for all kinds of devices.
    cpu_generator = torch.Generator().manual_seed(1_000_003 * case.seed + groups.ep_rank)
    generator = torch.Generator(device).manual_seed(1_000_003 * case.seed + groups.ep_rank)
    load_E = parse_load(case.skew, num_experts=moe.num_experts, top_k=moe.top_k)
    routing = sample_routing(
        load_E, case.num_tokens, top_k=moe.top_k, generator=cpu_generator, device=device
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
    """Draw the weights of this rank's experts; replicas of an expert get equal weights."""
    moe, hidden = case.model.moe, case.model.hidden_size
    inner_size = shard_size(moe.intermediate_size, tp_size=groups.tp_size)
    up_size = inner_size * (2 if moe.activation == "swiglu" else 1)
    if placed is None:
        num_local = local_experts(moe.num_experts, ep_size=groups.ep_size, tp_size=groups.tp_size)
    else:
        num_local = placed.placement.num_local
    place = {"dtype": case.dtype, "device": generator.device}
    up_LGD = torch.empty((num_local, up_size, hidden), **place)
    down_LDF = torch.empty((num_local, hidden, inner_size), **place)

    def draw(up: torch.Tensor, down: torch.Tensor, generator: torch.Generator) -> None:
        up.normal_(0.0, hidden**-0.5, generator=generator)
        down.normal_(0.0, moe.intermediate_size**-0.5, generator=generator)

    if placed is None:
        draw(up_LGD, down_LDF, generator)
    else:
        # The seed of an expert does not depend on the rank, so that its replicas are equal.
        for index, expert in enumerate(placed.placement.experts_WL[placed.rank]):
            expert_generator = torch.Generator(generator.device)
            expert_generator.manual_seed(1_000_003 * case.seed + groups.ep_size + expert)
            draw(up_LGD[index], down_LDF[index], expert_generator)
    return Experts(
        up_LGD=up_LGD.requires_grad_(),
        down_LDF=down_LDF.requires_grad_(),
        activation=moe.activation,
    )


def outputs_of(
    strategy: AbstractStrategy, tensors: LayerTensors, *, backward: bool = True
) -> list[torch.Tensor]:
    """Run forward, and backward if asked; return the output and the gradients of ``leaves()``."""
    if not backward:
        with torch.no_grad():
            return [tensors.run(strategy)]
    y_TD = tensors.run(strategy)
    gradients = torch.autograd.grad(y_TD, tensors.leaves(), tensors.grad_TD)
    return [y_TD.detach(), *gradients]


def reference_outputs(tensors: LayerTensors, groups: ParallelGroups) -> list[torch.Tensor]:
    """Return the correct result of ``outputs_of``, computed by ``core/reference.py``; a collective.

    Each rank runs its own experts (or shards of them) for the tokens of all ranks. An all-reduce
    sums the partial outputs.
    """
    x_AD = _gather(tensors.x_TD.detach().float(), groups).requires_grad_()
    idx_AK = _gather(tensors.routing.topk_idx_TK, groups)
    weights_AK = _gather(tensors.routing.topk_weights_TK.detach(), groups).requires_grad_()
    experts, grad_AD = tensors.experts, _gather(tensors.grad_TD.float(), groups)
    # The ranks of a tensor-parallel group hold shards of the same set of experts.
    own_set, num_sets = groups.ep_rank // groups.tp_size, groups.ep_size // groups.tp_size
    placement = ExpertPlacement.plain(tensors.counts_WE.shape[1], num_ranks=num_sets)
    if tensors.placed is not None:
        placement = tensors.placed.placement
    local = placement.experts_WL[own_set]

    def run_experts(chosen: Sequence[int]) -> torch.Tensor:
        """Return the summed output of some experts of this rank; other slots count as dropped."""
        # The last element stays DROPPED: index -1 of a dropped slot selects it.
        local_idx_E = torch.full((placement.num_experts + 1,), DROPPED, device=idx_AK.device)
        for expert in chosen:
            local_idx_E[expert] = local.index(expert)
        routing = Routing(topk_idx_TK=local_idx_E[idx_AK], topk_weights_TK=weights_AK)
        return moe_reference(x_AD, routing, experts)

    # Only the first replica adds to the output, but each replica gets the gradient of all tokens.
    first = [expert for expert in local if placement.ranks_of(expert)[0] == own_set]
    y_AD = run_experts(first)
    tokens, weights = [x_AD, weights_AK], [experts.up_LGD, experts.down_LDF]
    if len(first) == len(local):
        x_grad, weights_grad, *expert_grads = torch.autograd.grad(y_AD, tokens + weights, grad_AD)
    else:
        x_grad, weights_grad = torch.autograd.grad(y_AD, tokens, grad_AD)
        expert_grads = torch.autograd.grad(run_experts(local), weights, grad_AD)
    y_AD = y_AD.detach()
    num_tokens = tensors.x_TD.shape[0]
    own = slice(groups.ep_rank * num_tokens, (groups.ep_rank + 1) * num_tokens)
    if groups.ep is not None:
        for partial_sum in (y_AD, x_grad, weights_grad):
            dist.all_reduce(partial_sum, group=groups.ep)
    return [y_AD[own], x_grad[own], weights_grad[own], *expert_grads]


def _gather(rows: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Concatenate the rows of all ranks of the expert-parallel group."""
    if groups.ep is None:
        return rows
    of_ranks = [torch.empty_like(rows) for _ in range(groups.ep_size)]
    dist.all_gather(of_ranks, rows.contiguous(), group=groups.ep)
    return torch.cat(of_ranks)


# Largest ``relative_error`` of correct values. A layer rounds about four times, and each rounding
# adds at most half a unit in the last place (8 bits in bfloat16, 11 in float16).
RELATIVE_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}

_SLICE_SIZE = 2**26  # elements


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in the Euclidean norm, computed in float64.

    If the reference is zero, the result is 0 for a zero value and infinity otherwise. A value that
    is not finite gives infinity, so that NaN never passes a comparison.

    Raises:
        ValueError: the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(
            f"value {tuple(value.shape)} must have the reference's shape {tuple(reference.shape)}"
        )
    difference = norm = 0.0
    # In slices, because float64 copies of all expert weights would not fit beside the weights.
    values = torch.split(value.flatten(), _SLICE_SIZE)
    references = torch.split(reference.flatten(), _SLICE_SIZE)
    for found, expected in zip(values, references, strict=True):
        difference += (found.double() - expected.double()).square().sum().item()
        norm += expected.double().square().sum().item()
    if not math.isfinite(difference):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)
