"""Collectives of rows move labelled rows correctly, and so do their gradients."""

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.ops.exchange import (
    Exchange,
    all_gather_rows,
    concat_in_place,
    gather_table,
    reduce_scatter_rows,
)
from tests.rank_pool import RunRanks


CPU = torch.device("cpu")

# Rows that rank r sends to rank s, [r][s].
SPLITS = [
    pytest.param([[1, 3], [2, 0]], id="2 uneven"),
    pytest.param([[0, 0], [0, 0]], id="2 none"),
    pytest.param([[0, 5], [0, 2]], id="2 one takes all"),
    pytest.param([[1, 0, 2, 3], [4, 1, 0, 0], [0, 0, 0, 0], [2, 2, 1, 0]], id="4 uneven"),
]


def _exchange(
    rank: int,
    splits: list[list[int]],
    *,
    name: str = "dispatch",
    recorder: Recorder | None = None,
    received: torch.Tensor | None = None,
) -> Exchange:
    return Exchange(
        send_splits=splits[rank],
        recv_splits=[row[rank] for row in splits],
        group=dist.group.WORLD,
        name=name,
        recorder=recorder or Recorder(CPU, enabled=False),
        received=received,
    )


def _label(source: int, target: int, index: int) -> list[float]:
    return [100.0 * source + 10.0 * target + index, -1.0]


def _sent(rank: int, splits: list[list[int]]) -> torch.Tensor:
    rows = [_label(rank, s, i) for s, count in enumerate(splits[rank]) for i in range(count)]
    return torch.tensor(rows).view(-1, 2).requires_grad_()


def _received(rank: int, splits: list[list[int]]) -> list[list[float]]:
    return [_label(r, rank, i) for r, row in enumerate(splits) for i in range(row[rank])]


def _send_and_return(rank: int, num_ranks: int, splits: list[list[int]]) -> None:
    want = [
        [2.0 * value * mark for value, mark in zip(_label(rank, s, i), (s + 1.0, 0.5), strict=True)]
        for s, count in enumerate(splits[rank])
        for i in range(count)
    ]
    for is_one_call in (False, True):
        rows_SD = _sent(rank, splits)
        exchange = _exchange(rank, splits)
        if is_one_call:
            received_RD = exchange.run(rows_SD)
        else:
            received_RD = exchange.wait(exchange.start(rows_SD))
        assert received_RD.tolist() == _received(rank, splits)
        # The gradient of each row has the mark of its receiver.
        marks_RD = torch.tensor([[rank + 1.0, 0.5]]).expand(received_RD.shape)
        (received_RD * received_RD * marks_RD).sum().backward()
        assert rows_SD.grad is not None
        assert rows_SD.grad.tolist() == want


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


def _gather(rank: int, num_ranks: int) -> list[list[int]]:
    return gather_table(torch.arange(3) + 10 * rank, group=dist.group.WORLD).tolist()


def test_table_has_a_row_for_each_rank(run_ranks) -> None:
    assert run_ranks(_gather, 2) == [[[0, 1, 2], [10, 11, 12]]] * 2


def test_single_rank_keeps_its_rows() -> None:
    recorder = Recorder(CPU)
    exchange = Exchange(
        send_splits=[3], recv_splits=[3], group=None, name="dispatch", recorder=recorder
    )
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
