"""Waits time out: the error names the missing rank, tile or chunk."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halley.fused.kernels.peer import ROWS, SUMS, check
from tests.fused.kernel_case import KernelCase
from tests.fused.kernel_rank import KernelRank, run_world


TIMEOUT_S = 0.3
MAX_S = 30.0  # of a test: four kernels that time out, on a busy machine
CASE = KernelCase(num_tokens_CW=((9, 13, 7),), num_experts=6, top_k=3)
ALONE = KernelCase(num_tokens_CW=((20,),), num_experts=2)


def test_a_rank_that_never_calls_is_named_and_later_calls_end_at_once() -> None:
    """The first failure stays."""

    def run(rank: KernelRank) -> str:
        if rank.rank == 1:
            return ""
        rows = rank.begin()
        failure = rank.failure()
        rank.timeout_s = 1000.0  # later kernels and calls do not wait for it
        rank.dispatch_gemm(rows)
        assert rank.gemm_combine(rows).isnan().all()
        assert all(part.isnan().all() for part in vars(rows).values())
        assert rank.counters.sum() in (rank.epoch, 2 * rank.epoch)
        rank.gemm_combine(rank.dispatch().rows)
        rank.timeout_s = TIMEOUT_S
        assert rank.failure() == failure
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
        rank.begin()
        return rank.failure()

    results = run_world(case, run, resident=12, timeout_s=TIMEOUT_S)
    named = [text.partition("did")[0] for text in results]
    assert named == ["rank 0: rank 1 ", "", "rank 2: rank 1 "]


def test_a_rank_that_skips_the_combine_is_named() -> None:
    def run(rank: KernelRank) -> str:
        rows = rank.dispatch().rows
        if rank.rank == 2:
            return ""
        rank.gemm_combine(rows)
        return rank.failure()

    results = run_world(CASE, run, timeout_s=TIMEOUT_S)
    for rank in range(2):
        sentence = f"rank {rank}: rank 2 did not send its partial sums (gemm_combine, chunk "
        assert results[rank].startswith(sentence)


def test_no_rank_waits_for_a_rank_without_its_tokens() -> None:
    """Rank 1 holds no expert of any token: rank 0 does not wait for its partial sums."""
    case = KernelCase(num_tokens_CW=((9, 13),), load="one-hot", top_k=1)

    def run(rank: KernelRank) -> None:
        rows = rank.begin()
        if rank.rank == 0:
            rank.dispatch_gemm(rows)
            assert not rank.gemm_combine(rows).isnan().any()
            rank.check()

    run_world(case, run, timeout_s=TIMEOUT_S)


def _lose_a_tile(rank: KernelRank) -> str:
    rows = rank.begin()
    rank.section("tile_rows", 2)[1] += ALONE.config.weight.block_k
    rank.dispatch_gemm(rows)
    return rank.failure()


def _lose_a_chunk(rank: KernelRank) -> str:
    rows = rank.dispatch().rows
    rank.section("chunk_done", 4)[2] -= 1  # of two groups
    rank.gemm_combine(rows, fused=False)
    return rank.failure()


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (_lose_a_tile, "the rows of tile 1 did not arrive (dispatch_gemm, tile 1) within 0.3 s"),
        (_lose_a_chunk, "column chunk 1 was not multiplied (gemm_combine, chunk 1) within 0.3 s"),
    ],
)
def test_work_that_never_ends_is_named(run: Callable[[KernelRank], str], failure: str) -> None:
    assert run_world(ALONE, run, timeout_s=TIMEOUT_S) == [f"rank 0: {failure}"]


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
