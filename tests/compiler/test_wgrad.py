"""The weight-gradient pass on graphs made by hand: labels, units, best fit, deadline, order."""

import pytest
import torch

from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.sizes import Sizes
from halley.compiler.wgrad.movable_nodes import Unit, assign, find_units, label
from halley.compiler.wgrad.order import build_order, place_reductions
from halley.compiler.wgrad.schedule import hidden_gemms, plan_wgrad
from halley.cost.simulate import Operation
from tests.compiler.graph_case import GraphBuilder, aten, find, names, two_layers


def _labels(analysis: GraphAnalysis) -> dict[str, int]:
    found = label(analysis, analysis.find_collectives("all_to_all"))
    return {analysis.nodes[index].name: mask for index, mask in found.items()}


def _units(analysis: GraphAnalysis) -> list[list[str]]:
    labels = label(analysis, analysis.find_collectives("all_to_all"))
    return [
        names(analysis, unit.nodes) for unit in find_units(analysis, labels, cost=lambda node: 1.0)
    ]


def test_labels_are_the_all_to_alls_that_neither_need_nor_feed() -> None:
    _, analysis = two_layers()
    # The third layer's gradient needs both; data gradients feed the next all-to-all.
    both, second = 0b11, 0b10
    assert _labels(analysis) == {
        "t_0": both, "dw_0": both, "out_0": both, "t_1": second, "dw_1": second, "out_1": second
    }  # fmt: skip


def test_no_gemm_moves_before_the_all_to_all_ahead_of_it() -> None:
    b = GraphBuilder()
    x, w = b.input("x", 4, 4), b.input("w", 4, 4)
    b.all_to_all(x, "first")
    early = b.mm(x, w, name="early")
    b.all_to_all(early, "second")
    late = b.mm(w, w, name="late")
    joined = [b.call(aten.neg.default, each, name=f"of_{each.name}") for each in (early, late)]
    b.all_to_all(late, "third")
    analysis = b.done(*joined)
    # Both need no all-to-all; what reads "late" would bring it ahead of the second.
    assert _labels(analysis) == {"of_early": 0b111, "of_late": 0b110}


def test_what_a_collective_of_another_kind_waits_for_stays() -> None:
    b = GraphBuilder()
    x, w = b.input("x", 4, 4), b.input("w", 4, 4)
    b.all_to_all(x, "a2a")
    reduced = b.mm(x, w, name="reduced")
    b.mm(w, x, name="free")
    start, _ = b.all_reduce(reduced, "ar")
    used = b.call(aten.neg.default, b.graph.find_nodes(op="call_function", target=start.target)[0])
    analysis = b.done(used)
    # A gradient may run ahead of its reduction; what reads the reduced one is the optimizer's.
    assert _labels(analysis) == {"reduced": 1, "free": 1}


def test_unit_holds_what_prepares_and_what_follows_a_gradient() -> None:
    _, analysis = two_layers()
    assert _units(analysis) == [["t_0", "dw_0", "out_0"], ["t_1", "dw_1", "out_1"]]


def test_casts_go_along_and_shared_operands_do_not() -> None:
    b = GraphBuilder()
    dy, x, y = (b.input(name, 4, 4) for name in "dxy")
    b.all_to_all(b.call(aten.neg.default, dy), "a2a")
    shared = b.t(dy, name="shared")
    cast = b.call(aten.abs.default, x, name="cast")
    first, second = b.mm(shared, cast, name="first"), b.mm(shared, y, name="second")
    total = b.call(aten.add.Tensor, first, second, name="total")
    analysis = b.done(total)
    labels = label(analysis, analysis.find_collectives("all_to_all"))
    units = find_units(analysis, labels, cost=lambda node: 10.0 if "t" in node.name else 1.0)
    assert [names(analysis, unit.nodes) for unit in units] == [
        ["shared"], ["cast", "first"], ["second", "total"]
    ]  # fmt: skip
    assert [unit.needs for unit in units] == [set(), {0}, {0, 1}]
    assert [unit.is_gemm for unit in units] == [False, True, True]
    # The transpose is a view and costs nothing, whatever its name; "first" and "cast" have a "t".
    assert [unit.duration_us for unit in units] == [0.0, 20.0, 11.0]


