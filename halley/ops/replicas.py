"""Replicas of experts stay alike: each gets the sum of the gradients of all of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist

from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts


@final
class Replicas:
    """The experts of this rank that other ranks hold too, and the exchange of their gradients.

    Args:
        placement: has replicas.
        rank: of the expert-parallel group.
        group: that group.
        device: of the experts.
        recorder: marks the time spent waiting, "replicas.wait".

    Attributes:
        first: places of the experts of this rank that no lower rank holds, int64.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        own = placement.experts_WL[rank]
        replicated = set(placement.replicated)
        self.rank = rank
        self.group = group
        self.recorder = recorder
        shared = [expert for expert in own if expert in replicated]
        # Of each rank, the places among ``shared`` of the experts that it holds too.
        common = [
            [place for place, expert in enumerate(shared) if expert in experts]
            for experts in placement.experts_WL
        ]
        firsts = [place for place, e in enumerate(own) if placement.ranks_of(e)[0] == rank]

        def index(places: list[int]) -> torch.Tensor:
            return torch.tensor(places, dtype=torch.int64, device=device)

        self.first = index(firsts)
        self._places_S = index([own.index(expert) for expert in shared])
        self._common = [index(places) for places in common]
        others = [c for r, c in enumerate(self._common) if r != rank]
        self._sent_R = self._places_S[torch.cat(others)]
        self._splits = [0 if r == rank else len(c) for r, c in enumerate(common)]

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients with those of replicas summed over their ranks; a collective.

        Summed in float32, in order of rank, and rounded once: the same bits on all of them.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        summed: list[torch.Tensor] = []
        for gradient, sources in zip(gradients, self._exchange(gradients), strict=True):
            total_SN = torch.zeros_like(sources[self.rank], dtype=torch.float32)
            for common, rows_CN in zip(self._common, sources, strict=True):
                total_SN[common] += rows_CN
            summed.append(self._replace(gradient, total_SN))
        return summed

    def take_first(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients with those of each replica's first rank; a collective.

        For gradients that have gone through further sums, which may have rounded otherwise on each
        rank.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        taken: list[torch.Tensor] = []
        for gradient, sources in zip(gradients, self._exchange(gradients), strict=True):
            first_SN = torch.empty_like(sources[self.rank])
            for common, rows_CN in reversed(list(zip(self._common, sources, strict=True))):
                first_SN[common] = rows_CN
            taken.append(self._replace(gradient, first_SN))
        return taken

    def _exchange(self, gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return of each gradient, from each rank, the rows of what it shares with this one.

        One all-to-all for all gradients, with those of an expert side by side.
        """
        flat = [gradient.flatten(1) for gradient in gradients]
        sent_RN = torch.cat([part[self._sent_R] for part in flat], dim=1)
        received_RN = torch.empty_like(sent_RN)
        work = dist.all_to_all_single(
            received_RN, sent_RN, self._splits, self._splits, group=self.group, async_op=True
        )
        assert work is not None
        with self.recorder.span("replicas.wait", stream="exposed"):
            work.wait()
        columns = received_RN.split([part.shape[1] for part in flat], dim=1)
        found: list[list[torch.Tensor]] = []
        for part, rows_RN in zip(flat, columns, strict=True):
            sources = list(rows_RN.split(self._splits))
            sources[self.rank] = part[self._places_S]
            found.append(sources)
        return found

    def _replace(self, gradient: torch.Tensor, rows_SN: torch.Tensor) -> torch.Tensor:
        rows = rows_SN.to(gradient.dtype).view(-1, *gradient.shape[1:])
        return gradient.index_copy(0, self._places_S, rows)


class _ShareGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replicas, *weights):
        ctx.replicas = replicas
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.replicas.sum(gradients)


def share_gradients(experts: Experts, replicas: Replicas) -> Experts:
    """Return the experts as they are; in backward, sum the gradients of replicas over their ranks.

    Replicas that are equal get equal gradients, so that with any optimizer they stay equal. One
    collective a backward pass, in which each rank sends the gradients of replicated experts alone,
    once to each other rank that holds them.

    Raises:
        ValueError: a weight has a ``main_grad``: fused layers add to it where no sum sees it.
    """
    names = ("up_LGD", "down_LDF", "up_bias_LG", "down_bias_LD")
    weights = {name: getattr(experts, name) for name in names}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    if any(getattr(weight, "main_grad", None) is not None for weight in weights.values()):
        raise ValueError(
            "main_grad (a buffer) must be None on experts of which other ranks hold replicas: "
            "their gradients are summed by autograd, which does not see the buffer"
        )
    shared = _ShareGradients.apply(replicas, *weights.values())
    return replace(experts, **dict(zip(weights, shared, strict=True)))  # pyright: ignore[reportArgumentType]
