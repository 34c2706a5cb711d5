"""Passes that go the ways of a forward once more: what is staged, what comes, who is missed."""

import time
from dataclasses import replace

import pytest
import torch

from tests.fused.kernel_case import KernelCase, make_dy, make_tokens
from tests.fused.kernel_rank import KernelRank, Tape
from tests.fused.kernel_world import run_world


TIMEOUT_S = 0.3
MOST_S = 30.0  # that a test may take: some kernels whose waits end, on a busy machine
NO_STAGE = "did not bring its rows for another pass of call 1 (stage) within 0.3 s"
SAME_ORDER = (
    "not for what this rank runs: all ranks must run their layers, forward and backward, in the "
    "same order"
)
# More tokens than one program stages; two tasks of sends.
CASE = KernelCase(num_tokens_CW=((20, 13),), top_k=3)
CASES = {
    "two ranks": CASE,
    "one rank": replace(CASE, num_tokens_CW=((35,),)),
    "no tokens on a rank": replace(CASE, num_tokens_CW=((0, 18, 7),), num_experts=6),
    "no tokens": replace(CASE, num_tokens_CW=((0, 0),), max_tokens=4),
    "dropped": replace(CASE, dropped=0.5, dtype=torch.bfloat16),
    "room for more": replace(CASE, max_tokens=32, hidden_size=68),
}
THREE = KernelCase(num_tokens_CW=((3, 9, 5), (4, 2, 6)), num_experts=3)