def _unit(duration_us: float, hides: int, *, needs: tuple[int, ...] = (), light: bool = False):
    return Unit(nodes=[], is_gemm=not light, hides=hides, needs=set(needs), duration_us=duration_us)


@pytest.mark.parametrize(
    ("units", "times_us", "windows", "left_us"),
    [
        pytest.param([_unit(8, 1), _unit(1, 1)], [10], [(0, 1)], [1], id="nearest first"),
        pytest.param([_unit(30, 0b11)], [10, 10], [(0,), ()], [0, 10], id="first may be too long"),
        pytest.param(
            [_unit(9, 0b11), _unit(8, 0b11)], [10, 8], [(0,), (1,)], [1, 0],
            id="second more than twice what is left waits for the next",
        ),
        pytest.param(
            [_unit(9, 0b01), _unit(8, 0b01)], [10, 8], [(0, 1), ()], [0, 8], id="unless it is last"
        ),
        pytest.param(
            [_unit(4, 1), _unit(9, 1, needs=(0,))], [10], [(0, 1)], [0], id="needs come before"
        ),
        pytest.param(
            [_unit(2, 1, light=True), _unit(5, 1)], [10], [(1, 0)], [3], id="light ones come last"
        ),
        pytest.param(
            [_unit(2, 1, light=True), _unit(5, 1, needs=(0,))], [10], [(0, 1)], [3],
            id="light ones come along",
        ),
        pytest.param([_unit(2, 1, light=True)], [0], [()], [0], id="light ones have no deadline"),
        pytest.param([], [10], [()], [10], id="nothing to hide it"),
    ],
)  # fmt: skip
def test_best_fit_and_deadline(units, times_us, windows, left_us) -> None:
    found = assign(units, times_us)
    assert found.windows == tuple(windows)
    assert found.left_us == tuple(left_us)


def test_gradients_run_behind_starts_and_data_gradients_ahead() -> None:
    _, analysis = two_layers()
    labels = label(analysis, analysis.find_collectives("all_to_all"))
    units = find_units(analysis, labels, cost=lambda node: 1.0)
    windows = {find(analysis, "a2a_0"): [0], find(analysis, "a2a_1"): [1]}
    order = build_order(analysis, units, windows)
    analysis.check_order(order)
    assert names(analysis, order)[7:] == [
        "dx_0", "a2a_0", "t_0", "dw_0", "out_0",
        "wait_a2a_0", "dx_1", "a2a_1", "t_1", "dw_1", "out_1",
        "wait_a2a_1", "t_2", "dw_2", "out_2", "dx_2", "output",
    ]  # fmt: skip
    assert hidden_gemms(analysis, order) == {"a2a_0": ("dw_0",), "a2a_1": ("dw_1",)}
    assert hidden_gemms(analysis, range(len(analysis.nodes))) == {"a2a_0": (), "a2a_1": ()}


def test_a_gradient_may_pass_over_the_next_all_to_all() -> None:
    _, analysis = two_layers()
    labels = label(analysis, analysis.find_collectives("all_to_all"))
    units = find_units(analysis, labels, cost=lambda node: 1.0)
    order = build_order(analysis, units, {find(analysis, "a2a_1"): [1, 0]})
    analysis.check_order(order)
    assert hidden_gemms(analysis, order) == {"a2a_0": (), "a2a_1": ("dw_1", "dw_0")}


