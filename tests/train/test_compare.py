"""A step's time by part: parts that add up, the same on all ranks, whatever their order there."""

from pathlib import Path

import pytest
import torch

from halley.core.config import RunConfig
from halley.distributed.mesh import World
from halley.train.compare import EXPOSED, STEP, _summarise, compare_strategies
from tests.rank_pool import RunRanks
from tests.train.run_case import make_config, write_text


def _world(rank: int, num_ranks: int) -> World:
    return World(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))


def _summarise_two_orders(rank: int, num_ranks: int) -> dict[str, float]:
    orders = [{"a": 1.0, "b": 2.0}, {"b": 6.0, "a": 3.0}]
    later = [{"a": 5.0, "b": 2.0}, {"b": 6.0, "a": 7.0}]
    last = [{"a": 9.0, "b": 8.0}, {"b": 8.0, "a": 9.0}]
    samples = [orders[rank], later[rank], last[rank]]
    return _summarise(samples, _world(rank, num_ranks))


def test_parts_are_matched_by_name(run_ranks: RunRanks) -> None:
    """Means over ranks: a is 2, 6, 9 and b is 4, 4, 8; of those the medians."""
    assert run_ranks(_summarise_two_orders, 2) == [{"a": 6.0, "b": 4.0}] * 2


def _compare(rank: int, num_ranks: int, config: RunConfig) -> dict[str, dict[str, float]]:
    profiles = compare_strategies(
        config, ["sequential", "chunked"], _world(rank, num_ranks), num_steps=1
    )
    for profile in profiles.values():
        assert {span.rank for span in profile.spans} == set(range(num_ranks))
        assert any(span.stream == "comm" for span in profile.spans)
    return {name: profile.parts_us for name, profile in profiles.items()}


def test_parts_add_up_to_the_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(_compare, 2, make_config(write_text(tmp_path), num_steps=3))
    assert first == second
    for parts_us in first.values():
        whole, exposed = parts_us.pop(STEP), parts_us.pop(EXPOSED)
        assert sum(parts_us.values()) == pytest.approx(whole, rel=1e-3)
        waits = sum(us for name, us in parts_us.items() if name.endswith(".wait"))
        assert waits == pytest.approx(exposed, rel=1e-3)
        assert {"attention", "experts", "backward", "dispatch.backward.wait"} <= set(parts_us)
