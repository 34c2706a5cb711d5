"""Waits end: a rank that stays away, or work that never comes, is an error that says what."""

import time
from dataclasses import replace

import pytest
import torch

from halley.fused.kernels.status import (
    COMBINE,
    DISPATCH,
    HOME,
    ORDER,
    PLAN,
    STAGE,
    check,
    describe_failure,
)
from tests.fused.kernel_case import KernelCase, make_dy, make_tokens
from tests.fused.kernel_rank import KernelRank, Rows
from tests.fused.kernel_world import run_world


TIMEOUT_S = 0.3
MOST_S = 30.0  # that a test may take: four kernels whose waits end, on a busy machine
CASE = KernelCase(num_tokens_CW=((9, 13, 7),), num_experts=6, top_k=3)


def _failure(rank: KernelRank) -> str:
    with pytest.raises(RuntimeError) as caught:
        rank.check()
    return str(caught.value)


def _run_all(rank: KernelRank) -> tuple[Rows, torch.Tensor]:
    x_TD, routing = make_tokens(rank.case, rank.rank)
    rows = rank.make_rows(rank.make_plan(x_TD, routing))
    rank.dispatch_gemm(rows)
    return rows, rank.gemm_combine(rows, len(x_TD))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_never_calls(seed: int, fused: bool) -> None:
    def run(rank: KernelRank) -> str:
        if rank.rank == 1:
            return ""
        x_TD, routing = make_tokens(CASE, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        failure = _failure(rank)
        rank.dispatch_gemm(rows, fused=fused)
        y_TD = rank.gemm_combine(rows, len(x_TD), fused=fused)
        assert y_TD.isnan().all()
        assert all(part.isnan().all() for part in vars(rows).values())
        assert _failure(rank) == failure
        assert rank.marks.sum() in (rank.epoch, 2 * rank.epoch)
        return failure

    start = time.monotonic()
    starve = 0.02 * (seed % 2)
    results = run_world(CASE, run, seed=seed, starve=starve, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < MOST_S
    assert results == [
        "rank 0: rank 1 did not publish its routing (plan) within 0.3 s",
        "",
        "rank 2: rank 1 did not publish its routing (plan) within 0.3 s",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_rank_that_stays_away_is_named_while_programs_wait_for_each_other(seed: int) -> None:
    """Programs that wait for their own rank's count do not blame a rank that came."""
    knobs = replace(CASE.knobs, num_programs=12)
    case = replace(CASE, num_experts=3, top_k=1, knobs=knobs)

    def run(rank: KernelRank) -> str:
        if rank.rank == 1:
            return ""
        rank.make_plan(*make_tokens(case, rank.rank))
        return _failure(rank)

    results = run_world(case, run, seed=seed, resident=12, timeout_s=TIMEOUT_S)
    assert [text.partition("did")[0] for text in results] == [
        "rank 0: rank 1 ",
        "",
        "rank 2: rank 1 ",
    ]


@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_that_ends_before_it_multiplies(fused: bool) -> None:
    def run(rank: KernelRank) -> str:
        x_TD, routing = make_tokens(CASE, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.dispatch_gemm(rows, fused=fused)
        if rank.rank == 2:
            return ""
        rank.gemm_combine(rows, len(x_TD), fused=fused)
        return _failure(rank)

    results = run_world(CASE, run, timeout_s=TIMEOUT_S)
    for rank in range(2):
        sentence = f"rank {rank}: the sums of rank 2 did not come home (gemm_combine, chunk "
        assert results[rank].startswith(sentence)


def test_a_rank_that_nobody_needs_may_stay_away() -> None:
    """Nobody waits for the sums of a rank that none of its tokens went to."""
    case = KernelCase(num_tokens_CW=((9, 13),), load="one-hot", top_k=1)

    def run(rank: KernelRank) -> None:
        x_TD, routing = make_tokens(case, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        if rank.rank == 0:
            rank.dispatch_gemm(rows)
            assert not rank.gemm_combine(rows, len(x_TD)).isnan().any()
            rank.check()

    run_world(case, run, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_do_not_arrive(fused: bool) -> None:
    case = KernelCase(num_tokens_CW=((20,),), num_experts=2)

    def run(rank: KernelRank) -> str:
        x_TD, routing = make_tokens(case, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.section("tile_rows", 2)[1] += case.knobs.weight.block_k
        rank.dispatch_gemm(rows, fused=fused)
        return _failure(rank)

    (failure,) = run_world(case, run, timeout_s=TIMEOUT_S)
    assert failure == (
        "rank 0: the rows of tile 1 did not arrive (dispatch_gemm, tile 1) within 0.3 s"
    )


def test_tiles_that_are_not_multiplied() -> None:
    case = KernelCase(num_tokens_CW=((20,),), num_experts=2)

    def run(rank: KernelRank) -> str:
        x_TD, routing = make_tokens(case, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.dispatch_gemm(rows)
        rank.section("chunk_done", 4)[2] -= 1  # of two groups
        rank.gemm_combine(rows, len(x_TD), fused=False)
        return _failure(rank)

    (failure,) = run_world(case, run, timeout_s=TIMEOUT_S)
    assert failure == (
        "rank 0: column chunk 1 was not multiplied (gemm_combine, chunk 1) within 0.3 s"
    )


@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_that_ends_amid_backward(fused: bool) -> None:
    case = KernelCase(num_tokens_CW=((3, 9, 5),), num_experts=3, hidden_size=32)

    def run(rank: KernelRank) -> str:
        _, tape = rank.forward_to_train(*make_tokens(case, rank.rank))
        made = rank.dispatch_dgrad(make_dy(case, rank.rank), tape, fused=fused)
        if rank.rank == 1:
            return ""
        gradients = rank.dgrad_combine(made, tape, fused=fused)
        assert all(part.isnan().all() for part in gradients)
        return _failure(rank)

    home = "the sums of rank 1 did not come home (gemm_combine, chunk 0) within 0.3 s"
    results = run_world(case, run, timeout_s=TIMEOUT_S)
    assert results == [f"rank 0: {home}", "", f"rank 2: {home}"]


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_do_not_arrive(fused: bool) -> None:
    case = KernelCase(num_tokens_CW=((20,),), num_experts=2)

    def run(rank: KernelRank) -> str:
        _, tape = rank.forward_to_train(*make_tokens(case, rank.rank))
        rank.section("tile_rows", 2)[1] += case.knobs.weight.block_k
        rank.dispatch_dgrad(make_dy(case, rank.rank), tape, fused=fused)
        return _failure(rank)

    (failure,) = run_world(case, run, timeout_s=TIMEOUT_S)
    assert failure == (
        "rank 0: the rows of tile 1 did not arrive (dispatch_gemm, tile 1) within 0.3 s"
    )


def test_tiles_that_are_not_multiplied_in_backward() -> None:
    case = KernelCase(num_tokens_CW=((20,),), num_experts=2)

    def run(rank: KernelRank) -> str:
        _, tape = rank.forward_to_train(*make_tokens(case, rank.rank))
        made = rank.dispatch_dgrad(make_dy(case, rank.rank), tape)
        rank.section("chunk_done", 4)[2] -= 1  # of two groups
        rank.dgrad_combine(made, tape, fused=False)
        return _failure(rank)

    (failure,) = run_world(case, run, timeout_s=TIMEOUT_S)
    assert failure == (
        "rank 0: column chunk 1 was not multiplied (gemm_combine, chunk 1) within 0.3 s"
    )


def test_after_a_failure_later_calls_end_at_once_and_the_first_failure_stays() -> None:
    def run(rank: KernelRank) -> str:
        if rank.rank != 0:
            return ""
        rank.make_plan(*make_tokens(CASE, 0))
        failure = _failure(rank)
        rank.timeout_s = 1000.0
        start = time.monotonic()
        for _ in range(2):
            _run_all(rank)
        assert time.monotonic() - start < MOST_S
        rank.timeout_s = TIMEOUT_S
        assert _failure(rank) == failure
        return failure

    first = run_world(CASE, run, timeout_s=TIMEOUT_S)[0]
    assert first.endswith("did not publish its routing (plan) within 0.3 s")


def test_codes_by_hand() -> None:
    sentences = {
        (PLAN, 3, 0): "rank 7: rank 3 did not publish its routing (plan) within 2 s",
        (DISPATCH, 0, 5): (
            "rank 7: the rows of tile 5 did not arrive (dispatch_gemm, tile 5) within 2 s"
        ),
        (COMBINE, 0, 1): (
            "rank 7: column chunk 1 was not multiplied (gemm_combine, chunk 1) within 2 s"
        ),
        (HOME, 71, 63): (
            "rank 7: the sums of rank 71 did not come home (gemm_combine, chunk 63) within 2 s"
        ),
        (STAGE, 3, 0): "rank 7: rank 3 did not bring its rows (plan) within 2 s",
        (STAGE, 3, 9): (
            "rank 7: rank 3 did not bring its rows for another pass of call 9 (stage) within 2 s"
        ),
        (ORDER, 3, 9): (
            "rank 7: rank 3 came for another pass of call 9, not for what this rank runs: all "
            "ranks must run their layers, forward and backward, in the same order"
        ),
        (ORDER, 3, 0): (
            "rank 7: rank 3 came with a new call, not for what this rank runs: all ranks must run "
            "their layers, forward and backward, in the same order"
        ),
    }
    for (op, peer, index), sentence in sentences.items():
        code = op << 48 | peer << 32 | index
        assert describe_failure(code, rank=7, timeout_s=2.0) == sentence
        host_words = torch.tensor([code, 128, 0])
        with pytest.raises(RuntimeError) as caught:
            check(host_words, rank=7, timeout_s=2.0)
        assert str(caught.value) == sentence
    check(torch.tensor([0, 128, 0]), rank=7, timeout_s=2.0)
