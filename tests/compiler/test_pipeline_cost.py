"""What a range in parts is predicted to take, against the graph that then runs."""

from contextlib import nullcontext

import pytest
from torch import fx

from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.region import Region, find_region
from halley.compiler.sizes import Sizes
from halley.cost.hardware import Predictor
from halley.cost.simulate import graph_time
from tests.compiler.captured_case import BATCH_SIZE, SLOW, Captured, compute_nodes, joined
from tests.compiler.gpt2_model import SEQ_LEN


NUMBERS = (2, 3, 4, 6)


def _makespan_us(graph: fx.Graph, cost: ProfiledCost) -> float:
    works = operations(GraphAnalysis(graph), cost)
    return graph_time(works, range(len(works))).makespan_us


def _compare(rank: int, num_ranks: int, how: str) -> list[tuple[float, float]]:
    """Return, for each number of parts, what was predicted and what the graph takes."""
    case = Captured("dropless")
    found: list[tuple[float, float]] = []
    for num_parts in NUMBERS:
        graph = case.graph()
        sizes = Sizes(BATCH_SIZE * SEQ_LEN)
        cost = ProfiledCost(Predictor(SLOW), sizes=sizes)
        if how == "inductor":
            cost.boundaries = find_boundaries(graph, sizes)
        flow = case.flow(graph)
        nodes = compute_nodes(graph)
        region = find_region(flow, nodes)
        assert isinstance(region, Region), region
        price = PipelineCost(flow, cost=cost, sizes=sizes)
        assert price.as_is(nodes) == pytest.approx(_makespan_us(graph, cost), rel=1e-6)
        with joined() if how == "joined" else nullcontext():
            predicted_us = price.in_parts(region, num_parts)
            divide(graph, flow, [(region, num_parts)], sizes=sizes)
        if how == "inductor":
            cost.boundaries = find_boundaries(graph, sizes)
        found.append((predicted_us, _makespan_us(graph, cost)))
    return found


@pytest.mark.parametrize("how", ["eager", "inductor", "joined"])
def test_prediction_is_that_of_the_graph_in_parts(run_ranks, how: str) -> None:
    (found,) = run_ranks(_compare, 1, how, timeout_s=120.0)
    for num_parts, (predicted_us, us) in zip(NUMBERS, found, strict=True):
        assert predicted_us == pytest.approx(us, rel=0.02), num_parts
