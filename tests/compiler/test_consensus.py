"""Test the consensus of ranks, which are threads with one store: verdicts, plans and errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from halley.compiler import consensus as consensus_module
from halley.compiler.consensus import Consensus
from halley.compiler.graph_collectives import Signature


SAME = Signature(collectives=("all_to_all a", "all_to_all b"), structure="s")


def _meet(act: Callable[[Consensus], object], *, ranks: int | list[int], timeout_s: float = 20.0):
    """Return the result or the error of ``act`` on each rank present, of three."""
    store = HashStore()
    present = list(range(ranks)) if isinstance(ranks, int) else ranks

    def run(rank: int) -> object:
        sizes = {"rank": rank, "num_ranks": 3}
        try:
            return act(Consensus(store=store, group_name="0", timeout_s=timeout_s, **sizes))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(run, present))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda consensus: consensus.compare(SAME), "compiled no graph with collectives in 0.3 s"),
        (lambda consensus: consensus.all_gather("place", 0), "sent no place in 0.5 s"),
    ],
)
def test_missing_rank_is_named_on_all_others(monkeypatch, act, message: str) -> None:
    monkeypatch.setattr(consensus_module, "_VERDICT_MARGIN_S", 0.2)
    for error in _meet(act, ranks=[0, 2], timeout_s=0.3):
        assert f"graph 1: ranks [1] {message}" in str(error)


def test_plan_that_rank_0_fails_to_make_fails_on_all() -> None:
    def fail() -> list[int]:
        raise KeyError("no node")

    errors = _meet(lambda consensus: consensus.share("plan", fail), ranks=3)
    want = "graph 1: rank 0 made no plan: KeyError('no node')"
    assert [str(error) for error in errors] == [want] * 3
    assert isinstance(getattr(errors[0], "__cause__", None), KeyError)
