"""Draw the tensors of one MoE layer to measure; compute its correct output and gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig
from halley.core.placement import ExpertPlacement, choose_replicas, replica_choices
from halley.core.reference import moe_reference
from halley.core.routing import count_tokens_per_expert
from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, Routing
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import GroupedExperts
from halley.ops.exchange import Replicas, gather_table, share_gradients
from halley.planner.expert_balance import plan_placement
from halley.strategies.base import AbstractStrategy
from halley.tools.skew import parse_load, sample_routing


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """The MoE layer of a model to measure, its number of tokens, and the load of its experts."""

    model: ModelConfig  # has the sizes of the layer
    num_tokens: int  # tokens per rank
    skew: str = "balanced"  # load of the experts, in the syntax of ``skew.parse_load``
    dtype: torch.dtype = torch.bfloat16  # of tokens and expert weights
    seed: int = 0  # of tokens, weights and routing
    # Spare experts that a rank may hold beyond ``ceil(E / W)``, in a placement planned for the
    # drawn routing. None for the placement without planning.
    spare: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """A benchmark layer on this rank; tokens, routing weights and expert weights require gradients.

    The last three attributes are None if the experts have the plain placement.

    Attributes:
        grad_TD: gradient of the layer's output.
        counts_WE: numbers of routed rows from each rank to each expert, or to each replica.
        placement: the experts of each rank, planned for the load.
        replicas: sums the gradients of replicas; None if no expert has several replicas.
        to_replicas: maps the expert ids of tokens to ids of replicas.
    """

    groups: ParallelGroups
    x_TD: torch.Tensor
    routing: Routing
    experts: Experts
    grad_TD: torch.Tensor
    counts_WE: torch.Tensor
    placement: ExpertPlacement | None = None
    replicas: Replicas | None = None
    to_replicas: Callable[[torch.Tensor], torch.Tensor] | None = None

    def run(self, strategy: AbstractStrategy) -> torch.Tensor:
        """Run the strategy; return the layer's output. Backward sums gradients over replicas."""
        experts = self.experts
        if self.replicas is not None:
            experts = share_gradients(experts, self.replicas)
        return strategy.forward(self.x_TD, self.routed(), experts)

    def routed(self) -> Routing:
        """Return the routing for a strategy, with ids of replicas if a placement is planned."""
        if self.to_replicas is None:
            return self.routing
        return replace(self.routing, topk_idx_TK=self.to_replicas(self.routing.topk_idx_TK))

    def layer(self) -> tuple[torch.Tensor, Routing, Experts]:
        """Return tokens, routing and experts, the arguments of ``AbstractStrategy.forward``."""
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
    """Draw this rank's tokens, routing, weights and output gradient from the seed; a collective."""
    moe, rank = case.model.moe, groups.ep_rank
    # The routing is drawn on the CPU, so that it is the same for all kinds of devices.
    cpu_generator = torch.Generator().manual_seed(1_000_003 * case.seed + rank)
    generator = torch.Generator(device).manual_seed(1_000_003 * case.seed + rank)
    load_E = parse_load(case.skew, num_experts=moe.num_experts, top_k=moe.top_k)
    routing = sample_routing(
        load_E, case.num_tokens, top_k=moe.top_k, generator=cpu_generator, device=device
    )
    routing.topk_weights_TK.requires_grad_()
    counts_WE = _count(routing, moe.num_experts, groups)
    placement = to_replicas = None
    if case.spare is not None:
        counts_E = counts_WE.sum(0).tolist()
        placement = plan_placement(counts_E, num_ranks=groups.ep_size, spare=case.spare)
        choices_EC, num_choices_E = replica_choices(placement, rank=rank)
        tables = {"choices_EC": choices_EC.to(device), "num_choices_E": num_choices_E.to(device)}
        to_replicas = partial(choose_replicas, rank=rank, **tables)
        routed = replace(routing, topk_idx_TK=to_replicas(routing.topk_idx_TK))
        counts_WE = _count(routed, placement.num_ranks * placement.num_local, groups)
    held = _draw_experts(case, groups, placement, generator=generator, recorder=recorder)

    def draw() -> torch.Tensor:
        shape = (case.num_tokens, case.model.hidden_size)
        values = torch.empty(shape, dtype=case.dtype, device=device)
        return values.normal_(0.0, 1.0, generator=generator)

    return LayerTensors(
        groups=groups,
        x_TD=draw().requires_grad_(),
        routing=routing,
        experts=Experts(
            up_LGD=held.gate_up_proj, down_LDF=held.down_proj, activation=moe.activation
        ),
        grad_TD=draw(),
        counts_WE=counts_WE,
        placement=placement,
        replicas=held.replicas,
        to_replicas=to_replicas,
    )


