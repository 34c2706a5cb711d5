"""More rows than ``max_rows`` on one rank: all ranks report it, and none waits for its sums."""

import pytest
import torch

from halley.interpreter import INTERPRETED
from tests.fused.faults import Fault, flags, inject
from tests.fused.kernel_case import KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank
from tests.fused.kernel_world import run_world


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")

# All tokens go to expert 0, so rank 0 has 40 rows of it, in 3 tiles, and some of expert 1.
CASE = KernelCase(num_tokens_CW=((20, 20),), num_experts=4, load="one-hot")
MAX_ROWS = 32
MAX_SEEDS = 48
SHORT_S = 0.3

_SUMS_READY = flags("sums_ready", lambda layout: layout.num_ranks * layout.max_chunks)
_OVERFLOW_ROWS = flags("overflow_rows", lambda layout: layout.num_ranks)


def _last_flag(rank: KernelRank) -> torch.Tensor:
    """Return the flag that rank 0 sets last on a rank."""
    return _SUMS_READY(rank)[rank.layout.max_chunks - 1 :][:1]


FAULTS = {
    "no flags": Fault(
        at=_SUMS_READY, within="_signal_overflow", write=lambda epoch: None, case=CASE
    ),
    "flags before the number of rows": Fault(at=_OVERFLOW_ROWS, until=_last_flag, case=CASE),
}


def _all_report(seed: int, ranks: list[KernelRank]) -> bool:
    def run(rank: KernelRank) -> str:
        ranks.append(rank)
        rank.heap.barrier()
        x_TD, routing = make_tokens(CASE, rank.rank)
        rows = rank.make_rows(rank.make_plan(x_TD, routing, max_rows=MAX_ROWS))
        rank.dispatch_gemm(rows)
        rank.gemm_combine(rows, len(x_TD))
        try:
            rank.check()
        except RuntimeError as error:
            return str(error)
        return ""

    errors = run_world(CASE, run, seed=seed, timeout_s=SHORT_S)
    return all(
        text.startswith(f"rank {rank}: the experts of rank 0 got ")
        for rank, text in enumerate(errors)
    )


def test_all_ranks_report_an_overflow() -> None:
    assert _all_report(1, [])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(MAX_SEEDS):
        ranks: list[KernelRank] = []
        with monkeypatch.context() as patch:
            inject(FAULTS[name], ranks, patch)
            if not _all_report(seed, ranks):
                return
    pytest.fail(f"{name} shows with none of {MAX_SEEDS} seeds")
