"""Test the passes on graphs of one process, and the graphs that they must not change."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import fx

from halley.compiler import node_cost, run
from halley.compiler.options import Options, parse_options
from halley.compiler.pipeline import reorder, run_passes
from halley.cost.profiles import ProfileTable, find_environment
from halley.cost.simulate import Contention
from tests.compiler.forward_case import ForwardCase, build_forward
from tests.compiler.graph_case import GraphBuilder, find, three_layers


ALONE = Options(agree=False, memory_margin=1.0)


def test_weight_gradients_move_under_all_to_alls() -> None:
    b, _ = three_layers()
    report = run_passes(b.graph, ALONE)
    assert report is not None
    assert report.windows == {"a2a_0": ("dw_0",), "a2a_1": ("dw_1",)}
    assert report.time_after.makespan_us < report.time_before.makespan_us
    found = [node.name for node in b.graph.nodes]
    assert found.index("a2a_0") < found.index("dw_0") < found.index("wait_a2a_0")


def test_run_takes_a_module_and_a_dict() -> None:
    b, _ = three_layers()
    module = fx.GraphModule(torch.nn.Module(), b.graph)
    report = run(module, options={"agree": False, "memory_margin": 1.0})
    assert report is not None
    code = module.code
    assert code.index("a2a_0 =") < code.index("dw_0 =") < code.index("wait_a2a_0 =")


@pytest.mark.parametrize("passes", ["none", "wgrad"])
def test_graph_without_collectives_is_not_changed(passes: str) -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4)
    b.done(b.mm(x, b.mm(x, x)))
    before = list(b.graph.nodes)
    assert run(fx.GraphModule(torch.nn.Module(), b.graph), options={"passes": passes}) is None
    assert list(b.graph.nodes) == before


def test_passes_none_changes_nothing() -> None:
    b, analysis = three_layers()
    assert run_passes(b.graph, Options(passes="none", agree=False)) is None
    assert list(b.graph.nodes) == analysis.nodes


def test_unknown_collective_warns_once_and_changes_nothing() -> None:
    b, analysis = three_layers()
    operator = torch.ops.symm_mem.one_shot_all_reduce.default
    with b.graph.inserting_before(analysis.nodes[-1]):
        for _ in range(2):
            b.graph.call_function(operator, (analysis.nodes[0], "sum", "0"))
    before = list(b.graph.nodes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_passes(b.graph, ALONE) is None
    assert [str(warning.message) for warning in caught] == [
        "halley does not change a graph, because it does not know how these operators "
        "communicate: symm_mem::one_shot_all_reduce"
    ]
    assert list(b.graph.nodes) == before


def test_illegal_order_raises_and_changes_nothing() -> None:
    b, analysis = three_layers()
    order = list(range(len(analysis.nodes)))
    dx, a2a = find(analysis, "dx_0"), find(analysis, "a2a_0")
    order[dx], order[a2a] = a2a, dx
    with pytest.raises(RuntimeError, match="a2a_0 must come after"):
        reorder(b.graph, analysis, order)
    assert list(b.graph.nodes) == analysis.nodes


def test_plan_from_a_table_without_measuring(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    here = find_environment(torch.device("meta"), topology="ranks 1")
    table = ProfileTable(path, here)
    table.add_time("aten.mm.default(float32[8,8], float32[8,8])", 1e6)
    b, _ = three_layers()
    report = run_passes(b.graph, Options(agree=False, memory_margin=1.0, profiles=path))
    assert report is not None
    assert report.time_before.makespan_us > 6e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass": "wgrad"}, r"options \(pass\) must be of agree, hardware, inner, measure"),
        ({"passes": "all"}, r"passes \(all\) must be one of none, wgrad, partition, both"),
        ({"num_parts": 9}, r"num_parts \(9\) must be 0, or 2 to 8"),
        ({"rules": {"mm": None}}, r"rules \(mm\) must be named namespace::operator"),
        ({"rules": {"my::op": 3}}, r"rules\[my::op\] \(3\) must be a function of a Call"),
        ({"memory_margin": float("nan")}, r"memory_margin \(nan\) must be finite"),
        ({"memory_margin": "0.1"}, r"memory_margin \('0.1'\) must be of type float or int"),
        ({"num_parts": True}, r"num_parts \(True\) must be of type int"),
        ({"hardware": "H200"}, r"hardware \('H200'\) must be of type Hardware or NoneType"),
        ({"timeout_s": 0.0}, r"timeout_s \(0.0\) must be finite and positive"),
        ({"unknown_size": 0}, r"unknown_size \(0\) must be finite and positive"),
        ({"measure": True}, "profiles must name a file when measure is set"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(options)


def test_missing_file_of_profiles_is_an_error() -> None:
    b, analysis = three_layers()
    with pytest.raises(ValueError, match=r"profiles \(/nowhere\) must be a file unless measure is"):
        run_passes(b.graph, Options(agree=False, profiles="/nowhere"))
    assert list(b.graph.nodes) == analysis.nodes


def test_unknown_batch_inputs_are_named() -> None:
    b, _ = three_layers()
    module = fx.GraphModule(torch.nn.Module(), b.graph)
    with pytest.raises(ValueError, match=r"batch_inputs \(batch, no\) must be inputs of the graph"):
        run(module, options={"agree": False}, batch_inputs=["no", "batch"])


def test_order_that_is_predicted_to_be_slower_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All-to-alls and GEMMs slow each other down by more than the hidden time."""
    b, analysis = three_layers()
    monkeypatch.setattr(node_cost, "NO_CONTENTION", Contention(compute=4.0, comm=4.0))
    report = run_passes(b.graph, ALONE)
    assert report is not None
    assert list(b.graph.nodes) == analysis.nodes
    assert report.time_after == report.time_before


def test_operator_without_a_rule_keeps_the_full_batch_and_is_named() -> None:
    b, batch = build_forward(ForwardCase())
    tokens = b.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)[0]
    users = list(tokens.users)
    with b.graph.inserting_after(tokens):
        flipped = b.graph.call_function(torch.ops.aten.flip.default, (tokens, [0]))
    flipped.meta["val"] = tokens.meta["val"]
    for user in users:
        user.replace_input_with(tokens, flipped)
    before = list(b.graph.nodes)
    options = Options(passes="partition", agree=False, num_parts=2, memory_margin=4.0)
    report = run_passes(b.graph, options, batch_inputs=[batch])
    assert report is not None
    assert report.ranges == ()
    reason = "runs on the full batch: flip_default (aten::flip) has no rule"
    assert [text.partition(" ")[2] for text in report.skipped] == [reason] * 3  # all-to-alls
    assert list(b.graph.nodes) == before
