"""Live bytes of graphs made by hand, and the limit that the weight-gradient schedule keeps."""

import pytest
import torch
from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis, Sizes
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.wgrad.schedule import plan_wgrad, report_order
from tests.compiler.graph_case import GraphBuilder, aten, three_layers


SIZES = Sizes(1)
MATRIX = 4 * 8 * 8  # bytes of each tensor of ``three_layers``


def test_sizes_of_results() -> None:
    x = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    assert SIZES.shape(x) == (3, 5)
    assert SIZES.num_bytes(x) == 30
    assert SIZES.num_bytes((x, None, [x, 7])) == 60


def test_buffers_live_until_the_last_reader_of_a_view() -> None:
    b = GraphBuilder()
    x = b.input("x", 100)  # 400 bytes
    first = b.call(aten.neg.default, x)
    second = b.call(aten.sum.default, b.call(aten.view.default, first, [10, 10]))  # 4 bytes
    third = b.call(aten.abs.default, x)
    live = LiveBytes(b.done(second, third), SIZES)
    # x and first; then second; then third beside x and second.
    assert live.peak([0, 1, 2, 3, 4, 5]) == 804
    # third runs first: x, third, first. Then x is free.
    assert live.peak([0, 4, 1, 2, 3, 5]) == 1200


def test_operand_of_a_collective_lives_until_its_wait() -> None:
    b = GraphBuilder()
    x = b.input("x", 100)
    _, wait = b.all_to_all(b.call(aten.neg.default, x), "a2a")
    other = b.call(aten.abs.default, x)
    live = LiveBytes(b.done(wait, other), SIZES)
    # x, the received tensor and other. With other before the wait, the sent tensor is alive too.
    assert live.peak(range(6)) == 1200
    assert live.peak([0, 1, 2, 4, 3, 5]) == 1600


def test_parameters_belong_to_the_caller() -> None:
    b = GraphBuilder()
    weight, x = b.input("primals_1", 10, 10), b.input("x", 10, 10)
    assert LiveBytes(b.done(b.mm(x, weight)), SIZES).peak([0, 1, 2, 3]) == 800


def _cost(node: fx.Node) -> float:
    return 100.0 if node.name.startswith("a2a") else 10.0


def _plan(analysis: GraphAnalysis, margin: float) -> list[int]:
    peak = LiveBytes(analysis, SIZES).peak(range(len(analysis.nodes)))
    return plan_wgrad(analysis, cost=_cost, sizes=SIZES, max_bytes=(1.0 + margin) * peak)


@pytest.mark.parametrize(
    ("margin", "windows", "exposed_us"),
    [
        # The graph has a peak of five matrices. A gradient under its all-to-all makes it seven:
        # the gradient and its operands, beside the sent and the received matrix.
        (0.4, {"a2a_0": ("dw_0",), "a2a_1": ("dw_1",)}, 180.0),
        (0.39, {"a2a_0": (), "a2a_1": ()}, 200.0),
    ],
)
def test_schedule_keeps_live_bytes_within_the_limit(margin, windows, exposed_us) -> None:
    _, analysis = three_layers()
    order = _plan(analysis, margin)
    analysis.check_order(order)
    report = report_order(analysis, order, cost=_cost, sizes=SIZES)
    assert report.windows == windows
    assert report.peak_before == 5 * MATRIX
    assert report.peak_after <= (1.0 + margin) * report.peak_before
    assert report.time_before.comm_us == report.time_after.comm_us == 200.0
    assert report.time_before.exposed_us == 200.0
    assert report.time_after.exposed_us == exposed_us


def _shrinking_layers(num_layers: int) -> GraphAnalysis:
    """Return backward in which each layer frees two tensors of 16 KiB and needs 32 KiB for it."""
    b = GraphBuilder()
    grad = b.input("tangents_1", 8, 8)
    up, down = b.input("primals_1", 8, 1024), b.input("primals_2", 1024, 8)
    saved = [(b.input(f"x_{i}", 8, 512), b.input(f"y_{i}", 512, 8)) for i in range(num_layers)]
    made: list[fx.Node] = []
    for layer, (x, y) in enumerate(saved):
        made.append(b.call(aten.addmm.default, grad, x, y, name=f"dw_{layer}"))
        _, grad = b.all_to_all(b.mm(b.mm(grad, up), down), f"a2a_{layer}")
    return b.done(*made, grad)


@pytest.mark.parametrize(("margin", "first"), [(0.02, ()), (0.3, ("dw_0",))])
def test_later_gradients_move_where_activations_have_been_freed(margin, first) -> None:
    analysis = _shrinking_layers(4)
    report = report_order(analysis, _plan(analysis, margin), cost=_cost, sizes=SIZES)
    # Only the first gradient raises the peak when it moves, from 4 times 32 KiB to 5 times.
    assert report.windows == {"a2a_0": first} | {f"a2a_{i}": (f"dw_{i}",) for i in (1, 2, 3)}
    assert report.peak_after <= (1.0 + margin) * report.peak_before