def _count(routing: Routing, num_experts: int, groups: ParallelGroups) -> torch.Tensor:
    counts_E = count_tokens_per_expert(routing.topk_idx_TK, num_experts)
    return gather_table(counts_E, group=groups.ep).cpu()


@torch.no_grad()
def _draw_experts(
    case: LayerCase,
    groups: ParallelGroups,
    placement: ExpertPlacement | None,
    *,
    generator: torch.Generator,
    recorder: Recorder | None,
) -> GroupedExperts:
    moe, hidden = case.model.moe, case.model.hidden_size
    config = replace(moe, expert_bias=False)
    where = {"groups": groups, "device": generator.device, "recorder": recorder}
    held = GroupedExperts(config, hidden, dtype=case.dtype, placement=placement, **where)
    # With a placement, an expert has the same seed on all ranks, so that its replicas are equal.
    drawn = [(slice(None), generator)]
    if placement is not None:
        first_seed = 1_000_003 * case.seed + groups.ep_size
        drawn = [
            (slice(index, index + 1), torch.Generator(generator.device).manual_seed(first_seed + e))
            for index, e in enumerate(held.expert_ids)
        ]
    for experts, source in drawn:
        held.gate_up_proj[experts].normal_(0.0, hidden**-0.5, generator=source)
        held.down_proj[experts].normal_(0.0, moe.intermediate_size**-0.5, generator=source)
    return held


def outputs_of(
    strategy: AbstractStrategy, tensors: LayerTensors, *, backward: bool = True
) -> list[torch.Tensor]:
    """Run a strategy; return its output, and with ``backward`` the gradients of the leaves."""
    if not backward:
        with torch.no_grad():
            return [tensors.run(strategy)]
    y_TD = tensors.run(strategy)
    gradients = torch.autograd.grad(y_TD, tensors.leaves(), tensors.grad_TD)
    return [y_TD.detach(), *gradients]


def reference_outputs(tensors: LayerTensors) -> list[torch.Tensor]:
    """Compute the output and gradients by ``core/reference.py``; a collective.

    Each rank runs its own experts (or shards of them) for the tokens of all ranks. An all-reduce
    sums the partial outputs.
    """
    groups = tensors.groups
    x_AD = _gather(tensors.x_TD.detach().float(), groups).requires_grad_()
    idx_AK = _gather(tensors.routing.topk_idx_TK, groups)
    weights_AK = _gather(tensors.routing.topk_weights_TK.detach(), groups).requires_grad_()
    experts, grad_AD = tensors.experts, _gather(tensors.grad_TD.float(), groups)
    # A set is a tensor-parallel group: its ranks hold slices of the same experts and get one index.
    own_set, num_sets = groups.ep_rank // groups.tp_size, groups.ep_size // groups.tp_size
    placement = tensors.placement or ExpertPlacement.plain(
        tensors.counts_WE.shape[1], num_ranks=num_sets
    )
    local = placement.experts_WL[own_set]

    def run_experts(chosen: Sequence[int]) -> torch.Tensor:
        # Slots of experts not in ``chosen`` count as dropped. Index -1 of a dropped slot selects
        # the last element, which is DROPPED.
        local_idx_E = torch.full((placement.num_experts + 1,), DROPPED, device=idx_AK.device)
        for expert in chosen:
            local_idx_E[expert] = local.index(expert)
        routing = Routing(topk_idx_TK=local_idx_E[idx_AK], topk_weights_TK=weights_AK)
        return moe_reference(x_AD, routing, experts)

    # Only one replica of an expert adds to the output, or it would count twice. But each replica
    # gets the gradient of all tokens of the expert.
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
    """Return the rows of all expert-parallel ranks, concatenated in rank order; a collective."""
    return gather_table(rows.flatten(), group=groups.ep).view(-1, rows.shape[1])


# Largest ``relative_error`` that counts as correct. A layer rounds about four times, each time by
# at most 2**-8 of a value in bfloat16 and 2**-11 in float16, and on average by less.
RELATIVE_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
# Largest ``relative_error`` if tokens are sent in E4M3; layers of Mixtral-8x7B gave 0.028.
FLOAT8_TOLERANCE = 5e-2

_SLICE_SIZE = 2**26  # elements that are compared at a time


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in the Euclidean norm, computed in float64.

    If the reference is zero, the result is 0 for a zero value and infinity otherwise. A value that
    is not finite gives infinity, so that NaN never passes a comparison.
    """
    if value.shape != reference.shape:
        rule = f"have the reference's shape {tuple(reference.shape)}"
        raise ValueError(f"value {tuple(value.shape)} must {rule}")
    difference = norm = 0.0
    # Compare in slices: float64 copies of all expert weights would need too much memory.
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
