"""Test decomposed operators: equal values, and no operator of Halley is left."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import halley.ops.expert_rows
import halley.ops.traceable_routing  # noqa: F401
from halley.compiler import inductor
from halley.compiler.graph_analysis import is_gemm
from halley.compiler.graph_collectives import operator_name
from halley.compiler.inductor import decompose
from halley.distributed.mesh import ParallelGroups
from halley.ops.library import DECOMPOSITIONS
from tests.compiler.model_case import SEQ_LEN, build_narrow, whole_graphs
from tests.moe.model_case import make_tokens


ops = torch.ops.halley
T, K, D, E, F = 12, 2, 16, 4, 32
GEMMS = {"halley::expert_gemm", "halley::expert_weight_gemm"}


def _names(graph: fx.Graph) -> set[str]:
    return {name for node in graph.nodes if (name := operator_name(node)) in DECOMPOSITIONS}


def _cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    generator = torch.Generator().manual_seed(0)
    idx_TK = torch.randint(-1, E, (T, K), generator=generator)
    slots_N, counts_E = ops.sort_slots(idx_TK, E)
    num_rows = int(counts_E.sum())
    x_TD, weights_TK = torch.randn(T, D, generator=generator), torch.rand(T, K, generator=generator)
    rows_ND = torch.randn(num_rows, D, generator=generator)
    counts_WL = torch.tensor([[3, 0, 2], [1, 4, 0]])
    order_R, inverse_R, *_ = ops.group_rows(counts_WL, 10)
    return {
        "read_counts": (ops.read_counts.default, (counts_WL, counts_WL.flip(0))),
        "gather_rows": (lambda x, s: ops.gather_rows(x, s, num_rows, K), (x_TD, slots_N)),
        "gather_rows_backward": (
            lambda g, s: ops.gather_rows_backward(g, s, K),
            (rows_ND, slots_N),
        ),
        "combine_rows": (ops.combine_rows.default, (rows_ND, slots_N, weights_TK)),
        "combine_rows_backward": (
            ops.combine_rows_backward.default,
            (x_TD, rows_ND, slots_N, weights_TK),
        ),
        "permute_rows": (
            ops.permute_rows.default,
            (torch.randn(10, D, generator=generator), order_R, inverse_R),
        ),
    }


def test_all_operators_have_a_case() -> None:
    assert {f"halley::{name}" for name in _cases()} | GEMMS == set(DECOMPOSITIONS)


@pytest.mark.parametrize("name", _cases())
def test_decomposed_operator_returns_the_same(monkeypatch, name: str) -> None:
    monkeypatch.setattr(inductor, "_is_on_gpu", lambda node: True)
    function, args = _cases()[name]
    traced = make_fx(function, tracing_mode="fake")(*args)
    assert _names(traced.graph) == {f"halley::{name}"}
    decompose(traced.graph)
    assert not _names(traced.graph)
    found, wanted = fx.Interpreter(traced).run(*args), function(*args)
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert one.is_contiguous() == other.is_contiguous()
        assert torch.equal(one, other)


def test_nodes_of_an_unused_result_are_erased(monkeypatch) -> None:
    monkeypatch.setattr(inductor, "_is_on_gpu", lambda node: True)
    function, args = _cases()["combine_rows_backward"]
    traced = make_fx(lambda *args: function(*args)[1], tracing_mode="fake")(*args)
    decompose(traced.graph)
    assert all(node.users for node in traced.graph.nodes if node.op == "call_function")
    assert torch.equal(traced(*args), function(*args)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expert_gemms_are_grouped_gemms_on_a_gpu(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        rows = torch.empty(T, D, dtype=dtype, device="cuda")
        weights = torch.empty(E, D, F, dtype=dtype, device="cuda")
        ends = torch.empty(E, dtype=torch.int32, device="cuda")

        def function(rows, weights, ends):
            out = ops.expert_gemm(rows, weights, ends)
            return out, ops.expert_weight_gemm(rows, out, ends)

        traced = make_fx(function)(rows, weights, ends)
        shapes = [node.meta["val"].shape for node in traced.graph.nodes if is_gemm(node)]
        decompose(traced.graph)
    gemms = [node for node in traced.graph.nodes if is_gemm(node)]
    names = [operator_name(node) for node in gemms]
    if dtype == torch.bfloat16:
        assert names == ["aten::_grouped_mm"] * 2
    else:  # torch 2.11 cannot trace other dtypes
        assert names == ["halley::expert_gemm", "halley::expert_weight_gemm"]
    assert [node.meta["val"].shape for node in gemms] == shapes == [(T, F), (E, D, F)]


def test_forward_with_sizes_that_depend_on_data_is_decomposed(run_ranks) -> None:
    """All operators of a forward graph, except for expert GEMMs, which need a GPU."""
    for same, before, after in run_ranks(_decompose_on_cpu, 1):
        assert before - after == {
            f"halley::{name}"
            for name in ("read_counts", "gather_rows", "permute_rows", "combine_rows")
        }
        assert after == {"halley::expert_gemm"}
        assert same


def _decompose_on_cpu(rank: int, num_ranks: int) -> tuple[bool, set[str], set[str]]:
    """Return whether a model gives the same, and Halley's operators before and after."""
    model = build_narrow("switch", ParallelGroups(ep=dist.group.WORLD), num_layers=2)
    tokens_BS, found = make_tokens(0, batch_size=12, seq_len=SEQ_LEN), []

    def compile_forward(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        before = _names(gm.graph)
        with mock.patch.object(inductor, "_is_on_gpu", lambda n: operator_name(n) not in GEMMS):
            decompose(gm.graph)
        found.append((before, _names(gm.graph)))
        return make_boxed_func(fx.Interpreter(gm).run)

    with whole_graphs():
        backend = aot_autograd(fw_compiler=compile_forward)
        out = torch.compile(model, backend=backend, fullgraph=True)(tokens_BS)
    return torch.equal(out.logits_BSV, model(tokens_BS).logits_BSV), *found[0]
