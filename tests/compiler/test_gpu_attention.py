"""Forward with attention as GPUs have it, in parts: several results of one operator, some none."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx

from halley.compiler.partition.axes import BatchFlow
from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.ranges import Span, group_nodes, has_exchange
from halley.compiler.partition.region import Region, find_region
from halley.compiler.sizes import Sizes
from tests.compiler.captured_case import BATCH_SIZE, Captured, compute_nodes, joined
from tests.compiler.gpt2_model import SEQ_LEN
from tests.compiler.gpu_attention import GPU_ATTENTIONS, operator_of


NUM_LAYERS, NUM_HEADS = 2, 4
# Of each attention, the shape of the sums of exponents that it keeps for backward.
SUMS = {
    "flash": (BATCH_SIZE, NUM_HEADS, SEQ_LEN),
    "efficient": (BATCH_SIZE, NUM_HEADS, 32),
    "cudnn": (BATCH_SIZE, NUM_HEADS, SEQ_LEN, 1),
}


def _has_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _check_same(case: Captured, graph: fx.Graph, where: object) -> list[Any]:
    """Check that a graph returns what that of the case does; return it."""
    found, wanted = case.run(graph), case.run(case.graph())
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other), where
            assert one.stride() == other.stride(), where
        else:
            assert one == other, where
    return found


def _divided(rank: int, num_ranks: int, attention: str) -> None:
    case = Captured("switch", attention)
    for num_parts, how in ((3, nullcontext), (2, joined)):
        graph = case.graph()
        flow, nodes = case.flow(graph), compute_nodes(graph)
        region = find_region(flow, nodes)
        assert isinstance(region, Region), region
        with how():
            divide(graph, flow, [(region, num_parts)], sizes=Sizes(64))
        found = _check_same(case, graph, num_parts)
        shapes = [tuple(value.shape) for value in found if isinstance(value, torch.Tensor)]
        assert shapes.count(SUMS[attention]) == NUM_LAYERS
        calls = graph.find_nodes(op="call_function", target=operator_of(attention))
        assert [node.meta["val"][0].shape[0] for node in calls] == (
            [BATCH_SIZE // num_parts] * num_parts * NUM_LAYERS
        )


@pytest.mark.parametrize("attention", GPU_ATTENTIONS)
def test_attention_runs_in_parts_and_what_it_keeps_is_whole(run_ranks, attention: str) -> None:
    run_ranks(_divided, 1, attention, timeout_s=120.0)


def _groups(flow: BatchFlow, nodes: list[fx.Node]) -> tuple[list[Span], int]:
    """Return the shortest groups, and which of them sends rows."""
    groups = group_nodes(flow, nodes, lambda _: 0.0)
    (layer,) = (at for at, group in enumerate(groups) if has_exchange(nodes, group))
    return groups, layer


def _cut(rank: int, num_ranks: int, attention: str) -> int:
    """Return how many ranges began or ended at an operator of several results."""
    case = Captured("switch", attention)
    graph = case.graph()
    nodes = list(graph.nodes)
    groups, layer = _groups(case.flow(graph), nodes)
    several = [
        at for at, (first, end) in enumerate(groups) if any(map(_has_several, nodes[first:end]))
    ]
    for at in several:
        inside = nodes[slice(*groups[at])]
        results = {user for node in inside if _has_several(node) for user in node.users}
        assert results <= set(inside), inside
        copy = case.graph()
        flow, copied = case.flow(copy), list(copy.nodes)
        region = find_region(flow, copied[groups[min(at, layer)][0] : groups[max(at, layer)][1]])
        assert isinstance(region, Region), region
        price = PipelineCost(flow, cost=lambda _: 1.0, sizes=Sizes(64))
        divided = sum(map(len, region.stages))
        assert price.in_parts(region, 2) > divided, inside
        divide(copy, flow, [(region, 2)], sizes=Sizes(64))
        _check_same(case, copy, inside)
    return len(several)


@pytest.mark.parametrize("attention", ["", GPU_ATTENTIONS[0]])
def test_ranges_take_all_results_of_an_operator_or_none(run_ranks, attention: str) -> None:
    # Norms, projections and attention of two layers; the last norm; and what sends rows.
    (num_ranges,) = run_ranks(_cut, 1, attention, timeout_s=120.0)
    assert num_ranges >= 4 * NUM_LAYERS
