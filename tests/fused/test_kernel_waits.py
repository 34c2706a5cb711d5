"""Waits time out: the error names the missing rank, tile or chunk."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from halley.fused.kernels.peer import ROWS, SUMS, check
from tests.fused.kernel_case import KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank, Rows
from tests.fused.kernel_world import run_world


TIMEOUT_S = 0.3
MAX_S = 30.0  # of a test: four kernels that time out, on a busy machine
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


def test_a_rank_that_never_calls_is_named() -> None:
    def run(rank: KernelRank) -> str:
        if rank.rank == 1:
            return ""
        x_TD, routing = make_tokens(CASE, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        failure = _failure(rank)
        rank.dispatch_gemm(rows)
        y_TD = rank.gemm_combine(rows, len(x_TD))
        assert y_TD.isnan().all()
        assert all(part.isnan().all() for part in vars(rows).values())
        assert _failure(rank) == failure
        assert rank.counters.sum() in (rank.epoch, 2 * rank.epoch)
        return failure

    start = time.monotonic()
    results = run_world(CASE, run, seed=1, starve=0.02, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < MAX_S
    assert results == [
        "rank 0: rank 1 did not publish its routing (plan) within 0.3 s",
        "",
        "rank 2: rank 1 did not publish its routing (plan) within 0.3 s",
    ]


def test_the_missing_rank_is_named_although_ctas_wait_for_each_other() -> None:
    """CTAs that wait for PLANNED of their own rank do not report another rank first."""
    config = replace(CASE.config, num_programs=12)
    case = replace(CASE, num_experts=3, top_k=1, config=config)

    def run(rank: KernelRank) -> str:
        if rank.rank == 1:
            return ""
        rank.make_plan(*make_tokens(case, rank.rank))
        return _failure(rank)

    results = run_world(case, run, resident=12, timeout_s=TIMEOUT_S)
    assert [text.partition("did")[0] for text in results] == [
        "rank 0: rank 1 ",
        "",
        "rank 2: rank 1 ",
    ]


def test_a_rank_that_skips_the_combine_is_named() -> None:
    def run(rank: KernelRank) -> str:
        x_TD, routing = make_tokens(CASE, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.dispatch_gemm(rows)
        if rank.rank == 2:
            return ""
        rank.gemm_combine(rows, len(x_TD))
        return _failure(rank)

    results = run_world(CASE, run, timeout_s=TIMEOUT_S)
    for rank in range(2):
        sentence = f"rank {rank}: rank 2 did not send its partial sums (gemm_combine, chunk "
        assert results[rank].startswith(sentence)


def test_no_rank_waits_for_a_rank_without_its_tokens() -> None:
    """Rank 1 holds no expert of any token: rank 0 does not wait for its partial sums."""
    case = KernelCase(num_tokens_CW=((9, 13),), load="one-hot", top_k=1)

    def run(rank: KernelRank) -> None:
        x_TD, routing = make_tokens(case, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        if rank.rank == 0:
            rank.dispatch_gemm(rows)
            assert not rank.gemm_combine(rows, len(x_TD)).isnan().any()
            rank.check()

    run_world(case, run, timeout_s=TIMEOUT_S)


def test_a_tile_whose_rows_never_arrive_is_named() -> None:
    case = KernelCase(num_tokens_CW=((20,),), num_experts=2)

    def run(rank: KernelRank) -> str:
        x_TD, routing = make_tokens(case, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing))
        rank.section("tile_rows", 2)[1] += case.config.weight.block_k
        rank.dispatch_gemm(rows)
        return _failure(rank)

    (failure,) = run_world(case, run, timeout_s=TIMEOUT_S)
    assert failure == (
        "rank 0: the rows of tile 1 did not arrive (dispatch_gemm, tile 1) within 0.3 s"
    )


def test_a_chunk_that_is_never_multiplied_is_named() -> None:
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


def test_after_a_failure_later_calls_end_at_once_and_the_first_failure_stays() -> None:
    def run(rank: KernelRank) -> str:
        if rank.rank != 0:
            return ""
        rank.make_plan(*make_tokens(CASE, 0))
        failure = _failure(rank)
        rank.timeout_s = 1000.0
        start = time.monotonic()
        _run_all(rank)
        assert time.monotonic() - start < MAX_S
        rank.timeout_s = TIMEOUT_S
        assert _failure(rank) == failure
        return failure

    first = run_world(CASE, run, timeout_s=TIMEOUT_S)[0]
    assert first.endswith("did not publish its routing (plan) within 0.3 s")


@pytest.mark.parametrize(
    ("kind", "peer", "index", "sentence"),
    [
        (SUMS, 71, 63, "rank 71 did not send its partial sums (gemm_combine, chunk 63) within 2 s"),
        (ROWS, 3, 0, "rank 3 did not publish its rows (plan) within 2 s"),
        (ROWS, 3, 9, "rank 3 did not publish its rows for another pass of call 9 within 2 s"),
    ],
)
def test_failure_codes_have_these_messages(kind: Any, peer: int, index: int, sentence: str) -> None:
    code = kind.value << 48 | peer << 32 | index
    with pytest.raises(RuntimeError, match=re.escape(f"rank 7: {sentence}")):
        check(torch.tensor([code, 128, 0]), rank=7, timeout_s=2.0)
    check(torch.tensor([0, 128, 0]), rank=7, timeout_s=2.0)
