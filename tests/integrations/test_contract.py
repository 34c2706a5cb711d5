"""``ExpertRunner`` equals the reference layer; ``Framework`` checks installed versions."""

import importlib
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
    ExpertsFunction,
    Framework,
    LocalExperts,
    describe,
    find_module,
)
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.rank_pool import RunRanks


NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 8, 8
# The number of tokens of each rank, and the one expert of all tokens, or -1 for random experts.
LOADS = {
    "random": ((5, 7), -1),
    "a rank without tokens": ((0, 6), -1),
    "no tokens at all": ((0, 0), -1),
    "a rank that receives nothing": ((4, 4), 0),
}


def _make_experts(*, bias: bool) -> Experts:
    """Return experts with small integer weights, so that sums do not depend on their order."""
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    return Experts(
        up_LGD=values(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        down_LDF=values(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
        up_bias_LG=values(NUM_EXPERTS, 2 * INTERMEDIATE) if bias else None,
        down_bias_LD=values(NUM_EXPERTS, HIDDEN) if bias else None,
    )


def _make_inputs(rank: int, num_tokens: int, hot: int) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randint(-2, 3, (num_tokens, HIDDEN), generator=generator).float()
    scores_TE = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    weights_TK, idx_TK = scores_TE.topk(TOP_K)
    if hot >= 0:
        idx_TK[:, 0], idx_TK[:, 1] = hot, -1
        weights_TK[:, 1] = 0
    elif num_tokens:
        idx_TK[0, 1], weights_TK[0, 1] = -1, 0  # dropped
    return x_TD.requires_grad_(), Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)


def _framework_function(experts: Experts) -> ExpertsFunction:
    """Return a framework's expert computation: one expert after another."""

    def run(rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        y_RD = torch.zeros_like(rows_RD)
        for index in range(experts.num_local_experts):
            (rows,) = torch.where(ids_R == index)
            y_RD = y_RD.index_add(0, rows, apply_expert(rows_RD[rows], experts, index=index))
        return y_RD

    return run


def _leaves(experts: Experts) -> list[torch.Tensor]:
    tensors = (experts.up_LGD, experts.down_LDF, experts.up_bias_LG, experts.down_bias_LD)
    return [tensor.requires_grad_() for tensor in tensors if tensor is not None]


def _compare(rank: int, num_ranks: int, load: str, strategy: str, own: bool, bias: bool) -> None:
    counts, hot = LOADS[load]
    num_local = NUM_EXPERTS // num_ranks
    undivided = _make_experts(bias=bias)
    local = undivided.split([num_local] * num_ranks)[rank]
    leaves = _leaves(local)
    for leaf in leaves:
        leaf.retain_grad()
    x_TD, routing = _make_inputs(rank, counts[rank % 2], hot)
    routing.topk_weights_TK.requires_grad_()
    experts = LocalExperts(
        num_local=num_local,
        function=_framework_function(local),
        stacked=None if own else local,
        reason="unsupported" if own else "",
    )
    runner = ExpertRunner(strategy, strict=True)
    y_TD = runner.run(x_TD, routing, experts, group=dist.group.WORLD)
    y_TD.square().sum().backward()

    # The reference on one process: the tokens of all ranks, the experts of all ranks.
    reference = _make_experts(bias=bias)
    expected_leaves = _leaves(reference)
    own_inputs: tuple[torch.Tensor, Routing] | None = None
    for other in range(num_ranks):
        inputs = _make_inputs(other, counts[other % 2], hot)
        inputs[1].topk_weights_TK.requires_grad_()
        expected_TD = moe_reference(*inputs, reference)
        expected_TD.square().sum().backward()
        if other == rank:
            own_inputs = inputs
            _assert_near(y_TD, expected_TD)
    assert own_inputs is not None
    _assert_near(x_TD.grad, own_inputs[0].grad)
    _assert_near(routing.topk_weights_TK.grad, own_inputs[1].topk_weights_TK.grad)
    for leaf, expected in zip(leaves, expected_leaves, strict=True):
        assert expected.grad is not None
        _assert_near(leaf.grad, expected.grad.split(num_local)[rank])


def _assert_near(value: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert value is not None
    assert expected is not None
    assert relative_error(value, expected) < RELATIVE_TOLERANCE[value.dtype]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("own", [False, True], ids=["stacked", "framework"])
def test_values_and_gradients_equal_the_reference(
    load: str, own: bool, run_ranks: RunRanks
) -> None:
    run_ranks(_compare, 2, load, "sequential", own, False)


@pytest.mark.parametrize("strategy", ["sequential", "chunked", "auto"])
def test_values_with_biases_equal_the_reference(strategy: str, run_ranks: RunRanks) -> None:
    run_ranks(_compare, 2, "random", strategy, False, True)


def _run_fused_with_biases(rank: int, num_ranks: int, strict: bool) -> tuple[list[str], str]:
    """Return the warnings or the error of two calls, and the description."""
    num_local = NUM_EXPERTS // num_ranks
    local = _make_experts(bias=True).split([num_local] * num_ranks)[rank]
    experts = LocalExperts(num_local=num_local, function=_framework_function(local), stacked=local)
    runner = ExpertRunner("fused", strict=strict)
    x_TD, routing = _make_inputs(rank, 3, -1)
    group: Any = dist.group.WORLD
    module = nn.Identity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                y_TD = runner.run(x_TD, routing, experts, group=group, module=module)
        except ValueError as error:
            return [str(error)], ""
    _assert_near(y_TD, moe_reference(x_TD, routing, _make_experts(bias=True)))
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


def test_unaligned_experts_run_by_the_frameworks_code() -> None:
    """torch's grouped GEMM cannot read rows of 3 floats, and must not be called with them."""
    up_LGD, down_LDF = torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    local = Experts(up_LGD=up_LGD, down_LDF=down_LDF)
    experts = LocalExperts(num_local=2, function=_framework_function(local), stacked=local)
    routing = Routing(topk_idx_TK=torch.tensor([[1]]), topk_weights_TK=torch.tensor([[2.0]]))
    module = nn.Identity()
    runner = ExpertRunner("sequential")
    y_TD = runner.run(torch.ones(1, 4), routing, experts, group=None, module=module)
    _assert_near(y_TD, moe_reference(torch.ones(1, 4), routing, local))
    assert "intermediate_size (3) must be a multiple of 4" in describe(module)[""]


def test_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^strategy \(fastest\) must be one of sequential, "):
        ExpertRunner("fastest")


def test_compiled_graph_ends_at_the_experts() -> None:
    local = _make_experts(bias=False)
    experts = LocalExperts(
        num_local=NUM_EXPERTS, function=_framework_function(local), stacked=local
    )
    x_TD, routing = _make_inputs(0, 3, -1)
    runner = ExpertRunner("sequential")

    def double(x_TD: torch.Tensor) -> torch.Tensor:
        return 2 * runner.run(x_TD, routing, experts, group=None)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch reads .grad of the graph's inputs
        y_TD = torch.compile(double, backend="eager")(x_TD)
    _assert_near(y_TD, 2 * moe_reference(x_TD, routing, local))
    torch.compiler.reset()
    with pytest.raises(Exception, match="a graph ends at Halley's experts: fullgraph must be F"):
        torch.compile(double, backend="eager", fullgraph=True)(x_TD)
    torch.compiler.reset()


def test_dtypes_with_and_without_autocast() -> None:
    """Experts run in the dtype of their weights or of autocast; sums have the tokens' dtype."""
    local = _make_experts(bias=False)
    x_TD, routing = _make_inputs(0, 6, -1)
    function = _framework_function(local)
    experts = LocalExperts(num_local=NUM_EXPERTS, function=function, stacked=local)
    runner = ExpertRunner("sequential")
    expected_TD = runner.run(x_TD, routing, experts, group=None)
    y_TD = runner.run(x_TD.bfloat16(), routing, experts, group=None)
    assert y_TD.dtype == torch.bfloat16
    _assert_near(y_TD, expected_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_TD = runner.run(x_TD, routing, experts, group=None)
    assert y_TD.dtype == torch.float32
    assert not torch.equal(y_TD, expected_TD)
    _assert_near(y_TD.bfloat16(), expected_TD)


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
def test_missing_framework_is_an_import_error(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.usefixtures("frame")
def test_changed_parameters_are_an_error() -> None:
    def forward(x: int, weights: int) -> None: ...

    FRAME.check_parameters(forward, "x", "weights")
    message = r"^frame \(1.4.2\) must be 1.4 or older: .*forward takes x, weights, not x$"
    with pytest.raises(ValueError, match=message):
        FRAME.check_parameters(forward, "x")
