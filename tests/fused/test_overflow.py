"""More rows than ``max_rows`` on one rank: all ranks report it, and none waits for its sums."""

import pytest

from halley.fused.kernels import routing_exchange
from halley.interpreter.switch import INTERPRETED
from tests.fused.kernel_case import KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank
from tests.fused.kernel_world import run_world
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")

# All tokens go to expert 0, so rank 0 has 40 rows of it, in 3 tiles, and some of expert 1.
CASE = KernelCase(num_tokens_CW=((20, 20),), num_experts=4, load="one-hot")
MAX_ROWS = 32
MAX_SEEDS = 48
SHORT_S = 0.3

_STORE = "        tl.store(theirs + LAYOUT.overflow_rows + rank, num_rows)\n"
_SIGNALS = """\
        for chunk in range(LAYOUT.max_chunks):
            signal(theirs + LAYOUT.sums_ready + rank * LAYOUT.max_chunks + chunk, epoch)
"""
MUTATIONS = {
    "no flags": Mutation(routing_exchange._signal_overflow, ((_SIGNALS, ""),), case=CASE),
    "flags before the number of rows": Mutation(
        routing_exchange._signal_overflow, ((_STORE + _SIGNALS, _SIGNALS + _STORE),), case=CASE
    ),
}


def _failure(rank: KernelRank) -> str:
    x_TD, routing = make_tokens(CASE, rank.rank)
    rows = rank.make_rows(rank.make_plan(x_TD, routing, max_rows=MAX_ROWS))
    rank.dispatch_gemm(rows)
    rank.gemm_combine(rows, len(x_TD))
    try:
        rank.check()
    except RuntimeError as error:
        return str(error)
    return ""


def _all_report(seed: int) -> bool:
    errors = run_world(CASE, _failure, seed=seed, timeout_s=SHORT_S)
    return all(
        text.startswith(f"rank {rank}: the experts of rank 0 got ")
        for rank, text in enumerate(errors)
    )


def test_all_ranks_report_an_overflow() -> None:
    assert _all_report(1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(MUTATIONS[name], monkeypatch)
    caught = (not _all_report(seed) for seed in range(MAX_SEEDS))
    assert any(caught), f"{name} shows with none of {MAX_SEEDS} seeds"
