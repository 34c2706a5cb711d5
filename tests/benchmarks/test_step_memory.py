"""The benchmark of a step's memory runs a training step on CPU ranks, without measured figures."""

import json

import pytest

from benchmarks.step_memory import main
from halley.core.models import find_model
from halley.moe.memory_estimate import Parallelism, estimate_memory
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


def _run(rank: int, num_ranks: int) -> str:
    command = "--model tiny --layers 4 --tokens 64 --strategy sequential --device cpu"
    return run_command(rank, num_ranks, main, "benchmarks.step_memory", command)


def test_line_has_the_estimate_for_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(_run, num_ranks=2)
    row = json.loads(first)
    assert not second
    assert row["measured"] is None
    assert 0.5 < row["load"] < 1.5
    where = Parallelism(strategy="sequential", ep_size=2, num_ranks=2)
    wanted = estimate_memory(find_model("tiny"), where, num_tokens=64)
    for name in ("at_rest", "saved", "peak"):
        assert row["estimated"][name] == pytest.approx(getattr(wanted, name) / 1e9, abs=1e-4)
