"""Graphs from disk equal traced ones; changed inputs are traced, damaged files are not used."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from halley.distributed.mesh import build_groups
from halley.lanes import capture, compile_step, graph_cache
from halley.lanes.capture import Capture, StepGraphs
from halley.lanes.cut import cut_step
from halley.lanes.graph_cache import read_graphs
from halley.lanes.segment_compiler import hash_code
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import SIZE, SmallModel, build_gpt2, is_equal, make_batch, take_result
from tests.moe.model_case import destroy
from tests.rank_pool import RunRanks


@contextmanager
def _traces_in(folder: str) -> Iterator[list[str]]:
    """Keep graphs in a folder; yield a list that gets an entry for each trace."""
    traces: list[str] = []
    trace = capture._trace

    def count(*args: Any, **kwargs: Any) -> StepGraphs:
        traces.append("trace")
        return trace(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setattr(capture, "_trace", count)
        yield traces


def _graphs_of(
    loss_function: Callable[..., Any], *batch: torch.Tensor, num_lanes: int = 1
) -> StepGraphs:
    with fresh_graphs():
        return Capture(loss_function, inner="inductor", num_lanes=num_lanes).collect(*batch).graphs


def _describe(graphs: StepGraphs) -> list[object]:
    """Return all that lanes read of graphs: nodes with metadata, and the hash of each item."""
    lines: list[object] = [
        hash_code(item.kind, item.code) for item in cut_step(graphs) if item.code is not None
    ]
    for module in graphs.modules:
        for node in module.graph.nodes:
            line = (node.op, node.name, str(node.target), str(node.args), str(node.kwargs))
            lines += [line, _layout(node.meta.get("val"))]
    return lines


def _layout(value: Any) -> object:
    if isinstance(value, list | tuple):
        return [type(value), *map(_layout, value)]
    if isinstance(value, torch.Tensor):
        return str((value.shape, value.stride(), value.dtype, value.device))
    return type(value), str(value)


def _read_again(rank: int, num_ranks: int, gate: Any, folder: str) -> tuple[int, bool]:
    """Return how many traces two captures took, and whether their graphs are equal."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2(gate, groups, num_layers=2)
    batch = make_batch(rank, batch_size=2)
    with _traces_in(f"{folder}/{rank}") as traces:  # else a late rank reads the other's graphs
        first, second = _graphs_of(model, *batch), _graphs_of(model, *batch)
    destroy(groups)
    assert first is not second
    return len(traces), _describe(first) == _describe(second)


@pytest.mark.parametrize("gate", ["switch", "top2", "dropless"])
def test_graphs_from_disk_equal_traced_ones(run_ranks: RunRanks, gate: str, tmp_path: Path) -> None:
    assert run_ranks(_read_again, 2, gate, str(tmp_path), timeout_s=120.0) == [(1, True)] * 2


def test_gradient_of_cross_entropy_scatters_nothing(tmp_path: Path) -> None:
    """A ``scatter`` would write a float32 tensor of the size of the logits."""
    model = nn.Linear(SIZE, 64)
    batch = torch.randn(4, SIZE), torch.arange(4)
    with _traces_in(str(tmp_path)):
        graphs = _graphs_of(lambda x, targets: F.cross_entropy(model(x), targets), *batch)
    targets = [str(node.target) for node in graphs.backward.graph.nodes]
    assert any("exp" in each for each in targets)
    assert not any("scatter" in each for each in targets)


def _run_steps(rank: int, num_ranks: int, folder: str) -> tuple[int, bool]:
    """Return the traces of two compiled steps, and whether their results are equal."""
    torch.manual_seed(0)
    model = SmallModel()
    batch = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(rank))
    results = []
    with _traces_in(f"{folder}/{rank}") as traces:
        for _ in range(2):
            with fresh_graphs():
                step = compile_step(model, 2, inner="inductor")
                results += [take_result(step(batch), model) for _ in range(4)]
    return len(traces), all(is_equal(each, results[0]) for each in results)


