"""Forward of a small GPT-2 in microbatches, on one rank: bits, pipeline, memory and time."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from benchmarks.graph_bench.gpt2_moe import TOP_K
from halley.compiler import run
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis, is_buffer_write
from halley.compiler.graph_collectives import collective_kind, is_wait
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.partition.divide import divide
from halley.compiler.partition.partition_plan import (
    PartitionPlan,
    SegmentReport,
    fit_memory,
    fit_time,
    partition,
    plan_partition,
)
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.propagation import propagate_batch
from halley.compiler.partition.rules import all_rules
from halley.compiler.partition.segment import Segment, find_segment
from halley.compiler.sizes import Sizes
from halley.cost.hardware import Predictor
from halley.cost.simulate import graph_time
from tests.compiler.captured_case import (
    BATCH_SIZE,
    SLOW,
    Captured,
    capture,
    compute_nodes,
    joined,
)
from tests.compiler.model_case import SEQ_LEN


SIZES = Sizes(64)


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    def is_same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b) and a.stride() == b.stride()
        return a == b

    return len(first) == len(second) and all(map(is_same, first, second))


def _divide(
    case: Captured, num_parts: int, *, in_place: bool = True, sizes: Sizes = SIZES
) -> fx.Graph:
    """Return the forward graph, with as many of its operators in microbatches as possible."""
    graph = case.graph()
    flow, nodes = case.flow(graph), compute_nodes(graph)
    refused = [at for at, n in enumerate(nodes) if "take_slots_by_weight" in str(n.target)]
    segment = find_segment(flow, nodes[max(refused, default=-1) + 1 :])
    assert isinstance(segment, Segment), segment
    with nullcontext() if in_place else joined():
        divide(graph, flow, [(segment, num_parts)], sizes=sizes)
    return graph


def _check_divided(rank: int, num_ranks: int, gate: str) -> None:
    case = capture(gate)
    expected = case.run(case.graph())
    for num_parts, in_place in ((3, True), (2, False)):
        graph = _divide(case, num_parts, in_place=in_place)
        assert any(map(is_buffer_write, graph.nodes)) is in_place
        assert _same(case.run(graph), expected), num_parts
        _check_pipeline(graph, num_parts)
        names = [str(node.target) for node in graph.nodes]
        assert names.count("halley.expert_gemm.default") == 2 * num_parts
        assert names.count("halley.sort_slots.default") == num_parts + 1  # once more for backward
        assert names.count("halley.take_slots.default") == (num_parts if gate == "switch" else 0)


def _check_pipeline(graph: fx.Graph, num_parts: int) -> None:
    """Check that each microbatch starts its all-to-all before the first one is waited for."""
    starts = [node.name for node in graph.nodes if collective_kind(node)]
    counts, rows, results = "all_to_all_single", "all_to_all_single_1", "all_to_all_single_2"
    assert starts == [
        f"{name}_part{microbatch}"
        for stage in ((counts, rows), (results,))
        for microbatch in range(num_parts)
        for name in stage
    ]
    nodes = [node.name for node in graph.nodes]
    for wait in graph.nodes:
        if is_wait(wait) and collective_kind(wait.args[0]):
            name = wait.args[0].name.rpartition("_part")[0]
            last = f"{name}_part{num_parts - 1}"
            assert name == counts or nodes.index(last) < nodes.index(wait.name)


@pytest.mark.parametrize("gate", ["switch", "dropless", "prioritized"])
def test_forward_in_microbatches_has_the_same_bits(run_ranks, gate: str) -> None:
    run_ranks(_check_divided, 1, gate, timeout_s=120.0)


def _run_on_graph_module(rank: int, num_ranks: int) -> None:
    case = capture("switch")
    expected = case.run(case.graph())
    options: dict[str, object] = {"passes": "partition", "num_parts": 3, "memory_margin": 10.0}
    full, divided = (fx.GraphModule(case.module, case.graph()) for _ in range(2))
    report = run(divided, options=options, batch_inputs=case.batch_inputs)
    assert report is not None
    assert [each.num_parts for each in report.ranges] == [3]
    assert len(report.windows) == 3 * 3
    assert report.time_before != report.time_after
    assert _same(fx.Interpreter(divided).run(*case.args), expected)
    # Without names of inputs, the graph does not change.
    assert run(full, options=options) is None
    assert _same(fx.Interpreter(full).run(*case.args), expected)


def test_run_divides_a_graph_module_that_names_its_batch_inputs(run_ranks) -> None:
    run_ranks(_run_on_graph_module, 1)


def _find_reasons(rank: int, num_ranks: int) -> None:
    case = capture("switch")
    graph = case.graph()
    flow, nodes = case.flow(graph), compute_nodes(graph)
    names = [node.name for node in nodes]
    dispatch = names.index("gather_rows")
    assert find_segment(flow, nodes[dispatch:]) == (
        "all_to_all_single_1 sends rows that were sorted before the segment"
    )
    assert find_segment(flow, nodes[: names.index("wait_tensor_2")]) == (
        "the wait of all_to_all_single_1 is outside of the segment or not in microbatches"
    )
    assert find_segment(flow, nodes[:5]) == "it contains no all-to-all"
    assert find_segment(propagate_batch(graph, [], all_rules({})), nodes) == (
        "all_to_all_single does not depend on an input that has the batch"
    )
    segment = find_segment(flow, nodes)
    assert isinstance(segment, Segment)
    for num_parts in (1, 5):
        with pytest.raises(ValueError, match=rf"num_parts \({num_parts}\) must be at least 2 and"):
            divide(graph, flow, [(segment, num_parts)], sizes=SIZES)
    first = len(graph.find_nodes(op="placeholder")) + dispatch
    ranges = [(first, len(graph.nodes) - 1, 2)]
    with pytest.raises(RuntimeError, match="cannot run in microbatches: all_to_all_single_1 sends"):
        partition(graph, ranges, batch_inputs=case.batch_inputs, rules={}, sizes=SIZES)


def test_segment_that_cannot_run_in_microbatches_gives_the_reason(run_ranks) -> None:
    run_ranks(_find_reasons, 1)


def _plan_for_memory(
    rank: int, num_ranks: int
) -> tuple[PartitionPlan, PartitionPlan, PartitionPlan]:
    """Return a plan, and what a large and a small limit of memory leave of it."""
    case = capture("dropless")
    graph = case.graph()
    inputs = {"batch_inputs": case.batch_inputs, "rules": {}, "sizes": SIZES}
    plan = plan_partition(graph, cost=lambda node: 1.0, num_parts=4, **inputs)
    names = [node.name for node in graph.nodes]
    apply = partial(partition, **inputs)
    large, small = (
        fit_memory(graph, plan, apply, sizes=SIZES, max_bytes=most) for most in (2**30, 2**10)
    )
    assert [node.name for node in graph.nodes] == names  # only copies change
    return plan, large, small


def test_segment_that_needs_too_much_memory_is_dropped(run_ranks) -> None:
    ((plan, large, small),) = run_ranks(_plan_for_memory, 1)
    assert len(plan.ranges) == 1
    assert large == plan
    assert small.ranges == small.reports == ()
    assert small.skipped[-1] == (
        "all_to_all_single runs on the full batch: its microbatches would need too much memory"
    )


def test_plan_that_gains_too_little_is_dropped() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    report = SegmentReport(
        first="a", last="b", exchanges=("c",), num_parts=2, before_us=2.0, after_us=1.0
    )
    plan = PartitionPlan(ranges=((0, 1, 2),), reports=(report,), skipped=("why",))

    def add_node(copy: fx.Graph, ranges: Iterable[Sequence[int]]) -> None:
        assert list(ranges) == [(0, 1, 2)]
        copy.placeholder("new")

    def fit(divided_us: float) -> PartitionPlan:
        """Return what is left of the plan if forward takes 1 ms without it."""
        return fit_time(graph, plan, add_node, lambda g: divided_us if len(g.nodes) > 2 else 1e3)

    assert fit(940.0) == plan
    for divided_us, text in ((960.0, "0.96"), (2000.0, "2.00")):
        reason = (
            "c runs on the full batch: all segments in microbatches would change the time of "
            f"forward from 1.00 to {text} ms, and a gain of 5% is required"
        )
        assert fit(divided_us) == PartitionPlan(skipped=("why", reason))
    assert len(graph.nodes) == 2


@final
class _CountingInterpreter(fx.Interpreter):
    """Runs a graph and counts the bytes of its own storages that are alive after each node."""

    def __init__(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        super().__init__(module)
        self.peak = 0
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._given = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._found = {key: each for key, each in self._found.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._found.values()))
        return result


def _find_peaks(rank: int, num_ranks: int) -> dict[str, tuple[int, int]]:
    """Return the measured and the predicted peak: full batch, concat by cat, concat in place."""
    case, found = capture("dropless"), {}
    for name in ("full", "cat", "in place"):
        sizes = Sizes(BATCH_SIZE * SEQ_LEN * TOP_K["dropless"])  # one rank receives all rows
        if name == "full":
            graph = case.graph()
        else:
            graph = _divide(case, 4, in_place=name == "in place", sizes=sizes)
        analysis = GraphAnalysis(graph)
        with torch.no_grad():
            runner = _CountingInterpreter(fx.GraphModule(case.module, graph), case.args)
            runner.boxed_run(list(case.args))
        found[name] = runner.peak, LiveBytes(analysis, sizes).peak(range(len(analysis.nodes)))[0]
    return found


def test_concat_in_place_saves_memory_as_predicted(run_ranks) -> None:
    (peaks,) = run_ranks(_find_peaks, 1)
    for measured, predicted in peaks.values():
        assert abs(predicted - measured) < 0.05 * measured
    for at in range(2):  # with cat, most of the extra memory is results next to the full batch
        full, cat, in_place = (peaks[name][at] for name in ("full", "cat", "in place"))
        assert full < in_place
        assert in_place - full < 0.7 * (cat - full)


def _makespan_us(graph: fx.Graph, cost: ProfiledCost) -> float:
    works = operations(GraphAnalysis(graph), cost)
    return graph_time(works, range(len(works))).makespan_us


def _predict(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """Return the predicted time of pipelines, each with the time of the graph that then runs."""
    case = capture("dropless")
    found: list[tuple[float, float]] = []
    for inner, in_place, num_parts in (
        ("eager", True, 2),
        ("eager", True, 6),
        ("eager", False, 4),
        ("inductor", True, 3),
    ):
        sizes = Sizes(BATCH_SIZE * SEQ_LEN)
        cost = ProfiledCost(Predictor(SLOW), sizes=sizes)
        graph = case.graph()
        if inner == "inductor":
            cost.boundaries = find_boundaries(graph, sizes)
        flow, nodes = case.flow(graph), compute_nodes(graph)
        segment = find_segment(flow, nodes)
        assert isinstance(segment, Segment), segment
        price = PipelineCost(flow, cost=cost, sizes=sizes)
        assert price.full_batch_us(nodes) == pytest.approx(_makespan_us(graph, cost), rel=1e-6)
        with nullcontext() if in_place else joined():
            predicted_us = price.pipeline_us(segment, num_parts)
            divide(graph, flow, [(segment, num_parts)], sizes=sizes)
        if inner == "inductor":
            cost.boundaries = find_boundaries(graph, sizes)
        found.append((predicted_us, _makespan_us(graph, cost)))
    return found


def test_predicted_time_of_a_pipeline_is_that_of_the_divided_graph(run_ranks) -> None:
    (found,) = run_ranks(_predict, 1, timeout_s=120.0)
    for predicted_us, us in found:
        assert predicted_us == pytest.approx(us, rel=0.02)


def test_unknown_size_of_a_microbatch_is_its_share() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env, sizes = ShapeEnv(), Sizes(60)
    first, second, third = (env.create_unbacked_symint() for _ in range(3))
    sizes.note_part(first, "microbatch 0", num_parts=3)
    sizes.note_part(second, "microbatch 0", num_parts=3)
    sizes.note_part(third, "microbatch 1", num_parts=3)
    assert sizes.number(first + second) == 20
    assert sizes.number(first + third) == 60  # of several microbatches: the full batch
    assert sizes.number(env.create_unbacked_symint()) == 60
