"""Test when the backend changes nothing, warns, or raises an error on all ranks."""

import warnings
import weakref
from importlib.metadata import entry_points
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from benchmarks.graph_bench.gpt2_moe import Gate
from halley.compiler import Backend, register
from halley.compiler.backend import _make_callable
from halley.distributed.mesh import ParallelGroups
from tests.compiler.model_case import SEQ_LEN, PaddedModel, build_narrow, make_input, whole_graphs
from tests.moe.model_case import make_tokens


EAGER = {"inner": "eager", "memory_margin": 1.0, "timeout_s": 30.0}


def _step(call: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of one step."""
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


Outcome = tuple[bool, list[str], int]


def _compare(model: nn.Module, rank: int, backend: Any, **options: Any) -> Outcome:
    """Run a step without and with passes; return if both are equal, warnings, number of reports."""
    steps, messages = [], []
    for call, passes in ((Backend(), "none"), (backend, "wgrad")):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given: Any = {**EAGER, **options, "passes": passes}
            steps.append(
                _step(torch.compile(model, backend=call, options=given), model, make_input(rank))
            )
        messages = [str(each.message) for each in caught if "halley" in str(each.message)]
    torch._dynamo.reset()
    same = len(steps[0]) == len(steps[1]) and all(map(torch.equal, *steps))
    return same, messages, len(getattr(backend, "reports", ()))


def _take_steps(rank: int, num_ranks: int, gate: Gate, num_layers: int) -> tuple[bool, int]:
    """Return whether three steps of a GPT-2 with experts are equal, and the number of reports."""
    runs: list[list[torch.Tensor]] = []
    backend, groups = Backend(), ParallelGroups(ep=dist.group.WORLD)
    for passes in ("none", "wgrad"):
        model = build_narrow(gate, groups, num_layers=num_layers)
        given: Any = {**EAGER, "passes": passes, "unknown_size": 100}
        call = torch.compile(model, backend=backend, fullgraph=True, options=given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[torch.Tensor] = []
        with whole_graphs():
            for step in range(3):
                out = call(make_tokens(rank, step=step, batch_size=6, seq_len=SEQ_LEN))
                (out.logits_BSV.square().mean() + out.router_loss).backward()
                found += [out.logits_BSV, out.counts_ME]
                found += [p.grad for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        runs.append(found)
    return all(map(torch.equal, *runs)), len(backend.reports)


@pytest.mark.parametrize(("gate", "num_layers"), [("switch", 4), ("top2", 2)])
def test_steps_are_equal_bit_for_bit(run_ranks, gate: Gate, num_layers: int) -> None:
    """Capacity drops tokens, and sizes of all-to-alls depend on data.

    Every other layer has experts.
    """
    assert run_ranks(_take_steps, 2, gate, num_layers, timeout_s=200.0) == [(True, 2)] * 2


class _TwoGraphs(nn.Module):
    """Two models with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PaddedModel(num_layers=1)
        self.second = PaddedModel(num_layers=1)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.first(x_TD)
        torch._dynamo.graph_break()
        return self.second(x_TD)


def _run_with_break(rank: int, num_ranks: int, in_loop: bool) -> Outcome:
    return _compare(PaddedModel(breaks=True) if in_loop else _TwoGraphs(), rank, Backend())


# Dynamo skips a frame that breaks in a loop, and compiles the experts' forward once for all layers.
@pytest.mark.parametrize(("in_loop", "num_graphs"), [(False, 2), (True, 1)])
def test_graph_break_warns_once_and_each_graph_gets_passes(run_ranks, in_loop, num_graphs) -> None:
    for same, messages, num_reports in run_ranks(_run_with_break, 2, in_loop):
        assert same
        (message,) = messages
        assert message.startswith("halley compiles the model in several graphs: computation")
        assert num_reports == 2 * num_graphs  # forward and backward


def _run_by_name(rank: int, num_ranks: int) -> Outcome:
    assert register() is register()
    same, messages, _ = _compare(PaddedModel(num_layers=1), rank, "halley")
    return same, messages, len(register().reports)


def test_compile_finds_the_backend_by_name(run_ranks) -> None:
    assert run_ranks(_run_by_name, 1) == [(True, [], 2)]


def test_torch_finds_the_name_of_the_installed_package() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="halley")
    assert found.load() is register()


def _num_collectives() -> int:
    """Return how many collectives this rank has started in the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]


def _run_other_layers(rank: int, num_ranks: int) -> tuple[str, int]:
    torch._dynamo.reset()
    compiled = torch.compile(PaddedModel(num_layers=1 + rank), backend=Backend(), options=EAGER)
    before = _num_collectives()
    try:
        compiled(make_input(rank))
        message = ""
    except Exception as error:  # Dynamo wraps what a backend raises
        message = str(error)
    torch._dynamo.reset()
    return message, _num_collectives() - before


def test_ranks_with_other_collectives_all_stop_before_the_first(run_ranks) -> None:
    for message, num_started in run_ranks(_run_other_layers, 2):
        assert "ranks [1] have other collectives than rank 0" in message
        assert "is nothing on rank 0, _c10d_functional.all_to_all_single.default" in message
        assert num_started == 0


def _run_other_computation(rank: int, num_ranks: int) -> Outcome:
    model = PaddedModel(num_layers=1)
    if rank == 1:
        model.dense[0] = nn.Sequential(model.dense[0], nn.Tanh())
    return _compare(model, rank, Backend())


def test_ranks_with_other_computation_warn_and_change_nothing(run_ranks) -> None:
    for same, messages, num_reports in run_ranks(_run_other_computation, 2):
        assert same
        assert num_reports == 0
        assert len(messages) == 2  # forward and backward
        assert all("no plan fits all" in message for message in messages)


def test_graph_is_interpreted_only_under_a_profiler() -> None:
    x = torch.arange(-2.0, 3.0)
    call, args = _make_callable(make_fx(lambda x: torch.relu(x.neg()) + 1.0)(x)), [x]
    with mock.patch.object(fx.Interpreter, "run_node", side_effect=AssertionError):
        found = call(args)
    assert found.tolist() == [3.0, 2.0, 1.0, 1.0, 1.0]
    assert args == []
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        assert torch.equal(call([x]), found)
    names = [event.name for event in profiler.events() or [] if event.name.startswith("halley::")]
    assert names == ["halley::neg", "halley::relu", "halley::add"]


def test_argument_is_freed_after_its_last_use() -> None:
    x, alive = torch.ones(3), []
    reference = weakref.ref(x)

    def look(value: torch.Tensor) -> torch.Tensor:
        alive.append(reference() is not None)
        return value

    graph = fx.Graph()
    first = graph.call_function(look, (graph.placeholder("x"),))
    graph.output(graph.call_function(look, (graph.call_function(torch.neg, (first,)),)))
    args = [x]
    del x
    found = _make_callable(fx.GraphModule(nn.Module(), graph))(args)
    assert found.tolist() == [-1.0] * 3
    assert alive == [True, False]
