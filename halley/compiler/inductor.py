"""The passes as Inductor's last pass over a graph, with their order pinned for its scheduler."""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

from halley.compiler.gradient_ready import EarlyGradients
from halley.compiler.graph_analysis import GraphAnalysis, is_gemm
from halley.compiler.graph_collectives import operator_name
from halley.compiler.graph_memory import Halves, StepPeak
from halley.compiler.options import Options
from halley.compiler.pipeline import find_batch_inputs, is_backward, run_passes
from halley.compiler.reserved_sms import leave_sms_beside
from halley.compiler.sizes import Sizes
from halley.compiler.wgrad.schedule import OrderReport
from halley.compiler.writes import write_parts
from halley.ops.library import MADE_OF_TORCH


def keep_order(nodes: list[Any]) -> list[Any]:
    """Return kernels each at the place of the last node that it computes, after what it needs.

    Inductor puts it at the place of the first. It joins what is far apart, such as counts that a
    loss wants with the end of that loss: then all that leads to the last node came ahead of all
    that nothing waits for, and parts were written to their wholes behind forward and not beside its
    all-to-alls. A buffer comes ahead of the kernels that write to it, which torch 2.11 does not
    know of kernels that it joined.

    Args:
        nodes: of Inductor's scheduler, as its ``_post_fusion_custom_pass`` gets them.

    Contract: the same kernels, each after those whose results it reads or writes over.
    """
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    needs = {node: [makers[name] for name in _needs(node) if name in makers] for node in nodes}
    order: dict[Any, None] = {}
    for node in sorted(nodes, key=_place):
        todo = [node]
        while todo:
            missing = [need for need in needs[todo[-1]] if need not in order]
            if missing:
                todo.append(min(missing, key=_place))
            else:
                order[todo.pop()] = None
    return list(order)


def _needs(node: Any) -> set[str]:
    """Return the names of buffers that a kernel reads, or writes to without having made them."""
    own = set(node.get_buffer_names())
    changed = {node.scheduler.mutation_real_name.get(name) for name in own}
    return ({need.name for need in node.unmet_dependencies} | changed) - own


def _place(node: Any) -> int:
    return node.max_order


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


# Where Inductor writes the calls of kernels in C++, it tries kernels out on examples. Sizes that
# depend on data are then such a share of what they may be: sums of several, as of the rows from
# each rank, must not pass what they are taken of.
_ROWS_SHARE = 64