def _assert_same(value: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit by bit; NaN stands for what was not written."""
    torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)


def _values(case: KernelCase, rank: int, *, turn: int) -> torch.Tensor:
    """Return what a rank stages: its tokens in turn 0, then others."""
    x_TD, _ = make_tokens(case, rank)
    return x_TD if turn == 0 else make_dy(case, rank) * turn


def _wanted_rows(case: KernelCase, rank: int, *, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a rank and their routing weights, from the routing of all ranks.

    Rows behind an expert's are zero as far as gradients of weights are summed; all else is NaN.
    """
    num_local, block, step = case.layout().num_local, case.knobs.block_m, case.knobs.weight.block_k
    ring = [(rank + i) % case.num_ranks for i in range(case.num_ranks)]
    nan = torch.full((1, case.hidden_size), torch.nan, dtype=case.dtype)
    rows, weights = [nan[:0]], [torch.empty(0)]
    for expert in range(rank * num_local, (rank + 1) * num_local):
        num_rows = 0
        for peer in ring:
            routing = make_tokens(case, peer)[1]
            token, k = (routing.topk_idx_TK == expert).nonzero(as_tuple=True)
            rows.append(_values(case, peer, turn=turn)[token])
            weights.append(routing.topk_weights_TK[token, k].float())
            num_rows += len(token)
        num_clear, num_empty = -num_rows % step, -num_rows % block
        rows.append(torch.zeros_like(nan).expand(num_clear, -1))
        rows.append(nan.expand(num_empty - num_clear, -1))
        weights.append(torch.full((num_empty,), torch.nan))
    return torch.cat(rows), torch.cat(weights)


def _assert_rows(case: KernelCase, rank: int, x_RD: torch.Tensor, *, turn: int) -> None:
    wanted_RD, _ = _wanted_rows(case, rank, turn=turn)
    _assert_same(x_RD[: len(wanted_RD)], wanted_RD)
    assert x_RD[len(wanted_RD) :].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_rows_stand_in_the_stage_and_weights_at_their_rows(name: str) -> None:
    case = CASES[name]

    def run(rank: KernelRank) -> None:
        num_rows = rank.make_plan(*make_tokens(case, rank.rank))
        rank.heap.barrier()
        before = rank.stage.clone()
        weight_R = torch.full((num_rows,), torch.nan)
        rank.stage_again(_values(case, rank.rank, turn=1), weight_R)
        last, this = rank.stages.local[(rank.epoch - 1) % 2], rank.stage
        wanted = torch.full_like(before, torch.nan)
        wanted[: case.num_tokens_CW[0][rank.rank]] = _values(case, rank.rank, turn=1)
        _assert_same(this, wanted)
        _assert_same(last, before)
        _assert_same(weight_R, _wanted_rows(case, rank.rank, turn=1)[1])
        rows = rank.make_rows(num_rows)
        rank.dispatch_gemm(rows)
        rank.check()
        _assert_rows(case, rank.rank, rows.x_RD, turn=1)
        assert rank.marks.sum() == 1 + 2, "all is zero but the last plan's epoch and this pass's"

    run_world(case, run, seed=len(name))


@pytest.mark.parametrize("seed", range(2))
def test_passes_in_a_row_without_a_combine(seed: int) -> None:
    """A rank stages for the next pass while its peers may still fetch for this one."""

    def run(rank: KernelRank) -> None:
        num_rows = rank.make_plan(*make_tokens(CASE, rank.rank))
        first = rank.make_rows(num_rows)
        rank.dispatch_gemm(first)
        for turn in (1, 2, 0):
            rank.stage_again(_values(CASE, rank.rank, turn=turn), None)
            rows = rank.make_rows(num_rows)
            rank.dispatch_gemm(rows)
            rank.check()
            _assert_rows(CASE, rank.rank, rows.x_RD, turn=turn)
        for name in ("x_RD", "pre_RG", "h_RF"):
            _assert_same(getattr(rows, name), getattr(first, name))

    run_world(CASE, run, seed=seed, starve=0.05 * (seed % 2))


@pytest.mark.parametrize("fused", [True, False])
def test_rows_kept_once_each_come_again_without_a_peer(fused: bool) -> None:
    def run(rank: KernelRank) -> None:
        num_rows = rank.make_plan(*make_tokens(CASE, rank.rank))
        sends_SD, rows = rank.make_sends(), rank.make_rows(num_rows)
        rank.dispatch_gemm(rows, fused=fused, sends_SD=sends_SD)
        plain, kept_SD = rank.make_rows(num_rows), sends_SD.clone()
        rank.dispatch_gemm(plain, fused=fused)
        max_tokens = rank.layout.max_tokens
        for send_D, origin in zip(
            sends_SD, rank.section("fetch_origin", len(sends_SD)).tolist(), strict=True
        ):
            if origin < 0:
                assert send_D.isnan().all()
            else:
                x_TD, _ = make_tokens(CASE, origin // max_tokens)
                assert torch.equal(send_D, x_TD[origin % max_tokens])
        rank.heap.barrier()
        rank.stages.local.fill_(torch.nan)
        rank.heap.barrier()
        if rank.rank == 0:
            again = rank.make_rows(num_rows)
            rank.dispatch_gemm(again, fused=fused, sends_SD=sends_SD, sends_kept=True)
            rank.check()
            _assert_rows(CASE, rank.rank, again.x_RD, turn=0)
            for name in ("x_RD", "pre_RG", "h_RF"):
                _assert_same(getattr(rows, name), getattr(plain, name))
                _assert_same(getattr(again, name), getattr(rows, name))
            _assert_same(sends_SD, kept_SD)

    run_world(CASE, run, seed=4 + fused)


def _failure(rank: KernelRank) -> str:
    with pytest.raises(RuntimeError) as caught:
        rank.check()
    return str(caught.value)


def _fail_backward(rank: KernelRank, tape: Tape, *, call: int, fused: bool) -> str:
    """Run a backward that fails as it stages; return the failure. Nothing comes out of it."""
    made = rank.dispatch_dgrad(make_dy(rank.case, rank.rank, call=call), tape, fused=fused)
    failure = _failure(rank)
    gradients = rank.dgrad_combine(made, tape, fused=fused)
    again = rank.make_rows(len(tape.rows.x_RD))
    rank.dispatch_gemm(again, fused=fused)
    parts = [part for name, part in vars(made).items() if name != "weight_R"]
    assert all(part.isnan().all() for part in (*parts, *gradients, *vars(again).values()))
    assert _failure(rank) == failure
    return failure


@pytest.mark.parametrize(("seed", "fused"), [(0, False), (1, True)])
def test_a_rank_that_never_comes(seed: int, fused: bool) -> None:
    def run(rank: KernelRank) -> str:
        _, tape = rank.forward_to_train(*make_tokens(THREE, rank.rank))
        return "" if rank.rank == 1 else _fail_backward(rank, tape, call=0, fused=fused)

    start = time.monotonic()
    results = run_world(THREE, run, seed=seed, starve=0.02 * seed, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < MOST_S
    assert results == [f"rank 0: rank 1 {NO_STAGE}", "", f"rank 2: rank 1 {NO_STAGE}"]


def test_ranks_with_plans_of_different_calls() -> None:
    """All ranks come, and each sees that the others came for another call."""

    def run(rank: KernelRank) -> str:
        tapes = [
            rank.forward_to_train(*make_tokens(THREE, rank.rank, call=call))[1] for call in range(2)
        ]
        call = int(rank.rank > 0)
        return _fail_backward(rank, tapes[call], call=call, fused=True)

    assert run_world(THREE, run, timeout_s=TIMEOUT_S) == [
        f"rank 0: rank 1 came for another pass of call 2, {SAME_ORDER}",
        f"rank 1: rank 0 came for another pass of call 1, {SAME_ORDER}",
        f"rank 2: rank 0 came for another pass of call 1, {SAME_ORDER}",
    ]


def test_a_rank_in_forward_while_the_others_are_in_backward() -> None:
    def run(rank: KernelRank) -> str:
        _, tape = rank.forward_to_train(*make_tokens(THREE, rank.rank))
        if rank.rank != 1:
            return _fail_backward(rank, tape, call=0, fused=True)
        x_TD, routing = make_tokens(THREE, rank.rank, call=1)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.dispatch_gemm(rows)
        y_TD = rank.gemm_combine(rows, len(x_TD))
        assert all(part.isnan().all() for part in (y_TD, *vars(rows).values()))
        return _failure(rank)

    assert run_world(THREE, run, timeout_s=TIMEOUT_S) == [
        f"rank 0: rank 1 came with a new call, {SAME_ORDER}",
        f"rank 1: rank 0 came for another pass of call 1, {SAME_ORDER}",
        f"rank 2: rank 1 came with a new call, {SAME_ORDER}",
    ]
