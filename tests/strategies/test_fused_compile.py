"""The fused strategy under ``torch.compile`` has the same results as eager."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.types import Routing, Save
from halley.distributed.mesh import build_groups
from halley.fused import passes
from halley.fused.buffers import Workspace, Workspaces
from halley.integrations.contract import stack_swiglu
from halley.moe.layer import MoELayer
from tests.moe.model_case import MODELS, destroy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    Inputs,
    LayerCase,
    assert_same,
    build,
    import_inductor,
    make_inputs,
    make_tokens,
    train,
)


HIDDEN = 16
_BFLOAT16: dict[str, Any] = {"num_experts": 4, "dtype": torch.bfloat16}
SOURCES = (
    LayerCase(num_tokens_W=(9, 6), skew="empty-expert", **_BFLOAT16),  # its gate is frozen
    LayerCase(num_tokens_W=(0, 70), **_BFLOAT16),
    LayerCase(num_tokens_W=(33, 5), skew="one-hot", top_k=1, **_BFLOAT16),
)


@torch.no_grad()
def _check_layer(rank: int, num_ranks: int) -> None:
    """The whole layer: router, routed experts, shared expert behind a gate."""
    groups = build_groups(0, device_type="cpu")
    strategy = build(Workspaces(groups.ep, CPU))
    layer = MoELayer(MODELS["shared experts"].moe, HIDDEN, strategy=strategy, groups=groups)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.3)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for num_tokens in (12 + rank, 90 * rank, 5):  # the second number compiles for any number
        x_TD = torch.randn(num_tokens, HIDDEN)
        got, want = compiled(x_TD), layer(x_TD)
        assert torch.equal(got.y, want.y)
        assert torch.equal(got.router_loss, want.router_loss)
        assert torch.equal(got.counts_E, want.counts_E)
    strategy.workspaces.close()
    destroy(groups)


def test_compiled_layer_equals_eager(run_ranks: RunRanks) -> None:
    run_ranks(_check_layer, 2)


@torch.no_grad()
def test_equal_calls_are_traced_once() -> None:
    """A second call of the same sizes does not compile again."""
    strategy, graphs = build(Workspaces(None, CPU)), []

    def count(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    inputs = make_inputs(LayerCase(num_tokens_W=(9,)), 0)
    torch.compiler.reset()
    run = torch.compile(strategy.forward, backend=count, fullgraph=True)
    outputs = [run(*inputs) for _ in range(3)]
    assert len(graphs) == 1
    assert all(torch.equal(y_TD, outputs[0]) for y_TD in outputs)


def _compare_gradients(rank: int, num_ranks: int, save: Save) -> None:
    """Compare a compiled layer with the eager one, bit for bit, for several numbers of tokens."""
    layer = build(Workspaces(dist.group.WORLD if num_ranks > 1 else None, CPU), save=save)
    torch.compiler.reset()
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for seed, tokens in enumerate([(9,), (0,)] if num_ranks == 1 else [(9, 6), (0, 70)]):
        case = LayerCase(num_tokens_W=tokens, num_experts=2, seed=seed)
        want, got = (train(forward, case, rank) for forward in (layer.forward, compiled))
        assert len(got) == len(want) == 5
        assert_same(got, want, case)
    layer.workspaces.close()


def compare_sources(rank: int, num_ranks: int, device: torch.device) -> None:
    """Compare gradients of sources with those of their copies, which are sums rounded once more."""
    layer = build(Workspaces(dist.group.WORLD, device), save="inputs" if rank else "all")

    def run(x_TD: torch.Tensor, routing: Routing, *sources: torch.Tensor) -> torch.Tensor:
        return layer.forward_in_graph(x_TD, routing, stack_swiglu(*sources, dtype=x_TD.dtype))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for case in SOURCES:
        want = train(layer.forward, case, rank, device=device)
        x_TD, routing, experts = make_inputs(case, rank, device=device)
        gate, up = experts.up_LGD.detach().chunk(2, dim=1)
        down = experts.down_LDF.detach()
        sources = [gate.float(), up.clone(), down.float()]
        for source in sources:
            source.requires_grad_(source is not sources[0] or case is not SOURCES[0])
        torch.compiler.reset()
        y_TD = compiled(x_TD, routing, *sources)
        y_TD.backward(make_tokens(case, rank)[2].to(device))
        wants = [*want["up_LGD.grad"].chunk(2, dim=1), want["down_LDF.grad"]]
        assert torch.equal(y_TD, want["y"])
        for source, wanted in zip(sources, wants, strict=True):
            grad = source.grad
            if not source.requires_grad:
                assert grad is None
                continue
            assert grad is not None
            assert grad.is_contiguous()
            assert torch.equal(grad.to(wanted.dtype), wanted), case
            if source.dtype == torch.float32 and wanted.any():
                assert not torch.equal(grad, wanted.float())  # sums keep their float32 digits
    layer.workspaces.close()


def test_weights_that_are_copied_get_gradients_of_their_dtype(run_ranks: RunRanks) -> None:
    run_ranks(compare_sources, 2, CPU)


@pytest.mark.parametrize(("num_ranks", "save"), [(1, "inputs"), (2, "recompute")])
def test_compiled_gradients_equal_eager(run_ranks: RunRanks, num_ranks: int, save: Save) -> None:
    run_ranks(_compare_gradients, num_ranks, save)


def _compare_inductor(rank: int, num_ranks: int) -> None:
    """Compare two layers in a row, without other operators that Inductor would compile in C++."""
    import_inductor()
    layer = build(Workspaces(None, CPU), save="recompute")

    def run(first: Inputs, second: Inputs) -> torch.Tensor:
        return layer.forward(layer.forward(*first), *second[1:])

    torch.compiler.reset()
    compiled = torch.compile(run, backend="inductor", fullgraph=True, dynamic=True)
    for seed, tokens in enumerate([(9,), (0,)]):  # 0 tokens have a separate graph
        cases = [LayerCase(num_tokens_W=tokens, num_experts=2, seed=seed + i) for i in (0, 9)]
        results: list[tuple[torch.Tensor, ...]] = []
        for forward in (run, compiled):
            first, second = (make_inputs(case, rank) for case in cases)
            y_TD = forward(first, second)
            leaves = [*first.leaves().values(), *list(second.leaves().values())[1:]]
            grads = torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))
            results.append((y_TD, *grads))
        for want, got in zip(*results, strict=True):
            assert torch.equal(got, want), cases
    layer.workspaces.close()


def test_values_and_gradients_with_inductor_equal_eager(run_ranks: RunRanks) -> None:
    run_ranks(_compare_inductor, 1)


def _order_of_passes(rank: int, num_ranks: int, stacked: bool, gradients: bool) -> list[list[str]]:
    """Return the order in which two layers begin and combine their passes, eager and compiled.

    Both must have bitwise equal outputs.
    """
    import_inductor()
    layer = build(Workspaces(None, CPU), save="recompute")
    case = LayerCase(num_tokens_W=(9,), num_experts=2)

    def run(first: Inputs, second: Inputs) -> tuple[torch.Tensor, ...]:
        if not stacked:
            return layer.forward(*first), layer.forward(*second)
        x_TD = first[0] + layer.forward(*first)
        return (x_TD + layer.forward(x_TD, *second[1:]),)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="inductor", fullgraph=True)
    order: list[str] = []
    begin_pass, gemm_combine = Workspace.begin_pass, passes.gemm_combine

    def note_begin(self: Workspace) -> None:
        order.append("begin")
        begin_pass(self)

    def note_combine(*args: Any, **options: Any) -> None:
        order.append("combine")
        gemm_combine(*args, **options)

    orders: list[list[str]] = []
    results: list[tuple[torch.Tensor, ...]] = []
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(Workspace, "begin_pass", note_begin)
        patch.setattr(passes, "gemm_combine", note_combine)
        for forward in (run, compiled):
            outputs = forward(make_inputs(case, 0), make_inputs(case, 0))
            results.append(outputs)
            if gradients:
                torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            orders.append(order.copy())
            order.clear()
    assert all(map(torch.equal, *results))
    return orders


@pytest.mark.parametrize(("stacked", "gradients"), [(False, False), (False, True), (True, True)])
def test_inductor_keeps_the_order_of_passes(
    run_ranks: RunRanks, stacked: bool, gradients: bool
) -> None:
    """Passes run in the order of the calls, even if no data dependency requires it."""
    ((eager, compiled),) = run_ranks(_order_of_passes, 1, stacked, gradients)
    assert eager == ["begin", "combine"] * (4 if gradients else 2)
    assert compiled == eager
