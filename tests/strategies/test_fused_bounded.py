"""The fused strategy with max_load: bits as without it, and errors beyond the capacity."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from halley.core.types import Save
from halley.fused.buffers import Workspaces
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import CPU, LayerCase, assert_same, build, make_inputs, train


CASES = [
    LayerCase(num_tokens_W=(20, 14), num_experts=4, seed=1),
    LayerCase(num_tokens_W=(0, 9), num_experts=4, skew="zipf:1.2", dropped=0.3, seed=2),
]
CROWD = LayerCase(num_tokens_W=(60, 60), num_experts=4, skew="one-hot", seed=3)


def _forward(workspaces: Workspaces, case: LayerCase, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return build(workspaces).forward(*make_inputs(case, rank))


def _compare(rank: int, num_ranks: int) -> list[int]:
    exact = Workspaces(dist.group.WORLD, CPU)
    bounded = Workspaces(dist.group.WORLD, CPU, max_load=1.5)
    saves: tuple[tuple[Save, ...], ...] = (("all",), ("inputs", "recompute"))
    for case, case_saves in zip(CASES, saves, strict=True):
        want = train(build(exact).forward, case, rank)
        assert torch.equal(_forward(bounded, case, rank), want["y"])
        for save in case_saves:
            got = train(build(bounded, save=save).forward, case, rank)
            assert list(got) == list(want)
            assert_same(got, want, (save, case))
    max_rows = [workspace.max_rows for workspace in bounded.all()]
    exact.close()
    bounded.close()
    return max_rows


def test_calls_with_max_load_have_the_same_bits(run_ranks: RunRanks) -> None:
    """A balanced load is 40 rows: 20 tokens with 2 experts. 60 rows and the padding make 96."""
    assert run_ranks(_compare, 2) == [[96]] * 2


def _overflow(rank: int, num_ranks: int) -> list[str]:
    workspaces = Workspaces(dist.group.WORLD, CPU, max_load=1.0, max_tokens=60)
    _forward(workspaces, CASES[0], rank)
    said: list[str] = []
    begin = time.monotonic()
    for case in (CROWD, CASES[0]):  # later calls raise the error too
        with pytest.raises(RuntimeError) as caught:
            _forward(workspaces, case, rank)
        said.append(str(caught.value))
    assert time.monotonic() - begin < 20, "waited for partial sums that a rank cannot compute"
    workspaces.close()
    return said


def test_too_many_rows_are_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    """One expert has 120 rows, the other expert of its rank has more; the capacity is 160 rows."""
    for rank, said in enumerate(run_ranks(_overflow, 2)):
        wanted = rf"rank {rank}: the experts of rank 0 got (\d+) rows, more than max_load allows"
        assert all(int(re.findall(wanted, text)[0]) > 160 for text in said), said


def _bring_more_tokens(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU, max_load=2.0)
    _forward(workspaces, CASES[0], rank)
    message = rf"^rank {rank}: a rank has 21 tokens, more than max_tokens"
    with pytest.raises(RuntimeError, match=message):
        _forward(workspaces, LayerCase(num_tokens_W=(3, 21), num_experts=4), rank)
    workspaces.close()


def test_too_many_tokens_are_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    run_ranks(_bring_more_tokens, 2)
