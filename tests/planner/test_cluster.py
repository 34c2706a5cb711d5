"""Layouts of experts over a cluster, compared with times, bytes and shares worked out by hand."""

import dataclasses
import itertools
from functools import partial

import pytest

from halley.cli.main import main
from halley.core.models import find_model
from halley.core.types import LayerShape
from halley.cost.hardware import H100
from halley.planner.cluster import Cluster, Layout, explain, plan_layouts
from halley.strategies.base import share_of_tokens


shape_of = partial(LayerShape, num_tokens=1, hidden_size=8, intermediate_size=8, ep_size=1)


def _plan(model: str, *, num_nodes: int, gb_per_s: float, **options: int) -> list[Layout]:
    hardware = dataclasses.replace(H100, network_bytes_per_s=gb_per_s * 1e9)
    cluster = Cluster(hardware=hardware, num_nodes=num_nodes, ranks_per_node=8)
    return plan_layouts(find_model(model), cluster, num_tokens=8192, **options)


def _find(layouts: list[Layout], strategy: str, ep_size: int) -> Layout:
    return next(e for e in layouts if (e.strategy, e.ep_size, e.tp_size) == (strategy, ep_size, 1))


def test_memory_and_gradients_of_expert_copies_by_hand() -> None:
    """Mixtral over 8 ranks: one expert of 3 * 4096 * 14336 weights a rank and layer, 2 copies."""
    layout = _find(_plan("mixtral-8x7b", num_nodes=2, gb_per_s=50.0), "fused", 8)
    weights = 3 * 4096 * 14336
    assert layout.expert_bytes == 32 * weights * (4 + 12 / 2)
    assert layout.reduce_us == pytest.approx(2 * weights * 2 / 2 / 50e9 * 1e6 + 40)
    fewer = _find(_plan("mixtral-8x7b", num_nodes=2, gb_per_s=50.0, num_microbatches=4), "fused", 8)
    assert fewer.reduce_us == layout.reduce_us / 4


def test_rows_on_the_network_bound_the_layer() -> None:
    """Qwen3 over 2 x 8 ranks: 1 row a token crosses, or 8, half of which leave the node."""
    layouts = _plan("qwen3-30b-a3b", num_nodes=2, gb_per_s=1.0, num_microbatches=4)
    row_us = 4 * 8192 * 2048 * 2 / 1e9 * 1e6  # dispatch and combine, forward and backward
    once = share_of_tokens(shape_of(num_experts=128, top_k=8), num_experts=64)
    for name, rows in (("hierarchical", once), ("sequential", 8 / 2)):
        assert _find(layouts, name, 16).layer_us == pytest.approx(rows * row_us, rel=0.05)
    assert layouts[0].num_nodes == 1  # a slow network: only gradients should cross it


@pytest.mark.parametrize("here", [1, 2, 4, 6])
def test_share_of_tokens_with_limited_groups_equals_enumeration(here: int) -> None:
    """Of 8 experts in 4 groups, a token uses 2 groups and 3 of their 4 experts."""
    found = [
        min(choice) < here
        for groups in itertools.combinations(range(4), 2)
        for choice in itertools.combinations([2 * g + i for g in groups for i in range(2)], 3)
    ]
    shape = shape_of(num_experts=8, top_k=3, num_groups=4, num_limited_groups=2)
    share = share_of_tokens(shape, num_experts=here)
    assert share == pytest.approx(sum(found) / len(found))


def test_experts_that_do_not_fit_come_last_and_are_named() -> None:
    layouts = _plan("deepseek-v3", num_nodes=1280, gb_per_s=50.0)  # 10,240 GPUs
    assert [each.fits for each in layouts] == sorted((e.fits for e in layouts), reverse=True)
    text = explain(layouts)
    assert text.startswith("hierarchical, 8 x 8 ranks is fastest: ")
    assert text.endswith("does not fit: its experts need 328 GB a GPU.")


def test_command_prints_the_fastest_layout(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "layout", "--model=mixtral-8x7b", "--nodes=2"]
    assert main([*command, "--what-if=link=10"]) == main([*command, "--device=A100"]) == 0
    out, text = capsys.readouterr()
    assert out.startswith('{"strategy": "fused", "ep_size": 8, "tp_size": 1, "num_nodes": 1, ')
    assert "With link=10 GB/s: fused, 1 x 4 ranks is fastest: " in text  # fewer rows leave a GPU
    assert "sequential, 1 x 4 ranks is fastest: " in text  # an A100 cannot run the kernels
