"""Strategy "auto" measures once, makes one choice for all ranks, and returns the chosen result."""

import dataclasses
from functools import partial
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import H200, Predictor
from halley.fused.buffers import Workspaces
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import relative_error
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    SIZES,
    LayerCase,
    check_values,
    expected,
    make_inputs,
    make_tokens,
    train,
)


CASE = LayerCase(num_tokens_W=(8,))
SHAPE = LayerShape(num_tokens=1, num_experts=8, top_k=2, ep_size=1, itemsize=4, **SIZES)


@final
class _Slow(AbstractStrategy):
    """The reference on one rank, which counts its calls and pretends to take some time."""

    def __init__(
        self, delay_s: float, *, backward_s: float = 0.0, problem: str = "", fits: bool = True
    ) -> None:
        self.delay_s, self.backward_s = delay_s, backward_s
        self.elapsed_s = 0.0
        self.num_calls = self.num_releases = 0
        self._problem, self._fits = problem, fits

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return self._problem

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        if not self._fits:
            raise MemoryError("rank 1 of 2 has no 12 bytes")
        self.num_calls += 1
        self.elapsed_s += self.delay_s
        y_TD = moe_reference(x_TD, routing, experts)
        if y_TD.requires_grad:
            y_TD.register_hook(self._add_backward)
        return y_TD

    def _add_backward(self, _grad_TD: torch.Tensor) -> None:
        self.elapsed_s += self.backward_s

    def release(self) -> None:
        self.num_releases += 1

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return [Task(name="all", stream="compute", duration_us=self.delay_s * 1e6)]


def _pretended_now(auto: AutoStrategy) -> float:
    """Return the time of a clock that only slow candidates advance."""
    return sum(c.elapsed_s for c in auto.candidates.values() if isinstance(c, _Slow))


@pytest.fixture(autouse=True)
def pretended_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoStrategy, "_now", _pretended_now)


def _auto(
    candidates: dict[str, Any], group: dist.ProcessGroup | None = None, **options: Any
) -> AutoStrategy:
    return AutoStrategy(candidates, group=group, device=CPU, recorder=Recorder(CPU), **options)


def _forward(strategy: AbstractStrategy, case: LayerCase, rank: int = 0) -> torch.Tensor:
    return strategy.forward(*make_inputs(case, rank))


def _choose(auto: AutoStrategy, *, gradients: bool, case: LayerCase = CASE) -> str:
    """Run a layer, with backward if ``gradients``; return the choice for its shape."""
    with torch.set_grad_enabled(gradients):
        y_TD = _forward(auto, case)
    if gradients:
        y_TD.sum().backward()
    shape = dataclasses.replace(SHAPE, num_experts=case.num_experts, top_k=case.top_k)
    return auto.decision(shape, gradients=gradients).name


def test_fastest_is_chosen_once() -> None:
    candidates = {"chunked": _Slow(0.02), "fused": _Slow(0.0)}
    auto = _auto(candidates)
    assert auto.decision(SHAPE, gradients=False).name == ""
    for num_tokens in (8, 3):
        case = LayerCase(num_tokens_W=(num_tokens,))
        with torch.no_grad():
            got = _forward(auto, case)
        assert torch.equal(got, expected(case, 0)["y"])
    assert [c.num_calls for c in candidates.values()] == [4, 6]
    (reason,) = auto.reasons
    assert reason.startswith("hidden_size 24, 8 experts, top_k 2, forward: fused is fastest of")


def test_calls_with_gradients_are_measured_separately() -> None:
    """With backward, another candidate is the fastest."""
    candidates = {"chunked": _Slow(0.03), "fused": _Slow(0.0, backward_s=0.12)}
    auto = _auto(candidates)
    assert _choose(auto, gradients=True) == "chunked"
    assert auto.decision(SHAPE, gradients=False).name == ""
    assert [c.num_calls for c in candidates.values()] == [5, 4]
    assert _choose(auto, gradients=False) == "fused"
    training, inference = auto.reasons
    assert "top_k 2, with backward: chunked is fastest of chunked " in training
    assert "top_k 2, forward: fused is fastest of chunked " in inference


