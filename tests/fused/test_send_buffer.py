"""Passes that reuse the plan of a forward: published rows, fetched rows, missing ranks."""

import time
from dataclasses import replace

import pytest
import torch

from tests.fused.kernel_case import KernelCase, make_dy, make_tokens
from tests.fused.kernel_rank import KernelRank, SavedCall, run_world


TIMEOUT_S = 0.3
MAX_S = 30.0  # of a test: some kernels that time out, on a busy machine
NO_ROWS = "did not publish its rows for another pass of call 1 within 0.3 s"
SAME_ORDER = (
    "and this rank does not: all ranks must run their layers, forward and backward, in the same "
    "order"
)
# More tokens than one CTA copies at once; two tasks of token copies.
CASE = KernelCase(num_tokens_CW=((20, 13),), top_k=3)
CASES = {
    "one rank": replace(CASE, num_tokens_CW=((35,),)),
    "no tokens on a rank": replace(CASE, num_tokens_CW=((0, 18, 7),), num_experts=6),
    "no tokens": replace(CASE, num_tokens_CW=((0, 0),), max_tokens=4),
    "dropped": replace(CASE, dropped=0.5, dtype=torch.bfloat16),
    "larger max_tokens": replace(CASE, max_tokens=32, hidden_size=68),
}
THREE = KernelCase(num_tokens_CW=((3, 9, 5), (4, 2, 6)), num_experts=3)


