"""The weight-gradient schedule on graphs made by hand: each rule of docs/lancet.md."""

import pytest

from halley.compiler.graph_analysis import GraphAnalysis, Sizes
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.wgrad.movable_nodes import Unit, assign, find_movable, find_units
from halley.compiler.wgrad.order import build_order, place_reductions
from halley.compiler.wgrad.schedule import hidden_gemms, plan_wgrad
from halley.cost.simulate import Operation
from tests.compiler.graph_case import GraphBuilder, aten, find, names, three_layers


def _movable(analysis: GraphAnalysis) -> dict[str, set[int]]:
    found = find_movable(analysis, analysis.find_collectives("all_to_all"))
    return {analysis.nodes[index].name: {*windows} for index, windows in found.items()}


def _units(analysis: GraphAnalysis, cost=lambda node: 1.0) -> list[Unit]:
    movable = find_movable(analysis, analysis.find_collectives("all_to_all"))
    return find_units(analysis, movable, cost=cost)


def test_node_may_run_under_all_to_alls_that_neither_need_nor_feed_it() -> None:
    _, analysis = three_layers()
    # The gradient of the third layer needs both all-to-alls; data gradients feed the next one.
    both, second = {0, 1}, {1}
    assert _movable(analysis) == {
        "t_0": both, "dw_0": both, "out_0": both, "t_1": second, "dw_1": second, "out_1": second
    }  # fmt: skip


def test_node_does_not_bring_a_gemm_ahead_of_the_next_all_to_all() -> None:
    b = GraphBuilder()
    x, w = b.input("x", 4, 4), b.input("w", 4, 4)
    b.all_to_all(x, "first")
    early = b.mm(x, w, name="early")
    b.all_to_all(early, "second")
    late = b.mm(w, w, name="late")
    outputs = [b.call(aten.neg.default, each, name=f"of_{each.name}") for each in (early, late)]
    b.all_to_all(late, "third")
    # No node needs an all-to-all, but "of_late" in the first window would run "late" there.
    assert _movable(b.done(*outputs)) == {"of_early": {0, 1, 2}, "of_late": {1, 2}}


def test_readers_of_a_reduced_gradient_stay() -> None:
    b = GraphBuilder()
    x, w = b.input("x", 4, 4), b.input("w", 4, 4)
    b.all_to_all(x, "a2a")
    gradient = b.mm(x, w, name="gradient")
    b.mm(w, x, name="free")
    start, _ = b.all_reduce(gradient, "ar")
    assert _movable(b.done(b.call(aten.neg.default, start))) == {"gradient": {0}, "free": {0}}


def test_unit_holds_a_gemm_with_the_light_nodes_around_it() -> None:
    _, analysis = three_layers()
    found = [names(analysis, unit.nodes) for unit in _units(analysis)]
    assert found == [["t_0", "dw_0", "out_0"], ["t_1", "dw_1", "out_1"]]


def test_operand_of_two_gemms_is_a_unit_of_its_own() -> None:
    b = GraphBuilder()
    dy, x, y = (b.input(name, 4, 4) for name in "dxy")
    b.all_to_all(b.call(aten.neg.default, dy), "a2a")
    shared = b.t(dy, name="shared")
    cast = b.call(aten.abs.default, x, name="cast")
    first, second = b.mm(shared, cast, name="first"), b.mm(shared, y, name="second")
    analysis = b.done(b.call(aten.add.Tensor, first, second, name="total"))
    units = _units(analysis, lambda node: 10.0 if "t" in node.name else 1.0)
    assert [names(analysis, unit.nodes) for unit in units] == [
        ["shared"], ["cast", "first"], ["second", "total"]
    ]  # fmt: skip
    assert [unit.needs for unit in units] == [set(), {0}, {0, 1}]
    assert [unit.is_gemm for unit in units] == [False, True, True]
    # The transpose is a view and takes no time. The names "first", "cast" and "total" have a "t".
    assert [unit.duration_us for unit in units] == [0.0, 20.0, 11.0]