def test_steps_with_graphs_from_disk_have_the_same_bits(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    assert run_ranks(_run_steps, 2, folder, timeout_s=240.0) == [(1, True)] * 2


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[list[str]]:
    with _traces_in(str(tmp_path)) as found:
        yield found


def _layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def _loss(layer: nn.Module, x_TD: torch.Tensor) -> torch.Tensor:
    return layer(x_TD).tanh().square().mean()


def test_whatever_a_trace_depends_on_makes_a_new_trace(
    traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x_TD = _layer(), torch.ones(2, 4)
    loss = partial(_loss, layer)
    _graphs_of(loss, x_TD)
    _graphs_of(loss, x_TD)
    assert len(traces) == 1
    _graphs_of(loss, torch.ones(3, 4))
    _graphs_of(loss, torch.ones(2, 4, requires_grad=True))
    _graphs_of(loss, torch.ones(4, 2).t())
    _graphs_of(lambda x_TD: layer(x_TD).sin().square().mean(), x_TD)
    _graphs_of(loss, x_TD, num_lanes=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _graphs_of(loss, x_TD)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        _graphs_of(loss, x_TD)
    with torch._inductor.config.patch(fallback_random=True):
        _graphs_of(loss, x_TD)
    weight, _ = layer.parameters()
    weight.requires_grad = False
    _graphs_of(loss, x_TD)
    weight.requires_grad = True
    assert len(traces) == 10
    monkeypatch.setattr(graph_cache, "_hash_own_code", lambda: "changed")
    _graphs_of(loss, x_TD)
    assert len(traces) == 11


@torch.library.custom_op("graph_cache_test::double", mutates_args=())
def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


_double.register_fake(torch.empty_like)
_double.register_autograd(lambda _, grad: 2 * grad)


def _keeps_gemms() -> Any:
    def choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_gemm = operator == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def test_graphs_with_python_code_of_others_are_not_kept(traces: list[str], tmp_path: Path) -> None:
    layer, x_TD = _layer(), torch.ones(2, 4)
    partly = partial(checkpoint, layer, use_reentrant=False, context_fn=_keeps_gemms)
    for loss in (lambda x: _double(layer(x)).mean(), lambda x: partly(x).mean()):
        for _ in range(2):
            _graphs_of(loss, x_TD)
    with torch._inductor.config.patch(force_disable_caches=True):
        _graphs_of(partial(_loss, layer), x_TD)
    assert len(traces) == 5
    assert not list(tmp_path.rglob("halley/*.json"))


def _change(change: Callable[[list[Any]], object], path: Path) -> None:
    """Change metadata, calls or inputs in a file, which gets the right checksum again."""
    metadata, *halves = json.loads(path.read_text().partition("\n")[2])
    nodes = [node for half in halves for node in half]
    calls = [node for node in nodes if node[0] == "call_function"]
    change([metadata, calls, nodes[0]])
    text = json.dumps([metadata, *halves])
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def _increase(text: str) -> str:
    """Return the text of a file whose last digit differs."""
    at = max(text.rfind(digit) for digit in "12345678")
    return f"{text[:at]}{int(text[at]) + 1}{text[at + 1 :]}"


def _set(index: int, value: object) -> Callable[[list[Any]], object]:
    """Return a function that changes a part of the first call."""
    return lambda parts: parts[1][0].__setitem__(index, value)


@pytest.mark.parametrize(
    "change",
    [
        _set(0, "call_module"),
        _set(1, "tanh"),
        _set(2, "os.system"),
        _set(2, "aten.no_such_operator.default"),
        _set(2, "graph_cache_test.double.default"),
        _set(3, [{"node": 1000}]),
        _set(2, "aten.from_file.default"),
        _set(4, {"x=print('code runs') or 1, y": 1}),
        _set(3, [{"dtype": "load"}]),
        _set(3, [{"device": "no such device"}]),
        _set(5, 1000),
        lambda parts: parts[2].__setitem__(2, "x=print('code runs')"),
        lambda parts: parts[2].__setitem__(1, "x, y"),
        lambda parts: parts[0].__setitem__(0, {"no such kind": [1, 2]}),
        lambda parts: parts[0].__setitem__(0, {"tensor": [[1], [1], "load", "cpu"]}),
        lambda parts: parts[1].__setitem__(0, []) or parts[1][1].clear(),
    ],
)
def test_damaged_file_is_a_warning_and_a_new_trace(
    traces: list[str], tmp_path: Path, change: Callable[[list[Any]], object]
) -> None:
    loss, x_TD = partial(_loss, _layer()), torch.ones(2, 4)
    wanted = _describe(_graphs_of(loss, x_TD))
    (path,) = tmp_path.rglob("halley/*.json")
    text = path.read_text()
    _change(change, path)
    with pytest.warns(UserWarning, match=f"{path} cannot be used"):
        assert read_graphs(path) is None
    assert _describe(_graphs_of(loss, x_TD)) == wanted
    assert len(traces) == 2
    assert path.read_text() == text


@pytest.mark.parametrize("change", [lambda text: text[:0], lambda text: text[:100], _increase])
def test_file_with_a_wrong_checksum_is_a_warning(
    traces: list[str], tmp_path: Path, change: Callable[[str], str]
) -> None:
    _graphs_of(partial(_loss, _layer()), torch.ones(2, 4))
    (path,) = tmp_path.rglob("halley/*.json")
    path.write_text(change(path.read_text()))
    with pytest.warns(UserWarning, match="its checksum is wrong"):
        assert read_graphs(path) is None


def test_file_that_cannot_be_written_is_a_warning(traces: list[str], tmp_path: Path) -> None:
    found = _graphs_of(partial(_loss, _layer()), torch.ones(2, 4))
    graphs = found.forward.graph, found.backward.graph
    folder = tmp_path / "folder"
    (path := folder / "a.json").mkdir(parents=True)
    for each in (path, Path(__file__) / "a.json"):
        with pytest.warns(UserWarning, match="the traced graphs of lanes cannot be kept"):
            graph_cache.write_graphs(each, graphs)
    assert os.listdir(folder) == ["a.json"]


def test_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "a.json")
    with pytest.warns(UserWarning, match="Not a regular file"):
        assert read_graphs(path) is None


def test_missing_file_is_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        assert read_graphs(tmp_path / "none.json") is None


def test_graphs_with_values_that_have_no_form_are_not_written(tmp_path: Path) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (1, 1j)))
    graph_cache.write_graphs(tmp_path / "a.json", (graph, graph))
    assert os.listdir(tmp_path) == []
