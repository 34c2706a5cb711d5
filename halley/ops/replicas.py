"""Replicas of experts stay alike: each gets the sum of the gradients of all of them."""

from collections.abc import Callable, Sequence
from typing import Any, final

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
        self.rank = rank
        self.group = group
        self.recorder = recorder
        firsts = [place for place, e in enumerate(own) if placement.ranks_of(e)[0] == rank]
        self.first = torch.tensor(firsts, dtype=torch.int64, device=device)
        # The ranks that hold the expert in a place, in order, if others than this one do.
        self._ranks: dict[int, tuple[int, ...]] = {
            place: tuple(placement.ranks_of(expert))
            for place, expert in enumerate(own)
            if len(placement.ranks_of(expert)) > 1
        }
        # What goes to the others and comes from them, in the order of the exchange: both sides of a
        # pair list what they share by the number of the expert.
        shared = sorted(self._ranks, key=lambda place: own[place])
        self._pairs = [
            (other, place)
            for other in range(placement.num_ranks)
            for place in shared
            if other != rank and other in self._ranks[place]
        ]

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients with those of replicas summed over their ranks; a collective.

        Summed in float32, in order of rank, and rounded once: the same bits on all of them.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        return self._merge(gradients, _sum_into)

    def take_first(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients with those of each replica's first rank; a collective.

        For gradients that have gone through further sums, which may have rounded otherwise on each
        rank.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        return self._merge(gradients, _take_first_into)

    def _merge(
        self,
        gradients: Sequence[torch.Tensor],
        merge: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
    ) -> list[torch.Tensor]:
        """Return copies of the gradients; what a place shares is made of that of all its ranks."""
        received = self._exchange(gradients)
        merged = [g.clone(memory_format=torch.contiguous_format) for g in gradients]
        for place, ranks in self._ranks.items():
            for index, gradient in enumerate(gradients):
                own = gradient[place].flatten()
                sources = [own if r == self.rank else received[r, place][index] for r in ranks]
                merge(merged[index][place].view(-1), sources)
        return merged

    def _exchange(
        self, gradients: Sequence[torch.Tensor]
    ) -> dict[tuple[int, int], Sequence[torch.Tensor]]:
        """Return what each rank that shares a place has there, of each gradient.

        One all-to-all for all gradients, with those of an expert side by side.
        """
        flat = [gradient.flatten(1) for gradient in gradients]
        sizes = [part.shape[1] for part in flat]
        splits = [0] * self.group.size()
        for other, _ in self._pairs:
            splits[other] += sum(sizes)
        parts = [part[place] for _, place in self._pairs for part in flat]
        sent = torch.cat(parts) if parts else gradients[0].new_empty(0)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(
            received, sent, splits, splits, group=self.group, async_op=True
        )
        assert work is not None
        with self.recorder.span("replicas.wait", stream="exposed"):
            work.wait()
        of_pairs = received.split(sum(sizes))
        return {pair: part.split(sizes) for pair, part in zip(self._pairs, of_pairs, strict=False)}


def _sum_into(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    if len(sources) == 2:  # added in float32 and rounded once, in one pass over memory
        torch.add(sources[0], sources[1], out=out)
        return
    total = sources[0].to(torch.float32, copy=True)  # lest the gradient that came be written to
    for source in sources[1:]:
        total += source
    out.copy_(total)


def _take_first_into(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    out.copy_(sources[0])


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
    weights = {name: t for name, t in experts.tensors().items() if t.requires_grad}
    if any(getattr(weight, "main_grad", None) is not None for weight in weights.values()):
        raise ValueError(
            "main_grad (a buffer) must be None on experts of which other ranks hold replicas: "
            "their gradients are summed by autograd, which does not see the buffer"
        )
    if not weights:
        return experts
    shared: Any = _ShareGradients.apply(replicas, *weights.values())
    return experts.with_tensors(dict(zip(weights, shared, strict=True)))