def _unit(
    duration_us: float, windows: set[int], *, needs: tuple[int, ...] = (), filler: bool = False
) -> Unit:
    return Unit(
        nodes=[], is_gemm=not filler, windows=frozenset(windows), needs=set(needs),
        duration_us=duration_us,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("units", "times_us", "windows", "left_us"),
    [
        pytest.param([_unit(8, {0}), _unit(1, {0})], [10], [[0, 1]], [1], id="nearest first"),
        pytest.param(
            [_unit(30, {0, 1})], [10, 10], [[0], []], [0, 10], id="first of a window may be longer"
        ),
        pytest.param(
            [_unit(9, {0, 1}), _unit(8, {0, 1})], [10, 8], [[0], [1]], [1, 0],
            id="second above twice the time left goes to the next window",
        ),
        pytest.param(
            [_unit(9, {0}), _unit(8, {0})], [10, 8], [[0, 1], []], [0, 8],
            id="unless it has no other window",
        ),
        pytest.param(
            [_unit(4, {0}), _unit(9, {0}, needs=(0,))], [10], [[0, 1]], [0],
            id="needed unit comes before",
        ),
        pytest.param(
            [_unit(2, {0}, filler=True), _unit(5, {0})], [10], [[1, 0]], [3],
            id="fillers come last",
        ),
        pytest.param(
            [_unit(2, {0}, filler=True), _unit(5, {0}, needs=(0,))], [10], [[0, 1]], [3],
            id="needed filler comes along",
        ),
        pytest.param([_unit(2, {0}, filler=True)], [0], [[]], [0], id="fillers need no window"),
        pytest.param(
            [_unit(20, {0, 1, 2}), _unit(1, {0}), _unit(25, {1})], [2, 30, 9], [[1], [2], [0]],
            [1, 5, 0], id="remaining GEMM goes where it hides most",
        ),
        pytest.param([_unit(4, {0, 1})], [0, 0], [[], [0]], [0, 0], id="or to its last window"),
        pytest.param([], [10], [[]], [10], id="nothing to hide it"),
    ],
)  # fmt: skip
def test_units_are_assigned_by_best_fit(units, times_us, windows, left_us) -> None:
    assert assign(units, times_us) == (windows, left_us)


def test_units_run_after_starts_and_waits_before_their_readers() -> None:
    _, analysis = three_layers()
    first, second = find(analysis, "a2a_0"), find(analysis, "a2a_1")
    order = build_order(analysis, _units(analysis), {first: [0], second: [1]})
    analysis.check_order(order)
    assert names(analysis, order)[7:] == [
        "dx_0", "a2a_0", "t_0", "dw_0", "out_0",
        "wait_a2a_0", "dx_1", "a2a_1", "t_1", "dw_1", "out_1",
        "wait_a2a_1", "t_2", "dw_2", "out_2", "dx_2", "output",
    ]  # fmt: skip
    assert hidden_gemms(analysis, order) == {"a2a_0": ("dw_0",), "a2a_1": ("dw_1",)}
    assert hidden_gemms(analysis, range(len(analysis.nodes))) == {"a2a_0": (), "a2a_1": ()}
    # A gradient may also run under a later all-to-all than the next one.
    order = build_order(analysis, _units(analysis), {second: [1, 0]})
    analysis.check_order(order)
    assert hidden_gemms(analysis, order) == {"a2a_0": (), "a2a_1": ("dw_1", "dw_0")}


