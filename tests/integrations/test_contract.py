"""``ExpertRunner`` equals the reference layer; ``Framework`` checks installed versions."""

import importlib
import re
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halley.core.reference import apply_expert, moe_reference
from halley.core.types import Experts, Routing
from halley.integrations.contract import (
    ExpertRunner,
    Framework,
    LocalExperts,
    describe,
    find_module,
)
from halley.strategies.auto import AutoStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.integrations.framework_case import messages
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    LayerCase,
    check_values,
    expected,
    local_experts_of,
    make_tokens,
    run_forward,
)


CASE = LayerCase(num_tokens_W=(6,))
LOADS = {
    "random": LayerCase(num_tokens_W=(5, 7), dropped=0.2),
    "a rank without tokens": LayerCase(num_tokens_W=(0, 6)),
    "biases": LayerCase(num_tokens_W=(5, 7), bias=True),
    "no tokens at all": LayerCase(num_tokens_W=(0, 0)),
    "a rank that receives nothing": LayerCase(num_tokens_W=(4, 4), skew="one-hot", top_k=1),
}


def _local(experts: Experts, *, stacked: bool = True) -> LocalExperts:
    """Return experts with a framework's own computation: one expert after another."""

    def run(rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        y_RD = torch.zeros_like(rows_RD)
        for index in range(experts.num_local_experts):
            (rows,) = torch.where(ids_R == index)
            y_RD = y_RD.index_add(0, rows, apply_expert(rows_RD[rows], experts, index=index))
        return y_RD

    return LocalExperts(
        num_local=experts.num_local_experts,
        function=run,
        stacked=experts if stacked else None,
        reason="" if stacked else "unsupported",
    )


def _compare(rank: int, num_ranks: int, case: LayerCase, strategy: str, stacked: bool) -> None:
    runner = ExpertRunner(strategy, strict=True)

    def forward(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        local = _local(experts, stacked=stacked)
        return runner.run(x_TD, routing, local, group=dist.group.WORLD)

    call = run_forward(forward, case, rank)
    call.y_TD.backward(call.grad_TD)
    check_values(call.values(), case, rank)


def _assert_near(value: torch.Tensor, wanted: torch.Tensor) -> None:
    assert relative_error(value, wanted) < RELATIVE_TOLERANCE[value.dtype]


@pytest.mark.parametrize(
    ("load", "strategy", "stacked"),
    [
        *((load, "sequential", True) for load in LOADS),
        *((load, "sequential", False) for load in LOADS if load != "biases"),
        ("biases", "chunked", True),
        ("biases", "auto", True),
    ],
)
def test_values_and_gradients_equal_the_reference(run_ranks, load, strategy, stacked) -> None:
    """Stacked weights run by the strategy, others by the framework's own code."""
    run_ranks(_compare, 2, LOADS[load], strategy, stacked)


def _run_fused_with_biases(rank: int, num_ranks: int, strict: bool) -> tuple[list[str], str]:
    """Return the warnings or the error of two calls, and the description."""
    case = LayerCase(num_tokens_W=(3, 3), bias=True)
    experts, (x_TD, routing, _) = _local(local_experts_of(case, rank)), make_tokens(case, rank)
    runner, module = ExpertRunner("fused", strict=strict), nn.Identity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                y_TD = runner.run(x_TD, routing, experts, group=dist.group.WORLD, module=module)
        except ValueError as error:
            return [str(error)], ""
    _assert_near(y_TD, expected(case, rank)["y"])
    return [str(warning.message) for warning in caught], describe(module)[""]


@pytest.mark.parametrize("strict", [False, True])
def test_fused_reports_biases(strict: bool, run_ranks: RunRanks) -> None:
    """Strict raises on all ranks. Else the first rank warns once and the framework's code runs."""
    (first, path), (second, _) = run_ranks(_run_fused_with_biases, 2, strict)
    problem = "strategy (fused) cannot run experts of this kind: expert_bias (true) must be false"
    assert len(first) == 1
    assert first[0].startswith(problem)
    assert len(second) == (1 if strict else 0)
    if not strict:
        start = "halley: sequential, with the framework's own expert code: expert_bias (true)"
        assert path.startswith(start)


def _misalign(experts: Experts) -> Experts:
    """Return the experts with a weight that begins 4 bytes after a multiple of 16 bytes."""
    storage = torch.zeros(experts.up_LGD.numel() + 1)
    up_LGD = storage[1:].view_as(experts.up_LGD).copy_(experts.up_LGD.detach())
    return experts.with_tensors({**experts.tensors(), "up_LGD": up_LGD.requires_grad_()})


def _misalign_one_rank(rank: int, num_ranks: int, strict: bool) -> tuple[list[str], str]:
    """Run two steps with a weight of rank 1 not aligned; return warnings and description."""
    case = LayerCase(num_tokens_W=(3, 5))
    experts, module = local_experts_of(case, rank), nn.Identity()
    if rank == 1:
        experts = _misalign(experts)
    runner, local, group = ExpertRunner("fused", strict=strict), _local(experts), dist.group.WORLD
    with messages() as found:
        for _ in range(2):
            x_TD, routing, grad_TD = make_tokens(case, rank)
            y_TD = runner.run(x_TD, routing, local, group=group, module=module)
            y_TD.backward(grad_TD)
            _assert_near(y_TD, expected(case, rank)["y"])
            assert x_TD.grad is not None
            _assert_near(x_TD.grad, expected(case, rank)["x.grad"])
    return found, describe(module).get("", "")


@pytest.mark.parametrize("strict", [False, True])
def test_unaligned_weight_of_one_rank_decides_for_all(strict: bool, run_ranks: RunRanks) -> None:
    """Else one rank would run all-to-alls while the other waits in kernels, until a time limit."""
    problem = r"rank 1: up_LGD \(at 0x[0-9a-f]+\) must begin on a multiple of 16 bytes"
    (first, path), (second, other) = run_ranks(_misalign_one_rank, 2, strict)
    assert re.match(rf"strategy \(fused\) cannot run experts of this kind: {problem}", first[0])
    assert path == other
    if strict:
        assert first == second
    else:
        assert len(first) == 1
        assert second == []
        assert re.match(rf"halley: sequential, with the framework's own .*: {problem}", path)


def _misalign_later_layer(rank: int, num_ranks: int) -> list[str]:
    """Run two layers by "auto" with the choice fused; a weight of the second is not aligned."""
    case, modules = LayerCase(num_tokens_W=(3, 5)), (nn.Identity(), nn.Identity())
    group, runner = dist.group.WORLD, ExpertRunner("auto")

    def build_auto(name: str, *args: Any, **options: Any) -> AutoStrategy:
        candidates = {"fused": build_strategy("fused", *args, **options)}
        where = {"group": group, "device": CPU, "recorder": options["recorder"]}
        return AutoStrategy(candidates, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halley.integrations.contract.build_strategy", build_auto)
        for index, module in enumerate(modules):
            experts = local_experts_of(case, rank)
            if index == rank == 1:
                experts = _misalign(experts)
            x_TD, routing, grad_TD = make_tokens(case, rank)
            y_TD = runner.run(x_TD, routing, _local(experts), group=group, module=module)
            y_TD.backward(grad_TD)
            _assert_near(y_TD, expected(case, rank)["y"])
    return [describe(module)[""] for module in modules]


def test_unaligned_weight_of_a_later_layer_decides_for_all_ranks(run_ranks: RunRanks) -> None:
    """Else "auto" raises on its rank alone, because it has chosen by the first layer."""
    first, second = run_ranks(_misalign_later_layer, 2)
    assert first == second
    assert "fused is fastest of fused" in first[0]
    assert re.search(r"the framework's own expert code: rank 1: up_LGD \(at 0x", first[1])


def test_unaligned_experts_run_by_the_frameworks_code() -> None:
    """torch's grouped GEMM cannot read rows of 3 floats, and must not be called with them."""
    up_LGD, down_LDF = torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    local = Experts(up_LGD=up_LGD, down_LDF=down_LDF)
    routing = Routing(topk_idx_TK=torch.tensor([[1]]), topk_weights_TK=torch.tensor([[2.0]]))
    module = nn.Identity()
    runner = ExpertRunner("sequential")
    y_TD = runner.run(torch.ones(1, 4), routing, _local(local), group=None, module=module)
    _assert_near(y_TD, moe_reference(torch.ones(1, 4), routing, local))
    assert "intermediate_size (3) must be a multiple of 4" in describe(module)[""]


def test_auto_describes_its_measurement() -> None:
    experts, (x_TD, routing, _) = _local(local_experts_of(CASE, 0)), make_tokens(CASE, 0)
    module = nn.Identity()
    ExpertRunner("auto").run(x_TD, routing, experts, group=None, module=module)
    path = describe(module)[""]
    assert path.startswith("halley: auto; hidden_size 24, 8 experts, top_k 2, with backward: ")
    assert " is fastest of " in path


def test_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^strategy \(fastest\) must be one of sequential, "):
        ExpertRunner("fastest")


def test_compiled_graph_ends_at_the_experts() -> None:
    experts, (x_TD, routing, _) = _local(local_experts_of(CASE, 0)), make_tokens(CASE, 0)
    runner = ExpertRunner("sequential")

    def double(x_TD: torch.Tensor) -> torch.Tensor:
        return 2 * runner.run(x_TD, routing, experts, group=None)

    with warnings.catch_warnings(action="ignore"):  # torch reads .grad of the graph's inputs
        y_TD = torch.compile(double, backend="eager")(x_TD)
    _assert_near(y_TD, 2 * expected(CASE, 0)["y"])
    torch.compiler.reset()
    with pytest.raises(Exception, match="a graph ends at Halley's experts: fullgraph must be F"):
        torch.compile(double, backend="eager", fullgraph=True)(x_TD)
    torch.compiler.reset()


def test_fused_experts_are_part_of_a_compiled_graph() -> None:
    experts, (x_TD, routing, _) = _local(local_experts_of(CASE, 0)), make_tokens(CASE, 0)
    runner = ExpertRunner("fused", strict=True)
    prepared = runner.prepare(None)

    def double(x_TD: torch.Tensor) -> torch.Tensor:
        return 2 * runner.run(x_TD, routing, experts, group=None, prepared=prepared)

    with warnings.catch_warnings(action="ignore"):  # torch reads .grad of the graph's inputs
        y_TD = torch.compile(double, backend="aot_eager", fullgraph=True)(x_TD)
    torch.compiler.reset()
    _assert_near(y_TD, 2 * expected(CASE, 0)["y"])


def test_dtypes_with_and_without_autocast() -> None:
    """Experts run in the dtype of their weights or of autocast; sums have the tokens' dtype."""
    experts, (x_TD, routing, _) = _local(local_experts_of(CASE, 0)), make_tokens(CASE, 0)
    runner = ExpertRunner("sequential")
    wanted_TD = runner.run(x_TD, routing, experts, group=None)
    y_TD = runner.run(x_TD.bfloat16(), routing, experts, group=None)
    assert y_TD.dtype == torch.bfloat16
    _assert_near(y_TD, wanted_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_TD = runner.run(x_TD, routing, experts, group=None)
    assert y_TD.dtype == torch.float32
    assert not torch.equal(y_TD, wanted_TD)
    _assert_near(y_TD.bfloat16(), wanted_TD)


FRAME = Framework(package="frame", install="frame", newest=(1, 4))


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a framework of version 1.4.2 with the name ``frame.moe.Experts``."""
    package, part = ModuleType("frame"), ModuleType("frame.moe")
    vars(package)["__version__"] = "1.4.2"
    vars(part)["Experts"] = object
    monkeypatch.setitem(sys.modules, "frame", package)
    monkeypatch.setitem(sys.modules, "frame.moe", part)


@pytest.mark.parametrize(
    ("name", "package"),
    [("torchtitan", "torchtitan"), ("megatron", "megatron.core"), ("deepspeed", "deepspeed")],
)
def test_missing_framework_is_an_import_error(name, package, monkeypatch) -> None:
    plugin = f"halley.integrations.{name}"
    for each in list(sys.modules):
        if f"{each}.".startswith(f"{plugin}."):
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^package {package} must be installed: pip install"):
        importlib.import_module(plugin)


def test_missing_dependency_of_a_framework_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'needed'", name="needed")

    monkeypatch.setattr("halley.integrations.contract.importlib.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="needed"):
        FRAME.find_version()
    with pytest.raises(ModuleNotFoundError, match="needed"):
        find_module("frame.moe", "Experts")


@pytest.mark.usefixtures("frame")
def test_names_are_imported_and_missing_ones_are_errors() -> None:
    assert FRAME.import_names({"Experts": "frame.moe"}).Experts is object
    for module in ("frame.moe", "frame.routing"):
        message = rf"^frame \(1.4.2\) must be 1.4, .*: this one has no {module}.Router$"
        with pytest.raises(ImportError, match=message):
            FRAME.import_names({"Router": module})


@pytest.mark.usefixtures("frame")
def test_version_newer_than_tested_is_a_warning() -> None:
    older = Framework(package="frame", install="frame", newest=(1, 3))
    with pytest.warns(UserWarning, match=r"^frame \(1.4.2\) is newer than 1.3, the newest that"):
        older.import_names({"Experts": "frame.moe"})
    older.warn_if_newer("1.3.9")


def _warn_of_newer(rank: int, num_ranks: int) -> None:
    FRAME.warn_if_newer("1.5")


def test_newer_version_fails_no_test(run_ranks: RunRanks) -> None:
    """Warnings are errors in tests and on their ranks, except this one."""
    _warn_of_newer(0, 1)
    run_ranks(_warn_of_newer, 1)


@pytest.mark.usefixtures("frame")
def test_changed_parameters_are_an_error() -> None:
    def forward(x: int, weights: int) -> None: ...

    FRAME.check_parameters(forward, "x", "weights")
    message = r"^frame \(1.4.2\) must be 1.4 or older: .*forward takes x, weights, not x$"
    with pytest.raises(ValueError, match=message):
        FRAME.check_parameters(forward, "x")