def test_candidate_that_cannot_run_or_has_no_memory_is_skipped() -> None:
    """Both are named in the reason; a candidate that cannot run is not called."""
    refused = _Slow(0.0, problem="top_k (2) is a pair")
    auto = _auto({"chunked": _Slow(0.02), "fused": refused, "all_gather": _Slow(0.0, fits=False)})
    assert _choose(auto, gradients=False) == "chunked"
    assert refused.num_calls == 0
    assert auto.decision(SHAPE, gradients=False).times_us.keys() == {"chunked"}
    assert auto.reasons[0].endswith(
        "; not fused: top_k (2) is a pair; not all_gather: rank 1 of 2 has no 12 bytes"
    )


@pytest.mark.parametrize("releases", [False, True])
def test_fused_buffers_are_freed_unless_a_kind_of_layer_uses_them(releases: bool) -> None:
    fused = _Slow(0.0, backward_s=0.12)
    auto = _auto({"chunked": _Slow(0.03), "fused": fused}, releases=releases)
    assert _choose(auto, gradients=True) == "chunked"
    assert fused.num_releases == releases
    assert _choose(auto, gradients=False) == "fused"
    _choose(auto, gradients=True, case=dataclasses.replace(CASE, top_k=3))
    assert fused.num_releases == releases


def test_choice_where_only_biases_require_gradients() -> None:
    auto = _auto({"chunked": _Slow(0.0)})
    case = LayerCase(num_tokens_W=(8,), bias=True)
    got = train(auto.forward, case, 0, frozen=("x", "weights", "up_LGD", "down_LDF"))
    assert set(got) == {"y", "up_bias_LG.grad", "down_bias_LD.grad"}


@pytest.mark.parametrize("no_access", ["", "on Mars"])
def test_candidates_across_hosts_replace_fused(no_access: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("halley.strategies.auto.peer_access", lambda group, device: no_access)
    across_hosts = {"together": _Slow(0.01), "split": _Slow(0.02)}
    auto = _auto({"chunked": _Slow(0.02), "fused": _Slow(0.03)}, across_hosts=across_hosts)
    assert _choose(auto, gradients=False) == ("together" if no_access else "chunked")
    measured = list(auto.decision(SHAPE, gradients=False).times_us)
    assert measured == ["chunked", *(across_hosts if no_access else ["fused"])]
    assert auto.reasons[0].endswith("; not fused: on Mars") == bool(no_access)


def test_tasks_are_those_of_the_chosen_strategy() -> None:
    candidates = {"chunked": _Slow(0.03), "sequential": _Slow(0.02), "fused": _Slow(0.04)}
    auto = _auto(candidates)
    (task,) = auto.tasks(SHAPE, Predictor(H200))
    assert task.duration_us == 0.02e6  # before the choice: the shortest prediction
    candidates["sequential"].delay_s = candidates["fused"].delay_s = 0.12
    assert _choose(auto, gradients=True) == "chunked"
    (task,) = auto.tasks(SHAPE, Predictor(H200))
    assert task.duration_us == 0.03e6


def _choose_over_ranks(rank: int, num_ranks: int) -> tuple[str, list[str]]:
    """One rank is slower by each candidate; one rank alone cannot run the fastest, "sequential"."""
    candidates = {"chunked": _Slow((0.0, 0.06)[rank]), "fused": _Slow((0.03, 0.0)[rank])}
    candidates["sequential"] = _Slow(0.0, problem=("", "up (at 0x8) is unaligned")[rank])
    auto = _auto(candidates, dist.group.WORLD)
    case = LayerCase(num_tokens_W=(5,) if rank else (0,), num_experts=4)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoStrategy, "_now", _pretended_now)
        _forward(auto, case)
    return auto.decision(SHAPE, gradients=False).name, auto.reasons  # 4 experts on each rank


def test_all_ranks_choose_by_the_time_of_the_slowest_rank(run_ranks: RunRanks) -> None:
    (first, reasons), second = run_ranks(_choose_over_ranks, 2)
    assert (first, reasons) == second
    assert first == "fused"


