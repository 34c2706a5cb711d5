"""Halley's operators as what they are made of, for Inductor, once no pass wants one node each."""

from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from halley.compiler.graph_analysis import is_gemm
from halley.compiler.graph_collectives import operator_name
from halley.ops.library import MADE_OF_TORCH


def expand(graph: fx.Graph) -> None:
    """Put torch's operators in the place of Halley's that are made of them, on a GPU.

    Inductor then fuses them with what stands around, and launches kernels instead of operators that
    are written in Python. On a CPU they stay: experts' products read there where rows end. On a GPU
    products of other dtypes than bfloat16 stay, which torch 2.11 runs, but cannot trace, and all of
    experts where their calls are written in C++, as torch 2.11 has no such call of them.

    Args:
        graph: of operators, changed. Its values have no data.
    """
    for node in list(graph.nodes):
        run = MADE_OF_TORCH.get(operator_name(node) or "")
        if run is not None and _is_on_gpu(node) and (_is_traced(node) or not is_gemm(node)):
            _replace(node, run)
    graph.lint()


def _is_on_gpu(node: fx.Node) -> bool:
    values = (_value(source) for source in node.all_input_nodes)
    return all(value.device.type != "cpu" for value in values if isinstance(value, torch.Tensor))


def _is_traced(product: fx.Node) -> bool:
    is_bf16 = getattr(_value(product), "dtype", None) == torch.bfloat16
    return is_bf16 and not config.cpp_wrapper


def _replace(node: fx.Node, run: Any) -> None:
    """Trace what an operator is made of on its operands, and let that make its result."""
    assert not node.kwargs, f"{node.name} has arguments by name"
    sources = list(node.all_input_nodes)

    def call(*values: Any) -> Any:
        given = dict(zip(sources, values, strict=True))
        return run(*cast(tuple[Any, ...], fx.map_arg(node.args, given.__getitem__)))

    values = [_value(source) for source in sources]
    mode = detect_fake_mode(values)
    assert mode is not None, f"{node.name} has operands with data"
    with mode, torch.no_grad():
        traced = make_fx(torch.func.functionalize(call), select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    inputs = traced.graph.find_nodes(op="placeholder")
    copies = dict(zip(inputs, sources, strict=True))  # and, once copied, all other nodes
    with node.graph.inserting_before(node):
        made = node.graph.graph_copy(traced.graph, cast(Any, copies))
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
    else:
        results = cast(tuple[fx.Node, ...], made)
        for user in list(node.users):  # each takes one of the results
            user.replace_all_uses_with(results[cast(int, user.args[1])])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
    # What makes results that nobody reads goes: Inductor's scheduler of overlap in torch 2.11 fails
    # on nodes without users.
    for each in reversed(copies):
        if each not in inputs and not copies[each].users:
            copies[each].graph.erase_node(copies[each])


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