def _assert_same(value: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit by bit; NaN marks elements that were not written."""
    torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)


def _values(case: KernelCase, rank: int, *, index: int) -> torch.Tensor:
    """Return the rows that a rank publishes: its tokens for index 0, else gradients."""
    x_TD, _ = make_tokens(case, rank)
    return x_TD if index == 0 else make_dy(case, rank) * index


def _wanted_rows(case: KernelCase, rank: int, *, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a rank and their routing weights, from the routing of all ranks.

    The padding that weight-gradient GEMMs read is zero; other padding is NaN.
    """
    num_local = case.layout().num_local
    block, step = case.config.block_m, case.config.weight.block_k
    ring = [(rank + i) % case.num_ranks for i in range(case.num_ranks)]
    nan = torch.full((1, case.hidden_size), torch.nan, dtype=case.dtype)
    rows, weights = [nan[:0]], [torch.empty(0)]
    for expert in range(rank * num_local, (rank + 1) * num_local):
        num_rows = 0
        for peer in ring:
            routing = make_tokens(case, peer)[1]
            token, k = (routing.topk_idx_TK == expert).nonzero(as_tuple=True)
            rows.append(_values(case, peer, index=index)[token])
            weights.append(routing.topk_weights_TK[token, k].float())
            num_rows += len(token)
        num_clear, num_empty = -num_rows % step, -num_rows % block
        rows.append(torch.zeros_like(nan).expand(num_clear, -1))
        rows.append(nan.expand(num_empty - num_clear, -1))
        weights.append(torch.full((num_empty,), torch.nan))
    return torch.cat(rows), torch.cat(weights)


def _assert_rows(case: KernelCase, rank: int, x_RD: torch.Tensor, *, index: int) -> None:
    wanted_RD, _ = _wanted_rows(case, rank, index=index)
    _assert_same(x_RD[: len(wanted_RD)], wanted_RD)
    assert x_RD[len(wanted_RD) :].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_rows_are_published_and_weights_spread_to_rows(name: str) -> None:
    case = CASES[name]

    def run(rank: KernelRank) -> None:
        num_rows = rank.make_plan(*make_tokens(case, rank.rank))
        rank.heap.barrier()
        before = rank.sent_rows.clone()
        weight_R = torch.full((num_rows,), torch.nan)
        rank.publish_rows(_values(case, rank.rank, index=1), weight_R)
        last, this = rank.send_buffer.local[(rank.epoch - 1) % 2], rank.sent_rows
        wanted = torch.full_like(before, torch.nan)
        wanted[: case.num_tokens_CW[0][rank.rank]] = _values(case, rank.rank, index=1)
        _assert_same(this, wanted)
        _assert_same(last, before)
        _assert_same(weight_R, _wanted_rows(case, rank.rank, index=1)[1])
        rows = rank.make_rows(num_rows)
        rank.dispatch_gemm(rows)
        rank.check()
        _assert_rows(case, rank.rank, rows.x_RD, index=1)
        assert rank.counters.sum() == 1 + 2, "only PLANNED (1) and EPOCH (2) are not zero"

    run_world(case, run, seed=len(name))


def test_several_dispatches_without_a_combine() -> None:
    """A rank publishes the rows of the next pass while others still fetch those of this one."""

    def run(rank: KernelRank) -> None:
        first = rank.dispatch().rows
        num_rows = len(first.x_RD)
        for index in (1, 2, 0):
            rank.publish_rows(_values(CASE, rank.rank, index=index), None)
            rows = rank.make_rows(num_rows)
            rank.dispatch_gemm(rows)
            rank.check()
            _assert_rows(CASE, rank.rank, rows.x_RD, index=index)
        for name in ("x_RD", "pre_RG", "h_RF"):
            _assert_same(getattr(rows, name), getattr(first, name))

    run_world(CASE, run, seed=1, starve=0.05)


def test_saved_token_copies_give_the_same_rows_without_other_ranks() -> None:
    def run(rank: KernelRank) -> None:
        num_rows = rank.make_plan(*make_tokens(CASE, rank.rank))
        copies_PD = rank.nan(int(rank.host_status[3]), CASE.hidden_size)
        rows = rank.make_rows(num_rows)
        rank.dispatch_gemm(rows, copies_PD=copies_PD)
        plain, saved_PD = rank.make_rows(num_rows), copies_PD.clone()
        rank.dispatch_gemm(plain)
        max_tokens = rank.layout.max_tokens
        for send_D, origin in zip(
            copies_PD, rank.section("fetch_origin", len(copies_PD)).tolist(), strict=True
        ):
            if origin < 0:
                assert send_D.isnan().all()
            else:
                x_TD, _ = make_tokens(CASE, origin // max_tokens)
                assert torch.equal(send_D, x_TD[origin % max_tokens])
        rank.heap.barrier()
        rank.send_buffer.local.fill_(torch.nan)
        rank.heap.barrier()
        if rank.rank == 0:
            again = rank.make_rows(num_rows)
            rank.dispatch_gemm(again, copies_PD=copies_PD, copies_saved=True)
            rank.check()
            _assert_rows(CASE, rank.rank, again.x_RD, index=0)
            for name in ("x_RD", "pre_RG", "h_RF"):
                _assert_same(getattr(rows, name), getattr(plain, name))
                _assert_same(getattr(again, name), getattr(rows, name))
            _assert_same(copies_PD, saved_PD)

    run_world(CASE, run, seed=5)


def _fail_backward(rank: KernelRank, saved: SavedCall, *, call: int) -> str:
    """Run a backward whose ``publish_rows`` fails; nothing is written. Return the failure."""
    made = rank.dispatch_dgrad(make_dy(rank.case, rank.rank, call=call), saved)
    failure = rank.failure()
    gradients = rank.dgrad_combine(made, saved)
    again = rank.make_rows(len(saved.rows.x_RD))
    rank.dispatch_gemm(again)
    parts = [part for name, part in vars(made).items() if name != "weight_R"]
    assert all(part.isnan().all() for part in (*parts, *gradients, *vars(again).values()))
    assert rank.failure() == failure
    return failure


def test_a_rank_that_skips_the_backward_is_named() -> None:
    def run(rank: KernelRank) -> str:
        _, saved = rank.forward()
        return "" if rank.rank == 1 else _fail_backward(rank, saved, call=0)

    start = time.monotonic()
    results = run_world(THREE, run, seed=1, starve=0.02, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < MAX_S
    assert results == [f"rank 0: rank 1 {NO_ROWS}", "", f"rank 2: rank 1 {NO_ROWS}"]


def test_ranks_with_plans_of_different_calls_fail() -> None:
    """All ranks publish, and each reports that another one uses the plan of another call."""

    def run(rank: KernelRank) -> str:
        saved_calls = [rank.forward(call=call)[1] for call in range(2)]
        call = int(rank.rank > 0)
        return _fail_backward(rank, saved_calls[call], call=call)

    assert run_world(THREE, run, timeout_s=TIMEOUT_S) == [
        f"rank 0: rank 1 runs another pass of call 2, {SAME_ORDER}",
        f"rank 1: rank 0 runs another pass of call 1, {SAME_ORDER}",
        f"rank 2: rank 0 runs another pass of call 1, {SAME_ORDER}",
    ]


def test_a_rank_in_forward_while_others_are_in_backward_fails() -> None:
    def run(rank: KernelRank) -> str:
        _, saved = rank.forward()
        if rank.rank != 1:
            return _fail_backward(rank, saved, call=0)
        rows = rank.dispatch(call=1).rows
        y_TD = rank.gemm_combine(rows)
        assert all(part.isnan().all() for part in (y_TD, *vars(rows).values()))
        return rank.failure()

    assert run_world(THREE, run, timeout_s=TIMEOUT_S) == [
        f"rank 0: rank 1 runs a new call, {SAME_ORDER}",
        f"rank 1: rank 0 runs another pass of call 1, {SAME_ORDER}",
        f"rank 2: rank 1 runs a new call, {SAME_ORDER}",
    ]
