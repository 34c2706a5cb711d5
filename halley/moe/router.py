"""Routers: choose the experts of each token and their weights; compute balance and z losses."""

import abc
import math
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.config import MoEConfig
from halley.core.routing import count_tokens_per_expert
from halley.core.types import DROPPED, Routing
from halley.core.validation import parse_device
from halley.ops.lane_sums import num_lanes, sum_over_earlier_lanes, sum_over_lanes
from halley.ops.traceable_routing import take_slots, take_slots_by_weight


class RouterOutput(NamedTuple):
    """Result of ``AbstractRouter.forward``: the routing, the loss, and token counts per expert."""

    routing: Routing
    loss: torch.Tensor  # float32 scalar: balance loss plus z loss, each times its coefficient
    counts_E: torch.Tensor  # int64, tokens that chose each expert, before the capacity drops any


class AbstractRouter(nn.Module, abc.ABC):
    """Base class of routers: computes logits, losses and capacity; subclasses choose experts."""

    def __init__(
        self, config: MoEConfig, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, hidden_size, dtype=dtype, device=device)
        )

    @abc.abstractmethod
    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return chosen experts' ids and weights, ``(T, K)``, and all probabilities, ``(T, E)``."""

    def forward(self, x_TD: torch.Tensor) -> RouterOutput:
        router, num_experts = self.config.router, self.config.num_experts
        # Logits are float32, since rounding to 16 bits can change the choice of an expert.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.weight.float())
            idx_TK, weights_TK, probs_TE = self.choose(logits_TE)
        counts_E = count_tokens_per_expert(idx_TK, num_experts)
        loss = logits_TE.new_zeros(())
        if router.balance_coefficient and x_TD.shape[0]:
            loss = loss + router.balance_coefficient * balance_loss(
                probs_TE, sum_over_lanes(counts_E)
            )
        if router.z_coefficient and x_TD.shape[0]:
            loss = loss + router.z_coefficient * z_loss(logits_TE)
        limit = None
        if router.capacity_factor:
            num_slots = idx_TK.numel() * num_lanes()
            limit = capacity(router.capacity_factor, num_slots, num_experts=num_experts)
            if router.priority == "weight":
                kept_TK = take_slots_by_weight(idx_TK, weights_TK, num_experts, limit)
            else:
                kept_TK = _take_slots_in_order(idx_TK, limit, num_experts=num_experts)
            idx_TK = torch.where(kept_TK, idx_TK, DROPPED)
            weights_TK = torch.where(kept_TK, weights_TK, 0.0)
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK, capacity=limit)
        return RouterOutput(routing, loss, counts_E)


@final
class SoftmaxRouter(AbstractRouter):
    """A router that chooses the top-k experts by the softmax of the logits over all experts.

    With ``normalize``, the weights of a token sum to 1 (Mixtral, arXiv:2401.04088, section 2.1).
    Two kinds have a capacity: "switch" is top-1 without normalization (arXiv:2101.03961, section
    2.1); "top2" is GShard's top-2 with normalization (arXiv:2006.16668, section 2.2), without its
    random drop of second experts.
    """

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        probs_TE = logits_TE.softmax(dim=-1)
        weights_TK, idx_TK = probs_TE.topk(self.config.top_k, dim=-1)
        router = self.config.router
        if router.kind == "top2" or (router.kind == "softmax" and router.normalize):
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return idx_TK, weights_TK, probs_TE


@final
class SigmoidRouter(AbstractRouter):
    """A router that takes the top-k of sigmoid score plus bias, in a token's best router groups.

    A bias, which ``update_bias`` changes, is added to the scores for the choice, but not for the
    weights. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2. The score of a group is the sum
    of its two best expert scores, as in the released model.
    """

    def __init__(
        self, config: MoEConfig, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, hidden_size=hidden_size, dtype=dtype, device=device)
        self.register_buffer("bias", torch.zeros(config.num_experts, device=device))
        self.bias: torch.Tensor

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router = self.config.router
        scores_TE = logits_TE.sigmoid()
        with torch.no_grad():
            chosen_by_TE = self._limit_to_groups(scores_TE + self.bias)
            idx_TK = chosen_by_TE.topk(self.config.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, idx_TK)
        if router.normalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        probs_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        return idx_TK, weights_TK * router.scaling_factor, probs_TE

    @torch.no_grad()
    def update_bias(self, counts_E: torch.Tensor) -> None:
        """Move each expert's bias one step towards even load; ``counts_E`` is over all ranks."""
        error_E = counts_E.float().mean() - counts_E.float()
        self.bias += self.config.router.bias_update_rate * error_E.sign()

    def _limit_to_groups(self, scores_TE: torch.Tensor) -> torch.Tensor:
        router = self.config.router
        if router.num_limited_groups == router.num_groups:
            return scores_TE
        grouped = scores_TE.unflatten(1, (router.num_groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
        groups = best_two.topk(router.num_limited_groups, dim=-1).indices
        allowed_TG = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, groups, True)
        return grouped.masked_fill(~allowed_TG[:, :, None], -torch.inf).flatten(1)


def build_router(
    config: MoEConfig, *, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> AbstractRouter:
    """Return a new router of the kind ``config.router.kind``, without initialized weights."""
    device = parse_device(device, types=("cpu", "cuda", "meta"))
    router = SigmoidRouter if config.router.kind == "sigmoid" else SoftmaxRouter
    return router(config, hidden_size=hidden_size, dtype=dtype, device=device)


def _take_slots_in_order(idx_TK: torch.Tensor, limit: int, *, num_experts: int) -> torch.Tensor:
    """Return which slots the experts keep: those that ``take_slots`` keeps of the whole batch."""
    used_E = torch.zeros(num_experts, dtype=torch.int64, device=idx_TK.device)
    if num_lanes() == 1:
        return take_slots(idx_TK, used_E, limit)[0]
    kept: list[torch.Tensor] = []
    for idx_T1 in idx_TK.split(1, dim=1):  # first choices of all lanes come before second choices
        counts_E = count_tokens_per_expert(idx_T1, num_experts)
        kept.append(take_slots(idx_T1, used_E + sum_over_earlier_lanes(counts_E), limit)[0])
        used_E = used_E + sum_over_lanes(counts_E)
    return torch.cat(kept, dim=1)


def balance_loss(probs_TE: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Return the loss ``E * sum_e(share of slots of e * mean probability of e)``, 1 if balanced.

    Source: Switch (arXiv:2101.03961), equation 4, with the share over all top-k slots.
    """
    share_E = counts_E / counts_E.sum().clamp_min(1)
    return probs_TE.shape[1] * (share_E * probs_TE.mean(dim=0)).sum()


def z_loss(logits_TE: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of ``logsumexp(logits)**2`` (arXiv:2202.08906, equation 5)."""
    return logits_TE.logsumexp(dim=-1).square().mean()


def capacity(factor: float, num_slots: int, *, num_experts: int) -> int:
    """Return how many slots an expert accepts at most, 1 or more (arXiv:2101.03961, equation 3)."""
    # 1e-9 absorbs rounding: 1.1 * 100 / 10 is 11.000000000000002 and must give 11, not 12.
    return max(1, math.ceil(factor * num_slots / num_experts - 1e-9))
