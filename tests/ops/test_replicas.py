"""Gradients of replicas on four ranks, by hand: sums, rounding, and the number of elements sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts
from halley.ops.replicas import Replicas, share_gradients
from tests.rank_pool import RunRanks


CPU = torch.device("cpu")
# Expert 0 is on three ranks, expert 1 on two; rank 3 shares no expert.
PLACEMENT = ExpertPlacement(num_experts=5, experts_WL=((0, 1), (0, 2), (0, 1), (3, 4)))


def _replicas(rank: int, recorder: Recorder | None = None) -> Replicas:
    group = dist.group.WORLD
    assert group is not None
    recorder = recorder or Recorder(CPU, enabled=False)
    return Replicas(PLACEMENT, rank=rank, group=group, device=CPU, recorder=recorder)


def _experts(rank: int) -> Experts:
    """Return random experts."""
    generator = torch.Generator().manual_seed(rank)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.rand(2, *shape, generator=generator).requires_grad_()

    return Experts(up_LGD=leaf(2, 3), down_LDF=leaf(3, 1), up_bias_LG=leaf(2))


def _backward(rank: int, num_ranks: int) -> tuple[list[list[float]], int]:
    """Give weight w of expert e on rank r the gradient ``10^r * (e + 1) * w``; return the sums."""
    recorder = Recorder(CPU)
    experts = _experts(rank)
    shared = share_gradients(experts, _replicas(rank, recorder))
    assert shared.down_bias_LD is None
    loss = torch.zeros(())
    weights = (experts.up_LGD, experts.down_LDF, experts.up_bias_LG)
    for number, weight in enumerate((shared.up_LGD, shared.down_LDF, shared.up_bias_LG), start=1):
        assert weight is not None
        assert torch.equal(weight, weights[number - 1])  # type: ignore[arg-type]
        for place, expert in enumerate(PLACEMENT.experts_WL[rank]):
            loss = loss + 10.0**rank * (expert + 1) * number * weight[place].sum()
    loss.backward()
    grads = [weight.grad for weight in weights if weight is not None and weight.grad is not None]
    for grad in grads:
        assert all(len(each.unique()) == 1 for each in grad)
    waits = [span for span in recorder.collect() if span.name == "replicas.wait"]
    return [[each.flatten()[0].item() for each in grad] for grad in grads], len(waits)


def test_gradients_are_summed_over_the_ranks_that_hold_an_expert(run_ranks: RunRanks) -> None:
    first = [[111.0, 2 * 101.0], [111.0, 30.0], [111.0, 2 * 101.0], [4000.0, 5000.0]]
    for (grads, num_waits), want in zip(run_ranks(_backward, 4), first, strict=True):
        assert grads == [[number * value for value in want] for number in (1, 2, 3)]
        assert num_waits == 1  # one collective for all weights


def _round(rank: int, num_ranks: int) -> tuple[list[float], list[float], list[int]]:
    """Sum values of which bfloat16 would lose some if it rounded every addition."""
    values = [256.0, 1.0, 1.0, 0.0]
    gradient = torch.full((2, 1), values[rank], dtype=torch.bfloat16)
    replicas = _replicas(rank)
    (total,), (first,) = replicas.sum([gradient]), replicas.take_first([gradient])
    assert total.dtype == first.dtype == torch.bfloat16
    assert gradient.unique().tolist() == [values[rank]]  # unchanged
    return total.flatten().tolist(), first.flatten().tolist(), replicas.first.tolist()


def test_sums_are_rounded_once_and_first_ranks_are_copied(run_ranks: RunRanks) -> None:
    """256 + 1 is 256 in bfloat16, 256 + 2 is 258."""
    assert run_ranks(_round, 4) == [
        # Expert 1: 256 + 1 is a tie and rounds to the even 256.
        ([258.0, 256.0], [256.0, 256.0], [0, 1]),
        ([258.0, 1.0], [256.0, 1.0], [1]),
        ([258.0, 256.0], [256.0, 256.0], []),
        ([0.0, 0.0], [0.0, 0.0], [0, 1]),
    ]


def _count_sent(act: Callable[[], object]) -> int:
    """Return the number of elements that this rank sends during a call."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def count(received: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(rows.numel())
        return exchange(received, rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", count)
        act()
    return sum(sent)


def _sum_ones(rank: int, num_ranks: int) -> int:
    return _count_sent(lambda: _replicas(rank).sum([torch.ones(2, 5)]))


def test_only_gradients_of_replicas_are_sent(run_ranks: RunRanks) -> None:
    """Three ranks send expert 0 to two ranks each; two ranks send expert 1 to one rank each."""
    assert run_ranks(_sum_ones, 4) == [15, 10, 15, 0]


def _freeze(rank: int, num_ranks: int) -> int:
    experts = _experts(rank)
    experts.up_LGD.requires_grad = False
    shared = share_gradients(experts, _replicas(rank))
    assert shared.up_LGD is experts.up_LGD
    num_sent = _count_sent(shared.down_LDF.sum().backward)
    assert experts.up_LGD.grad is None
    assert experts.down_LDF.grad is not None
    return num_sent


def test_gradients_of_frozen_weights_are_not_sent(run_ranks: RunRanks) -> None:
    """Only the gradients of the down projection (3) and the bias (2) are sent."""
    assert run_ranks(_freeze, 4) == [15, 10, 15, 0]