def test_sums_stay_with_their_operands_where_a_compiler_fuses_them() -> None:
    b = GraphBuilder()
    grad, x, w = (b.input(name, 4, 4) for name in ("tangents_1", "x", "w"))
    start, wait = b.all_to_all(b.mm(grad, w, name="dx"), "a2a")
    dw, bias = b.mm(x, grad, name="dw"), b.call(aten.sum.dim_IntList, grad, [0], name="bias")
    analysis = b.done(b.mm(wait, w, name="last"), dw, bias)

    def order(*, only_with_gemm: bool) -> list[str]:
        found = plan_wgrad(
            analysis, cost=lambda node: 100.0 if node is start else 10.0, sizes=Sizes(1),
            max_bytes=1e9, only_with_gemm=only_with_gemm,
        )  # fmt: skip
        return names(analysis, found)[3:]

    assert order(only_with_gemm=False) == ["dx", "a2a", "dw", "bias", "wait_a2a", "last", "output"]
    assert order(only_with_gemm=True) == ["bias", "dx", "a2a", "dw", "wait_a2a", "last", "output"]


def test_node_without_operands_runs_late_where_a_compiler_fuses_it() -> None:
    """Zeros for the gradient of an embedding would occupy memory during all of backward."""
    b = GraphBuilder()
    grad, x, w = (b.input(name, 4, 4) for name in ("tangents_1", "x", "w"))
    _, wait = b.all_to_all(b.mm(grad, w, name="dx"), "a2a")
    dw = b.mm(x, grad, name="dw")
    zeros = b.opaque(aten.full.default, [64, 4], 0.0, shape=(64, 4), name="zeros")
    analysis = b.done(b.mm(zeros, b.mm(wait, w), name="last"), dw)
    sizes = Sizes(1)
    peak = LiveBytes(analysis, sizes).peak(range(len(analysis.nodes)))
    order = plan_wgrad(
        analysis, cost=lambda node: 10.0, sizes=sizes, max_bytes=peak, only_with_gemm=True
    )
    assert hidden_gemms(analysis, order) == {"a2a": ("dw",)}
    assert names(analysis, order).index("zeros") > names(analysis, order).index("a2a")


@pytest.mark.parametrize(
    ("reduce_us", "want"),
    [
        # dx_1 takes 20 us between the all-to-alls: one reduction of 15 us fits, none of 25 us.
        (15.0, ["a2a_0", "ar_0", "a2a_1", "ar_1"]),
        (25.0, ["a2a_0", "a2a_1", "ar_0", "ar_1"]),
    ],
)
def test_reductions_run_in_gaps_between_all_to_alls(reduce_us: float, want: list[str]) -> None:
    b = GraphBuilder()
    grad, w, x = (b.input(name, 4, 4) for name in ("tangents_1", "primals_1", "x"))
    made = []
    for layer in range(2):
        _, reduced = b.all_reduce(b.mm(x, grad, name=f"dw_{layer}"), f"ar_{layer}")
        made.append(b.call(aten.neg.default, reduced, name=f"step_{layer}"))
        _, grad = b.all_to_all(b.mm(grad, w, name=f"dx_{layer}"), f"a2a_{layer}")
    analysis = b.done(*made, b.mm(grad, w, name="last"))
    times = {"dx_1": 20.0, "ar_0": reduce_us, "ar_1": reduce_us, "a2a_0": 5.0, "a2a_1": 5.0}
    roles = {"ar": "start", "a2a": "start", "wait": "wait", "output": "free", "primals": "free"}
    timed = [
        Operation(
            name=node.name,
            role=roles.get(node.name.partition("_")[0], "compute"),  # pyright: ignore[reportArgumentType]
            duration_us=times.get(node.name, 0.0),
            needs=analysis.needs[index] if node.op != "output" else (),
        )
        for index, node in enumerate(analysis.nodes)
    ]
    order = place_reductions(analysis, timed, build_order(analysis, [], {}))
    analysis.check_order(order)
    found = names(analysis, order)
    assert [name for name in found if name.startswith(("ar", "a2a"))] == want
    # No node waits for a reduction before all of backward has been launched.
    assert found.index("last") < min(found.index("wait_ar_0"), found.index("wait_ar_1"))