def compile_by_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    inputs: Sequence[int],
    early: EarlyGradients,
    keep: Callable[[OrderReport], None],
) -> Callable[..., Any]:
    """Compile a graph by Inductor with the passes in it.

    Args:
        gm: one of Dynamo's graphs.
        example_inputs: of it.
        options: of the passes.
        inputs: positions of the example inputs that may have the batch.
        early: gives parameters their gradients.
        keep: called with the report of each graph that they change.

    Raises:
        RuntimeError: Inductor has another pass in the same place already.
    """
    for name in ("post_grad_custom_post_pass", "_post_fusion_custom_pass"):
        if getattr(config, name) is not None:
            raise RuntimeError(f"torch._inductor.config.{name} is set, and halley wants that place")
    divide = config.custom_partitioner_fn or min_cut_rematerialization_partition
    step_peak = StepPeak(options.unknown_size, early.dividing(divide), fuses=True)
    patches: dict[str, Any] = {
        "post_grad_custom_post_pass": InductorPass(
            options, inputs=inputs, step_peak=step_peak, early=early, keep=keep
        ),
        "custom_partitioner_fn": _Partitioner(step_peak),
        "_post_fusion_custom_pass": keep_order,
    }
    if config.cpp_wrapper:
        patches["unbacked_symint_fallback"] = max(1, options.unknown_size // _ROWS_SHARE)
    return compile_fx(  # pyright: ignore[reportReturnType]
        gm, example_inputs, inner_compile=_compile_below_autograd, config_patches=patches
    )


def _compile_below_autograd(*args: Any, **kwargs: Any) -> OutputCode:
    """Compile a graph that runs past autograd, which has nothing to record there.

    Collectives and Halley's operators are called by way of it in Python, which takes the host as
    long as a kernel.
    """
    reorders = config.reorder_for_peak_memory
    try:
        compiled = compile_fx_inner(*args, **kwargs)
    finally:
        config.reorder_for_peak_memory = reorders  # which the pass may have turned off
    if isinstance(compiled, CompiledFxGraph) and (run := compiled.current_callable):

        def call(inputs: Sequence[Any]) -> Any:
            with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
                return run(inputs)

        compiled.current_callable = call
    return compiled


@final
class InductorPass(CustomGraphPass):
    """Runs the passes over a graph of Inductor's and pins what they decided.

    Args:
        options: of the passes.
        inputs: positions of the inputs of forward that may have the batch.
        step_peak: called with the joint graph before.
        early: gives parameters their gradients.
        keep: called with the report of each graph that they change.
    """

    def __init__(
        self,
        options: Options,
        *,
        inputs: Sequence[int],
        step_peak: StepPeak,
        early: EarlyGradients,
        keep: Callable[[OrderReport], None],
    ) -> None:
        self._options = options
        self._inputs = inputs
        self._step_peak = step_peak
        self._early = early
        self._keep = keep

    def __call__(self, graph: fx.Graph) -> None:
        """Change one graph, forward or backward."""
        names = find_batch_inputs(graph, self._inputs)
        step_peak = self._step_peak.num_bytes
        report = run_passes(graph, self._options, batch_inputs=names, step_peak=step_peak)
        expand(graph)
        if report is not None:
            control_dependencies = find_control_dependencies(graph)
            write_parts(graph, Sizes(self._options.unknown_size))
            always = is_backward(graph) and self._early.hands_over
            leave_sms_beside(graph, report.sm_margins, always=always)
            pin_order(graph, control_dependencies)
            if report.ranges:  # an order that hides nothing takes less memory
                config.reorder_for_peak_memory = False
            self._keep(report)
        if is_backward(graph):
            self._early.take(graph)

    def uuid(self) -> object | None:
        """Return None, so that Inductor keeps no graph of ours in its cache.

        A rank that found one there would not come to the council, where the others wait for it.
        """
        return None


@final
class ExpandPass(CustomGraphPass):
    """Halley's operators as torch's own, for Inductor without the passes."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change one graph."""
        expand(graph)

    def uuid(self) -> object | None:
        """Return None, as the passes do."""
        return None


@final
class _Partitioner(CustomPartitionerFn):
    """Inductor's form of a function that divides a joint graph."""

    def __init__(self, divide: StepPeak) -> None:
        self._divide = divide

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        """Return forward and backward."""
        return self._divide(gm, joint_inputs, **kwargs)

    def uuid(self) -> object | None:
        """Return None, as the pass does."""
        return None


ControlDependencies = dict[fx.Node, OrderedSet[fx.Node]]  # of nodes, those that must run before


def find_control_dependencies(graph: fx.Graph) -> ControlDependencies:
    """Return what ties the products behind the start of an all-to-all to it, and its wait to them.

    Args:
        graph: whose nodes write to no arguments, in the order in which it is to run.
    """
    analysis = GraphAnalysis(graph)
    control_dependencies: ControlDependencies = {}
    for start in analysis.find_collectives("all_to_all"):
        waits = analysis.find_waits(start)
        if not waits:
            continue
        wait = analysis.nodes[min(waits)]
        for index in range(start + 1, min(waits)):
            node = analysis.nodes[index]
            if is_gemm(node) and not analysis.ancestors[index] >> start & 1:
                control_dependencies.setdefault(node, OrderedSet()).add(analysis.nodes[start])
                control_dependencies.setdefault(wait, OrderedSet()).add(node)
    return control_dependencies


def pin_order(graph: fx.Graph, control_dependencies: ControlDependencies) -> None:
    """Tie nodes to others by operands that are not read: else Inductor may move what it likes.

    Args:
        graph: changed.
        control_dependencies: as of ``find_control_dependencies``; those of nodes that are gone
            do not count.
    """
    here = set(graph.nodes)
    kept = {
        node: OrderedSet(each for each in control_dependencies[node] if each in here)
        for node in control_dependencies
    }
    preserve_node_ordering(
        graph, {node: kept[node] for node in kept if node in here and kept[node]}
    )
    graph.lint()