def test_sums_stay_with_what_they_add_up_where_a_compiler_fuses_them() -> None:
    b = GraphBuilder()
    grad, x, w = (b.input(name, 4, 4) for name in ("tangents_1", "x", "w"))
    dx = b.mm(grad, w, name="dx")
    start, wait = b.all_to_all(dx, "a2a")
    dw, bias = b.mm(x, grad, name="dw"), b.call(aten.sum.dim_IntList, grad, [0], name="bias")
    analysis = b.done(b.mm(wait, w, name="last"), dw, bias)

    def order(gemms_alone: bool) -> list[str]:
        found = plan_wgrad(
            analysis,
            cost=lambda node: 100.0 if node is start else 10.0,
            sizes=Sizes(1),
            max_bytes=1e9,
            gemms_alone=gemms_alone,
        )
        return names(analysis, found)[3:]

    assert order(False) == ["dx", "a2a", "dw", "bias", "wait_a2a", "last", "output"]
    assert order(True) == ["bias", "dx", "a2a", "dw", "wait_a2a", "last", "output"]


def test_what_reads_nothing_comes_late_however_a_compiler_fuses() -> None:
    """Zeros for the gradient of an embedding would fill memory for all of backward."""
    b = GraphBuilder()
    grad, x, w = (b.input(name, 4, 4) for name in ("tangents_1", "x", "w"))
    _, wait = b.all_to_all(b.mm(grad, w, name="dx"), "a2a")
    dw = b.mm(x, grad, name="dw")
    zeros = b.graph.call_function(aten.full.default, ([64, 4], 0.0), name="zeros")
    zeros.meta["val"] = torch.empty(64, 4, device="meta")
    last = b.mm(zeros, b.mm(wait, w, name="dx_last"), name="last")
    analysis = b.done(last, dw)
    sizes = Sizes(1)
    peak, _ = LiveBytes(analysis, sizes).peak(range(len(analysis.nodes)))
    order = plan_wgrad(
        analysis, cost=lambda node: 10.0, sizes=sizes, max_bytes=peak, gemms_alone=True
    )
    assert hidden_gemms(analysis, order) == {"a2a": ("dw",)}
    assert names(analysis, order).index("zeros") > names(analysis, order).index("a2a")


def _with_reductions() -> GraphAnalysis:
    """Return two layers whose first two weight gradients are reduced as soon as they are there."""
    b = GraphBuilder()
    grad, w, x = (b.input(name, 4, 4) for name in ("tangents_1", "primals_1", "x"))
    made = []
    for layer in range(2):
        product = b.mm(x, grad, name=f"dw_{layer}")
        _, reduced = b.all_reduce(product, f"ar_{layer}")
        made.append(b.call(aten.neg.default, reduced, name=f"step_{layer}"))
        _, grad = b.all_to_all(b.mm(grad, w, name=f"dx_{layer}"), f"a2a_{layer}")
    made.append(b.mm(grad, w, name="last"))
    return b.done(*made)


@pytest.mark.parametrize(
    ("reduce_us", "gap_us", "want"),
    [
        # dx_1 takes 20 us between the all-to-alls: one reduction of 15 fits, two of 10 would.
        (15.0, 20.0, ["a2a_0", "ar_0", "a2a_1", "ar_1"]),
        (25.0, 20.0, ["a2a_0", "a2a_1", "ar_0", "ar_1"]),
    ],
)
def test_reductions_fill_gaps_and_all_to_alls_go_first(
    reduce_us: float, gap_us: float, want: list[str]
) -> None:
    analysis = _with_reductions()
    times = {"dx_1": gap_us, "ar_0": reduce_us, "ar_1": reduce_us, "a2a_0": 5.0, "a2a_1": 5.0}
    roles = {"ar": "start", "a2a": "start", "wait": "wait", "output": "free", "primals": "free"}
    works = [
        Operation(
            name=node.name,
            role=roles.get(node.name.partition("_")[0], "compute"),  # pyright: ignore[reportArgumentType]
            duration_us=times.get(node.name, 0.0),
            needs=analysis.needs[index] if node.op != "output" else (),
        )
        for index, node in enumerate(analysis.nodes)
    ]
    order = place_reductions(analysis, works, build_order(analysis, [], {}))
    analysis.check_order(order)
    found = names(analysis, order)
    assert [name for name in found if name.startswith(("ar", "a2a"))] == want
    # Nobody waits for a reduction before all of backward is issued.
    assert found.index("last") < min(found.index("wait_ar_0"), found.index("wait_ar_1"))
