"""Collectives move labelled rows and their gradients; replicas sum gradients, by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts
from halley.ops.exchange import (
    Exchange,
    Replicas,
    all_gather_rows,
    concat_in_place,
    gather_table,
    reduce_scatter_rows,
    share_gradients,
)
from tests.rank_pool import RunRanks


CPU = torch.device("cpu")
# Expert 0 is on three ranks, expert 1 on two; rank 3 shares no expert.
PLACEMENT = ExpertPlacement(num_experts=5, experts_WL=((0, 1), (0, 2), (0, 1), (3, 4)))

# Rows that rank r sends to rank s, [r][s].
SPLITS = [
    pytest.param([[1, 3], [2, 0]], id="2 uneven"),
    pytest.param([[0, 0], [0, 0]], id="2 none"),
    pytest.param([[0, 5], [0, 2]], id="2 one takes all"),
    pytest.param([[1, 0, 2, 3], [4, 1, 0, 0], [0, 0, 0, 0], [2, 2, 1, 0]], id="4 uneven"),
]


def _exchange(rank: int, splits: list[list[int]], **options: Any) -> Exchange:
    settings: dict[str, Any] = {"name": "dispatch", "group": dist.group.WORLD}
    settings |= {"recorder": Recorder(CPU, enabled=False)} | options
    received = [row[rank] for row in splits]
    return Exchange(send_splits=splits[rank], recv_splits=received, **settings)


def _label(source: int, target: int, index: int) -> list[float]:
    return [100.0 * source + 10.0 * target + index, -1.0]


def _sent(rank: int, splits: list[list[int]]) -> torch.Tensor:
    rows = [_label(rank, s, i) for s, count in enumerate(splits[rank]) for i in range(count)]
    return torch.tensor(rows).view(-1, 2).requires_grad_()


def _received(rank: int, splits: list[list[int]]) -> list[list[float]]:
    return [_label(r, rank, i) for r, row in enumerate(splits) for i in range(row[rank])]


def _send_and_return(rank: int, num_ranks: int, splits: list[list[int]]) -> None:
    targets = [s + 1.0 for s, count in enumerate(splits[rank]) for _ in range(count)]
    exchange = _exchange(rank, splits)
    for run in (exchange.run, lambda rows_SD: exchange.wait(exchange.start(rows_SD))):
        rows_SD = _sent(rank, splits)
        received_RD = run(rows_SD)
        assert received_RD.tolist() == _received(rank, splits)
        # The gradient of each row has the mark of its receiver.
        ((rank + 1.0) * received_RD.square()).sum().backward()
        assert rows_SD.grad is not None
        assert torch.equal(rows_SD.grad, 2.0 * rows_SD * torch.tensor(targets).view(-1, 1))


@pytest.mark.parametrize("splits", SPLITS)
def test_rows_and_gradients_reach_their_rank(run_ranks, splits: list[list[int]]) -> None:
    run_ranks(_send_and_return, len(splits), splits)


def _expanded_gradient(rank: int, num_ranks: int) -> None:
    rows_SD = torch.ones(4, 3, requires_grad=True)
    _exchange(rank, [[2, 2], [2, 2]]).run(rows_SD).sum().backward()  # its gradient has stride 0
    assert rows_SD.grad is not None
    assert rows_SD.grad.tolist() == [[1.0] * 3] * 4
    columns_DS = torch.arange(12.0).view(3, 4) + 100.0 * rank  # rows that are not contiguous
    received_RD = _exchange(rank, [[2, 2], [2, 2]]).run(columns_DS.T)
    first = 2.0 * rank
    want = [[first + s * 100.0 + i + 4.0 * d for d in range(3)] for s in (0, 1) for i in (0, 1)]
    assert received_RD.tolist() == want


def test_rows_need_not_be_contiguous(run_ranks) -> None:
    run_ranks(_expanded_gradient, 2)


def _pipeline(rank: int, num_ranks: int) -> list[str]:
    """Run two exchanges at once; return the names of the spans in order."""
    recorder = Recorder(CPU)
    splits = [[1, 3], [2, 0]]
    a, b = (_exchange(rank, splits, name=name, recorder=recorder) for name in "ab")
    rows_SD = _sent(rank, splits)
    started_a, started_b = a.start(rows_SD), b.start(2.0 * rows_SD)
    received = {"a": a.wait(started_a), "b": b.wait(started_b)}
    for name, rows_RD in received.items():

        def mark(grad: torch.Tensor, name: str = name) -> None:
            with recorder.span(f"{name}.gradient"):
                pass

        rows_RD.register_hook(mark)
    assert received["b"].tolist() == [[2.0 * x for x in row] for row in _received(rank, splits)]
    (received["a"] + 10.0 * received["b"]).sum().backward()
    assert rows_SD.grad is not None
    assert rows_SD.grad.unique().tolist() == [21.0]
    spans = recorder.collect()
    assert {span.stream for span in spans if span.name.endswith("wait")} == {"exposed"}
    return [span.name for span in spans]


def test_backward_of_a_pipeline_is_a_pipeline(run_ranks) -> None:
    # Both gradients are in flight before either is waited for.
    want = ["a.wait", "b.wait"]
    want += ["b.gradient", "a.gradient", "b.backward.wait", "a.backward.wait"]
    assert run_ranks(_pipeline, 2) == [want, want]


def _wait_twice(rank: int, num_ranks: int) -> None:
    exchange = _exchange(rank, [[1, 1], [1, 1]])
    started = exchange.start(torch.zeros(2, 2))
    exchange.wait(started)
    with pytest.raises(AssertionError, match="dispatch was waited for twice"):
        exchange.wait(started)


def test_waiting_twice_is_an_error(run_ranks) -> None:
    run_ranks(_wait_twice, 2)


def _receive_in_place(rank: int, num_ranks: int) -> None:
    """Receive two exchanges into one buffer; check the buffer and the gradients."""
    splits = [[[1, 3], [2, 0]], [[2, 1], [1, 1]]]
    sizes = [sum(row[rank] for row in table) for table in splits]
    buffer_ND = torch.full((sum(sizes) + 1, 2), torch.nan)
    rest = buffer_ND[sum(sizes) :].zero_()
    sent = [_sent(rank, table) for table in splits]
    buffers = torch.split(buffer_ND, [*sizes, 1])
    slices = [
        _exchange(rank, table, received=buffer).run(rows)
        for table, buffer, rows in zip(splits, buffers, sent, strict=False)
    ]
    concatenated_ND = concat_in_place(buffer_ND, [*slices, rest])
    assert concatenated_ND.data_ptr() == buffers[0].data_ptr()
    want = [*_received(rank, splits[0]), *_received(rank, splits[1]), [0.0, 0.0]]
    assert concatenated_ND.tolist() == want
    concatenated_ND.pow(2).sum().backward()
    for rows in sent:
        assert rows.grad is not None
        assert torch.equal(rows.grad, 2.0 * rows.detach())


def test_exchanges_into_one_buffer_are_concatenated(run_ranks) -> None:
    run_ranks(_receive_in_place, 2)


def test_single_rank_keeps_its_rows() -> None:
    recorder = Recorder(CPU)
    exchange = _exchange(0, [[3]], recorder=recorder, group=None)
    rows_SD = torch.ones(3, 2)
    assert exchange.wait(exchange.start(rows_SD)) is rows_SD
    assert exchange.run(rows_SD) is rows_SD
    assert recorder.collect() == []
    assert gather_table(torch.tensor([4, 5]), group=None).tolist() == [[4, 5]]
    assert all_gather_rows(rows_SD, max_rows=3, group=None) is rows_SD
    assert reduce_scatter_rows(rows_SD, num_rows=3, group=None) is rows_SD


NUM_ROWS = (2, 0, 3, 1)  # of each rank, for uneven collectives


def _rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_ROWS[rank], 4, generator=generator)


def _all_gather(rank: int, num_ranks: int) -> None:
    rows_TX = _rows(rank).requires_grad_()
    out_AX = all_gather_rows(rows_TX, max_rows=3, group=dist.group.WORLD)
    want = torch.zeros(4, 3, 4)
    for source in range(num_ranks):
        want[source, : NUM_ROWS[source]] = _rows(source)
    assert torch.equal(out_AX, want.view(12, 4))
    out_AX.backward(torch.full((12, 4), float(rank + 1)))
    assert rows_TX.grad is not None
    assert torch.equal(rows_TX.grad, torch.full_like(rows_TX, 1.0 + 2.0 + 3.0 + 4.0))


def test_all_gather_pads_rows_with_zeros(run_ranks: RunRanks) -> None:
    run_ranks(_all_gather, 4)


def _reduce_scatter(rank: int, num_ranks: int) -> None:
    values_AX = torch.arange(48.0).view(12, 4)
    rows_AX = (values_AX * 10**rank).requires_grad_()
    y_TX = reduce_scatter_rows(rows_AX, num_rows=NUM_ROWS[rank], group=dist.group.WORLD)
    assert torch.equal(y_TX, 1111.0 * values_AX.view(4, 3, 4)[rank, : NUM_ROWS[rank]])
    y_TX.backward(_rows(rank))
    assert rows_AX.grad is not None
    for source in range(num_ranks):
        grad = rows_AX.grad.view(4, 3, 4)[source]
        assert torch.equal(grad[: NUM_ROWS[source]], _rows(source))
        assert not grad[NUM_ROWS[source] :].any()


def test_reduce_scatter_returns_the_sums_of_own_rows(run_ranks: RunRanks) -> None:
    run_ranks(_reduce_scatter, 4)


def _replicas(rank: int, recorder: Recorder | None = None) -> Replicas:
    group = dist.group.WORLD
    assert group is not None
    recorder = recorder or Recorder(CPU, enabled=False)
    return Replicas(PLACEMENT, rank=rank, group=group, device=CPU, recorder=recorder)


def _experts(rank: int) -> Experts:
    torch.manual_seed(rank)
    shapes = {"up_LGD": (2, 3), "down_LDF": (3, 1), "up_bias_LG": (2,)}
    weights = {name: torch.rand(2, *shape).requires_grad_() for name, shape in shapes.items()}
    return Experts(**weights)  # pyright: ignore[reportArgumentType]


def _backward(rank: int, num_ranks: int) -> tuple[list[list[float]], int]:
    """Give weight w of expert e on rank r the gradient ``10^r * (e + 1) * w``; return the sums."""
    recorder = Recorder(CPU)
    experts = _experts(rank)
    shared = share_gradients(experts, _replicas(rank, recorder))
    assert shared.down_bias_LD is None
    loss, weights = torch.zeros(()), experts.tensors()
    for number, (name, weight) in enumerate(shared.tensors().items(), start=1):
        assert torch.equal(weight, weights[name])
        for place, expert in enumerate(PLACEMENT.experts_WL[rank]):
            loss = loss + 10.0**rank * (expert + 1) * number * weight[place].sum()
    loss.backward()
    grads = [weight.grad for weight in weights.values() if weight.grad is not None]
    waits = [span for span in recorder.collect() if span.name == "replicas.wait"]
    return [[each.unique().item() for each in grad] for grad in grads], len(waits)


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


def _freeze(rank: int, num_ranks: int) -> tuple[int, int]:
    num_ones = _count_sent(lambda: _replicas(rank).sum([torch.ones(2, 5)]))
    experts = _experts(rank)
    experts.up_LGD.requires_grad = False
    shared = share_gradients(experts, _replicas(rank))
    assert shared.up_LGD is experts.up_LGD
    num_sent = _count_sent(shared.down_LDF.sum().backward)
    assert experts.up_LGD.grad is None
    assert experts.down_LDF.grad is not None
    return num_ones, num_sent


def test_only_gradients_of_replicas_and_of_trained_weights_are_sent(run_ranks: RunRanks) -> None:
    """Three ranks send expert 0 to two ranks each; two ranks send expert 1 to one rank each.

    Of a frozen up projection, nothing is sent: 5 elements are the down projection and the bias.
    """
    assert run_ranks(_freeze, 4) == [(15, 15), (10, 10), (15, 15), (0, 0)]
