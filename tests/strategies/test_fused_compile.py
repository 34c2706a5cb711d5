"""The fused strategy inside ``torch.compile``, in whole graphs, gives what it gives without."""

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.core.types import Routing
from halley.moe.layer import MoELayer
from halley.moe.parallel import ParallelGroups, build_groups
from halley.ops.workspaces import Workspaces
from halley.strategies.fused import FusedStrategy
from tests.moe.model_case import MODELS, destroy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, expected, local_experts_of, make_tokens


CPU = torch.device("cpu")
HIDDEN = 16


def _build(group: dist.ProcessGroup | None) -> FusedStrategy:
    return FusedStrategy(Workspaces(group, CPU), recorder=Recorder(CPU))


@torch.no_grad()
def _check_layer(rank: int, num_ranks: int, backend: str) -> None:
    """The whole layer: router, routed experts, shared expert behind a gate."""
    groups = build_groups(0, device_type="cpu") if num_ranks > 1 else ParallelGroups()
    strategy = _build(groups.ep)
    layer = MoELayer(MODELS["shared experts"].moe, HIDDEN, strategy=strategy, groups=groups)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.3)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for num_tokens in (12 + rank, 7, 90 * rank, 5):  # another number compiles for any number
        x_TD = torch.randn(num_tokens, HIDDEN)
        got, want = compiled(x_TD), layer(x_TD)
        assert torch.equal(got.y, want.y)
        assert torch.equal(got.router_loss, want.router_loss)
        assert torch.equal(got.counts_E, want.counts_E)
    strategy.workspaces.close()
    if groups.mesh is not None:
        destroy(groups)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layer_equals_eager(run_ranks: RunRanks, num_ranks: int, backend: str) -> None:
    run_ranks(_check_layer, num_ranks, backend)


@torch.no_grad()
def test_traced_once_for_calls_alike() -> None:
    """Nothing that a call leaves behind makes the next one compile again."""
    strategy, graphs = _build(None), []

    def count(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    case = LayerCase(num_tokens_W=(9,))
    x_TD, routing, _ = make_tokens(case, 0)
    experts = local_experts_of(case, 0)
    torch.compiler.reset()
    run = torch.compile(strategy.forward, backend=count, fullgraph=True)
    outputs = [run(x_TD, routing, experts) for _ in range(3)]
    assert len(graphs) == 1
    assert all(torch.equal(y_TD, outputs[0]) for y_TD in outputs)


@torch.no_grad()
def _check_inductor(rank: int, num_ranks: int) -> None:
    """Two layers in a row, with nothing around them that Inductor would have to compile in C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what Inductor imports
        importlib.import_module("torch._inductor.compile_fx")
    strategy = _build(dist.group.WORLD if num_ranks > 1 else None)
    torch.compiler.reset()

    @torch.compile(backend="inductor", fullgraph=True, dynamic=True)
    def run(x_TD: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
        return strategy.forward(strategy.forward(x_TD, routing, experts), routing, experts)

    for seed, tokens in enumerate([(9, 6), (0, 7), (4, 150)]):
        case = LayerCase(num_tokens_W=tokens[:num_ranks], seed=seed)
        experts = local_experts_of(case, rank)
        x_TD, routing, _ = make_tokens(case, rank)
        y_TD = strategy.forward(x_TD, routing, experts)
        with torch.enable_grad():
            want = expected(case, rank)["y"]
        assert relative_error(y_TD, want) <= RELATIVE_TOLERANCE[torch.float32]
        got = run(x_TD, routing.topk_idx_TK, routing.topk_weights_TK)
        assert torch.equal(got, strategy.forward(y_TD, routing, experts))
    strategy.workspaces.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_inductor(run_ranks: RunRanks, num_ranks: int) -> None:
    run_ranks(_check_inductor, num_ranks)


def test_wanted_gradients_are_refused_in_a_graph() -> None:
    case = LayerCase(num_tokens_W=(8,))
    x_TD, routing, _ = make_tokens(case, 0)
    experts, strategy = local_experts_of(case, 0), _build(None)
    torch.compiler.reset()
    compiled = torch.compile(strategy.forward, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="strategy fused has no backward yet"):
        compiled(x_TD, routing, experts)
