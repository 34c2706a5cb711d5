"""Run Halley's compiler passes in Inductor, and keep GEMMs in the overlap windows of the plan."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

from halley.compiler.gradient_ready import GradientHooks
from halley.compiler.graph_analysis import GraphAnalysis, is_gemm
from halley.compiler.graph_collectives import operator_name
from halley.compiler.graph_memory import StepPartitioner
from halley.compiler.options import Options
from halley.compiler.pipeline import is_backward, reserve_sms, run_passes
from halley.compiler.wgrad.schedule import OrderReport
from halley.ops.library import DECOMPOSITIONS


def decompose(graph: fx.Graph) -> None:
    """Replace GPU operators of ``DECOMPOSITIONS`` by ATen operators; GEMMs only if traceable.

    Inductor can then fuse the ATen operators with others, and calls kernels instead of operators
    written in Python. Operators on a CPU stay: the expert GEMM on a CPU reads the group sizes.
    """
    for node in list(graph.nodes):
        run = DECOMPOSITIONS.get(operator_name(node))
        if run is not None and _is_on_gpu(node) and (_is_traceable_gemm(node) or not is_gemm(node)):
            _inline(node, run)
    graph.lint()


def _is_on_gpu(node: fx.Node) -> bool:
    values = (_value(source) for source in node.all_input_nodes)
    return all(value.device.type != "cpu" for value in values if isinstance(value, torch.Tensor))


def _is_traceable_gemm(gemm: fx.Node) -> bool:
    # torch 2.11 traces grouped GEMMs of bfloat16 only, and Inductor's C++ wrapper cannot call them.
    is_bf16 = getattr(_value(gemm), "dtype", None) == torch.bfloat16
    return is_bf16 and not config.cpp_wrapper


def _inline(node: fx.Node, run: Any) -> None:
    """Replace a graph node by the nodes traced from ``run``, a function with the same result."""
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
    copies = dict(zip(inputs, sources, strict=True))  # graph_copy adds all other nodes
    with node.graph.inserting_before(node):
        made = node.graph.graph_copy(traced.graph, cast(Any, copies))
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
    else:
        results = cast(tuple[fx.Node, ...], made)
        for user in list(node.users):  # the users of a tuple are getitem nodes
            user.replace_all_uses_with(results[cast(int, user.args[1])])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
    # Erase unused results: Inductor's overlap scheduler in torch 2.11 fails on nodes without users.
    for each in reversed(copies):
        if each not in inputs and not copies[each].users:
            copies[each].graph.erase_node(copies[each])


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


# With its C++ wrapper, Inductor autotunes kernels on example tensors, in which a data-dependent
# size is ``unknown_size`` divided by this number. So a sum of such sizes (rows from all ranks) does
# not exceed the size of the tensor that is split into them.
_ROWS_SHARE = 64


def compile_by_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    hooks: GradientHooks,
    add_report: Callable[[OrderReport], None],
) -> Callable[..., Any]:
    """Compile a Dynamo graph by Inductor, which runs Halley's passes before it lowers the graph.

    ``add_report`` is called with the report of each graph whose order is planned. Raises a
    ``RuntimeError`` if Inductor's configuration already has a custom pass where Halley sets one.
    """
    for name in ("_post_fusion_custom_pass", "post_grad_custom_post_pass"):
        if getattr(config, name) is not None:
            raise RuntimeError(f"torch._inductor.config.{name} must be None: halley sets it")
    split = config.custom_partitioner_fn or min_cut_rematerialization_partition
    partitioner = StepPartitioner(
        split=split, hooks=hooks, unknown_size=options.unknown_size, fuses=True
    )

    def change(graph: fx.Graph) -> None:
        backward = is_backward(graph)
        report = run_passes(graph, options, step_peak=partitioner.num_bytes)
        decompose(graph)  # number 4 in the list of pipeline.py
        if report is not None:  # numbers 5 and 6 in the list of pipeline.py
            reserve_sms(graph, report.sm_margins, in_all=backward and hooks.has_any)
            add_control_dependencies(graph)
            add_report(report)
        if backward:
            hooks.insert(graph)  # number 7 in the list of pipeline.py

    # ``change`` is a plain function, so Inductor caches no graph that it modifies. A rank with a
    # cached graph would not run the passes, and the other ranks would wait for it.
    patches: dict[str, Any] = {
        "post_grad_custom_post_pass": change,
        "custom_partitioner_fn": partitioner,
    }
    if options.passes != "none":
        patches["_post_fusion_custom_pass"] = _sort_kernels  # number 8 in the list of pipeline.py
    if config.cpp_wrapper:
        patches["unbacked_symint_fallback"] = max(1, options.unknown_size // _ROWS_SHARE)
    return compile_fx(  # pyright: ignore[reportReturnType]
        gm, example_inputs, inner_compile=_compile_below_autograd, config_patches=patches
    )


def _sort_kernels(kernels: list[Any]) -> list[Any]:
    """Return the kernels of Inductor's scheduler in the order of the last node that each computes.

    Inductor orders a fused kernel by its first node. If it fuses an early sum with the loss, all
    nodes that the loss needs run before kernels that belong in the window of an all-to-all.
    """
    by_last_node = sorted(kernels, key=lambda kernel: kernel.max_order)
    return kernels[0].scheduler.topological_sort_schedule(by_last_node) if kernels else kernels


def _compile_below_autograd(*args: Any, **kwargs: Any) -> OutputCode:
    """Compile a graph by Inductor so that its operators skip the autograd dispatch key.

    For collectives and Halley's operators, the key runs Python code that takes as long as a kernel.
    """
    compiled = compile_fx_inner(*args, **kwargs)
    if isinstance(compiled, CompiledFxGraph) and (run := compiled.current_callable):

        def call(inputs: Sequence[Any]) -> Any:
            with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
                return run(inputs)

        compiled.current_callable = call
    return compiled


def add_control_dependencies(graph: fx.Graph) -> None:
    """Make Inductor's scheduler keep GEMMs in their overlap windows, by control dependencies.

    Each GEMM in a window gets the start of the all-to-all as a dependency, and the wait gets the
    GEMM: operators of torch wrap these nodes and take their dependencies as unused operands. The
    scheduler may move all other nodes. The graph is in its final order, and changed in place.
    """
    analysis = GraphAnalysis(graph)
    needs: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for start in analysis.find_collectives("all_to_all"):
        window = analysis.find_window(start)
        for index in window:
            node = analysis.nodes[index]
            if is_gemm(node) and not analysis.ancestors[index] >> start & 1:
                needs.setdefault(node, OrderedSet()).add(analysis.nodes[start])
                needs.setdefault(analysis.nodes[window.stop], OrderedSet()).add(node)
    preserve_node_ordering(graph, needs)
    graph.lint()
