"""Sum gradients over the replicas of an expert, so that the replicas stay equal."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts


@final
class Replicas:
    """The experts of this rank that other ranks also hold, and the exchange of their gradients.

    Args:
        placement: a placement with replicas.
        rank: rank in the expert-parallel group.
        group: the expert-parallel group.
        device: device of the experts.
        recorder: records the host's wait as the span "replicas.wait".

    Attributes:
        first: local indices of the experts of this rank that no lower rank holds, int64.
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
        # For each local index of an expert that other ranks also hold: all its ranks, in order.
        self._ranks: dict[int, tuple[int, ...]] = {
            place: tuple(placement.ranks_of(expert))
            for place, expert in enumerate(own)
            if len(placement.ranks_of(expert)) > 1
        }
        # The gradients to exchange, as (other rank, local index), in order of rank. Both ranks of a
        # pair list their common experts by expert id.
        shared = sorted(self._ranks, key=lambda place: own[place])
        self._pairs = [
            (other, place)
            for other in range(placement.num_ranks)
            for place in shared
            if other != rank and other in self._ranks[place]
        ]

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients, summed over the replicas of each expert; a collective.

        The sum is in float32, in order of rank, and rounded once: bitwise equal on all replicas.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        return self._merge(gradients, _sum_into)

    def take_first(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients, those of replicas copied from their first rank; a collective.

        For gradients that were reduced again after ``sum``: ranks may have rounded differently.

        Args:
            gradients: ``(L, ...)`` each, of one dtype.
        """
        return self._merge(gradients, lambda out, sources: out.copy_(sources[0]))

    def _merge(
        self,
        gradients: Sequence[torch.Tensor],
        merge: Callable[[torch.Tensor, Sequence[torch.Tensor]], object],
    ) -> list[torch.Tensor]:
        """Return copies of the gradients; ``merge`` computes those of replicated experts."""
        received = self._exchange(gradients)
        # A contiguous copy, since ``view`` below needs one.
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
        """Return the gradients of the other replicas, by (other rank, local index).

        One all-to-all sends all gradients; those of one expert are adjacent in its buffer.
        """
        flat = [gradient.flatten(1) for gradient in gradients]
        sizes = [gradient.shape[1] for gradient in flat]
        splits = [0] * self.group.size()
        for other, _ in self._pairs:
            splits[other] += sum(sizes)
        rows = [gradient[place] for _, place in self._pairs for gradient in flat]
        sent = torch.cat(rows) if rows else gradients[0].new_empty(0)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(
            received, sent, splits, splits, group=self.group, async_op=True
        )
        assert work is not None
        with self.recorder.span("replicas.wait", stream="exposed"):
            work.wait()
        # Not strict: an empty tensor splits into one empty piece.
        pieces = zip(self._pairs, received.split(sum(sizes)), strict=False)
        return {pair: piece.split(sizes) for pair, piece in pieces}


def _sum_into(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    if len(sources) == 2:  # one pass over memory; torch.add adds in float32 and rounds once
        torch.add(sources[0], sources[1], out=out)
        return
    total = sources[0].to(torch.float32, copy=True)  # a copy: the input stays unchanged
    for source in sources[1:]:
        total += source
    out.copy_(total)


class _ShareGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replicas, *weights):
        ctx.replicas = replicas
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.replicas.sum(gradients)


def share_gradients(experts: Experts, replicas: Replicas) -> Experts:
    """Return the experts; in backward, sum the gradients of replicas over their ranks.

    Equal replicas receive equal gradients, so they stay equal with any optimizer. Each backward
    pass has one all-to-all. A rank sends only gradients of replicated experts, once to each other
    replica.

    Raises:
        ValueError: a weight has a ``main_grad``, to which fused layers add without autograd.
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
