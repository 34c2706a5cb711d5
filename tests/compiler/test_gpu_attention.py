"""Test microbatches of GPU attention operators, which return several results, some of them None."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx

from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.segment import Segment, find_segment
from halley.compiler.partition.segment_search import group_nodes, has_exchange
from halley.compiler.sizes import Sizes
from tests.compiler.captured_case import BATCH_SIZE, Captured, compute_nodes, joined
from tests.compiler.gpu_attention import GPU_ATTENTIONS, operator_of
from tests.compiler.model_case import SEQ_LEN


NUM_LAYERS, NUM_HEADS = 2, 4
# Shape of the log-sum-exp that each operator saves for backward.
SUMS = {
    "flash": (BATCH_SIZE, NUM_HEADS, SEQ_LEN),
    "efficient": (BATCH_SIZE, NUM_HEADS, 32),
    "cudnn": (BATCH_SIZE, NUM_HEADS, SEQ_LEN, 1),
}


def _has_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _check_same(found: list[Any], wanted: list[Any], where: object) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other), where
            assert one.stride() == other.stride(), where
        else:
            assert one == other, where


def _run_microbatches(rank: int, num_ranks: int, attention: str) -> None:
    case = Captured("switch", attention)
    wanted = case.run(case.graph())
    in_place, by_cat = (3, nullcontext), (2, joined)
    for num_parts, how in (in_place, by_cat) if attention == "flash" else (in_place,):
        graph = case.graph()
        flow, nodes = case.flow(graph), compute_nodes(graph)
        segment = find_segment(flow, nodes)
        assert isinstance(segment, Segment), segment
        with how():
            divide(graph, flow, [(segment, num_parts)], sizes=Sizes(64))
        found = case.run(graph)
        _check_same(found, wanted, num_parts)
        shapes = [tuple(value.shape) for value in found if isinstance(value, torch.Tensor)]
        assert shapes.count(SUMS[attention]) == NUM_LAYERS
        calls = graph.find_nodes(op="call_function", target=operator_of(attention))
        assert [node.meta["val"][0].shape[0] for node in calls] == (
            [BATCH_SIZE // num_parts] * num_parts * NUM_LAYERS
        )


@pytest.mark.parametrize("attention", GPU_ATTENTIONS)
def test_saved_results_of_attention_are_those_of_the_full_batch(run_ranks, attention: str) -> None:
    run_ranks(_run_microbatches, 1, attention, timeout_s=120.0)


def _cut_at_each_group(rank: int, num_ranks: int) -> int:
    """Return the number of segments that began or ended at an operator with several results."""
    case = Captured("switch", "flash")
    graph, wanted = case.graph(), case.run(case.graph())
    nodes = list(graph.nodes)
    groups = group_nodes(case.flow(graph), nodes, lambda _: 0.0)
    (layer,) = (at for at, group in enumerate(groups) if has_exchange(nodes, group))
    several = [
        at for at, (first, end) in enumerate(groups) if any(map(_has_several, nodes[first:end]))
    ]
    for at in several:
        inside = nodes[slice(*groups[at])]
        results = {user for node in inside if _has_several(node) for user in node.users}
        assert results <= set(inside), inside
        copy = case.graph()
        flow, copied = case.flow(copy), list(copy.nodes)
        first, end = groups[min(at, layer)][0], groups[max(at, layer)][1]
        segment = find_segment(flow, copied[first:end])
        assert isinstance(segment, Segment), segment
        price = PipelineCost(flow, cost=lambda _: 1.0, sizes=Sizes(64))
        assert price.pipeline_us(segment, 2) > sum(map(len, segment.stages)), inside
        divide(copy, flow, [(segment, 2)], sizes=Sizes(64))
        _check_same(case.run(copy), wanted, inside)
    return len(several)


def test_segment_has_all_results_of_an_operator_or_none(run_ranks) -> None:
    # Norms, projections and attention of two layers; the last norm; and the row all-to-all.
    (num_segments,) = run_ranks(_cut_at_each_group, 1, timeout_s=120.0)
    assert num_segments >= 4 * NUM_LAYERS