def _check_values(rank: int, num_ranks: int, no_access: str) -> None:
    recorder, group = Recorder(CPU), dist.group.WORLD
    buffers = Workspaces(group, CPU)
    strategy = build_strategy("auto", group, recorder=recorder, device=CPU, workspaces=buffers)
    assert isinstance(strategy, AutoStrategy)
    cases: Any = (((5, 0), {}), ((2, 3), {"seed": 1}), ((4, 3), {"bias": True}))
    for num_tokens_W, options in cases:
        case = LayerCase(num_tokens_W=num_tokens_W, num_experts=2, top_k=1, **options)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("halley.strategies.auto.peer_access", lambda group, device: no_access)
            y_TD = _forward(strategy, case, rank)
        got = train(strategy.forward, case, rank)
        check_values(got, case, rank)
        check_values(got | {"y": y_TD}, case, rank)
    assert len(strategy.reasons) == 4  # two layers, each with and without gradients
    assert (no_access or "expert_bias (true) must be false") in strategy.reasons[2]
    assert ("deduplicated split" in strategy.reasons[0]) == bool(no_access)
    assert recorder.enabled
    assert recorder.collect()  # spans of the calls after the measurement


@pytest.mark.parametrize("no_access", ["", "on Mars"])
def test_values_equal_the_reference(no_access: str, run_ranks: RunRanks) -> None:
    run_ranks(_check_values, 2, no_access)


def test_interpreted_kernels_are_not_measured_on_a_cpu() -> None:
    auto = build_strategy("auto", None, recorder=Recorder(CPU), device=CPU)
    assert isinstance(auto, AutoStrategy)
    _choose(auto, gradients=False)
    assert list(auto.decision(SHAPE, gradients=False).times_us) == ["sequential", "chunked"]
    assert auto.reasons[0].endswith("; not fused: its kernels are interpreted on a CPU")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hooks_of_activation_checkpointing_do_not_see_the_measurement(use_reentrant: bool) -> None:
    auto = build_strategy("auto", None, recorder=Recorder(CPU), device=CPU)
    forward: Any = partial(checkpoint, auto.forward, use_reentrant=use_reentrant)
    assert relative_error(train(forward, CASE, 0)["x.grad"], expected(CASE, 0)["x.grad"]) <= 1e-6


def test_measuring_does_not_add_to_main_grad() -> None:
    """A fused layer adds weight gradients to ``main_grad``, except while it is measured."""
    fused = build_strategy("fused", None, recorder=Recorder(CPU), device=CPU)
    auto = _auto({"chunked": _Slow(0.0), "fused": fused})
    case = LayerCase(num_tokens_W=(8,), num_experts=2)
    inputs, want = make_inputs(case, 0), expected(case, 0)
    for weight in inputs.experts.tensors().values():
        main_grad = torch.zeros_like(weight, requires_grad=False)
        vars(weight).update(main_grad=main_grad, grad_added_to_main_grad=False)
    auto.forward(*inputs).backward(make_tokens(case, 0)[2])
    assert "chunked is fastest of" in auto.reasons[0]
    for name, weight in inputs.experts.tensors().items():
        assert weight.grad is not None
        assert relative_error(weight.grad, want[f"{name}.grad"]) <= 1e-6
        assert not vars(weight)["grad_added_to_main_grad"]
        assert torch.equal(vars(weight)["main_grad"], torch.zeros_like(weight))


def test_compiling_before_the_choice_is_an_error() -> None:
    auto = _auto({"chunked": _Slow(0.0)})
    inputs = make_inputs(CASE, 0)
    torch.compiler.reset()
    compiled = torch.compile(auto.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="run the layer once before"):
        compiled(*inputs)
    fused = build_strategy("fused", None, recorder=Recorder(CPU), device=CPU)
    auto = _auto({"fused": fused})
    with torch.no_grad():
        want = auto.forward(*inputs)
        compiled = torch.compile(auto.forward, backend="eager", fullgraph=True)
        assert torch.equal(compiled(*inputs), want)
