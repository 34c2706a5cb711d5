"""Capture the forward and the backward graph of a loss function, and the arguments of its calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal, final

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from halley.compiler.graph_collectives import find_operator, remove_repeated_waits
from halley.lanes.graph_cache import graph_key, graph_path, read_graphs, write_graphs
from halley.ops.lane_sums import trace_lane


Inner = Literal["eager", "inductor"]
# Settings of Inductor that keep the random operators of PyTorch, which ``is_random`` finds.
KEEP_RANDOM: dict[str, Any] = {"fallback_random": True}
TANGENT = "tangents"  # prefix of the name that aot_autograd gives to the gradient of the loss
# Modules of torch whose forward Dynamo cannot trace: the path of their code, and what to use.
_UNTRACEABLE = {
    "torch/nn/parallel/distributed.py": (
        "lanes cannot run DistributedDataParallel: use fully_shard with a mesh of shape "
        "(number of ranks, 1), which all-reduces the gradients of whole parameters"
    ),
    "torch/distributed/fsdp/": (
        "lanes run modules of fully_shard only if loss_function is a module that contains them"
    ),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class StepGraphs:
    """The forward and backward graph of a loss function, traced for one set of shapes.

    The inputs of forward are parameters and a microbatch. Its results are the loss and the values
    saved for backward, which are inputs of backward with the same names.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule  # returns one gradient, or None, for each input of ``forward``

    @property
    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.forward, self.backward


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The graphs of a loss function, and the values of the forward graph's inputs in one call."""

    graphs: StepGraphs
    values: tuple[Any, ...]


@final
class Capture:
    """Traces a loss function; returns its graphs and the arguments of a call, but computes no loss.

    Dynamo checks its guards at each call. So a new shape or a changed flag gives new graphs. With
    ``num_lanes``, the calls are for lanes of a divided batch (``ops/lane_sums.py``).
    """

    def __init__(
        self, loss_function: Callable[..., Any], *, inner: Inner, num_lanes: int = 1
    ) -> None:
        self._inner: Inner = inner
        self._num_lanes = num_lanes
        self._arguments: list[Arguments] = []
        if getattr(loss_function, "_forward_hooks", None):
            # torch.compile leaves the hooks of the module itself out of the graph.
            module: Any = loss_function
            loss_function = lambda *microbatch: module(*microbatch)  # noqa: E731
        self._call: Callable[..., Any] = torch.compile(
            loss_function, backend=self._compile, fullgraph=True, dynamic=False
        )

    def collect(self, *microbatch: torch.Tensor) -> Arguments:
        """Return the graphs and input values for a microbatch; trace if no earlier trace is valid.

        Raises:
            torch._dynamo.exc.Unsupported: the function has a graph break.
            ValueError: the function returns no scalar loss, writes to its inputs or buffers, has
                parameters that are tensor subclasses, or calls DistributedDataParallel.
        """
        # The splits of all-to-alls are numbers that the graph reads from tensors. Without
        # ``capture_scalar_outputs``, Dynamo breaks the graph at each read.
        try:
            with (
                torch._dynamo.config.patch(capture_scalar_outputs=True),
                torch.enable_grad(),
                trace_lane(self._num_lanes),
            ):
                self._call(*microbatch)
        except BackendCompilerFailed as error:
            raise error.inner_exception from None
        except Unsupported as error:
            for path, message in _UNTRACEABLE.items():
                if path in str(error):
                    raise ValueError(message) from error
            raise
        if not self._arguments:
            raise ValueError("the loss function must compute its result from tensors")
        return self._arguments.pop()

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs = _read_or_trace(gm, example_inputs, inner=self._inner, num_lanes=self._num_lanes)

        def collect(*values: Any) -> tuple[torch.Tensor]:
            if any(is_traceable_wrapper_subclass(value) for value in values):
                raise ValueError("lanes need plain tensors, but a parameter is a tensor subclass")
            self._arguments.append(Arguments(graphs=graphs, values=values))
            return (torch.empty(()),)  # Dynamo wants a result, but nothing reads it

        return collect


def _read_or_trace(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, inner: Inner, num_lanes: int
) -> StepGraphs:
    """Return the graphs from disk, else trace them and write them; eager graphs are not kept."""
    key = graph_key(gm, example_inputs, num_lanes=num_lanes) if inner == "inductor" else ""
    if key and (found := read_graphs(graph_path(key))):
        forward, backward = (fx.GraphModule(nn.Module(), graph) for graph in found)
        return StepGraphs(forward=forward, backward=backward)
    graphs = _trace(gm, example_inputs, inner=inner)
    if key:
        write_graphs(graph_path(key), (graphs.forward.graph, graphs.backward.graph))
    return graphs


def _trace(gm: fx.GraphModule, example_inputs: Sequence[Any], *, inner: Inner) -> StepGraphs:
    num_inputs = len(example_inputs)
    found: list[StepGraphs] = []

    def split(joint: fx.GraphModule, *args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
        _remove_aliases(joint.graph)
        # Remove repeated waits, so that a saved value has the same name in forward and backward.
        remove_repeated_waits(joint.graph)
        if inner == "inductor":
            _simplify(joint)
        _save_random_results(joint.graph)
        forward, backward = min_cut_rematerialization_partition(
            joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        _check_halves(forward.graph, backward.graph, num_inputs, num_fwd_outputs)
        found.append(
            StepGraphs(
                forward=fx.GraphModule(forward, _copy(forward.graph)),
                backward=fx.GraphModule(backward, _copy(backward.graph, clones_inputs=True)),
            )
        )
        return forward, backward

    table = None
    if inner == "inductor":
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(KEEP_RANDOM):
            table = select_decomp_table()
    aot_autograd(
        fw_compiler=_run_nothing,
        bw_compiler=_run_nothing,
        partition_fn=split,
        decompositions=table,
    )(gm, example_inputs)
    if not found:
        raise ValueError("the loss must depend on a parameter that requires a gradient")
    return found[0]


def _simplify(joint: fx.GraphModule) -> None:
    """Run Inductor's own passes for a graph of forward and backward.

    With them, the gradient of a cross-entropy is one kernel, for example. Without them, it first
    writes a float32 tensor of the size of the logits.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    settings = {
        **KEEP_RANDOM,
        "shape_padding": False,  # decides by measured times, so that the ranks' graphs could differ
        "joint_custom_pre_pass": None,  # not in the key of the graphs on disk
        "joint_custom_post_pass": None,
        "auto_chunker.enable": False,  # may return a new graph, which would be lost
    }
    with config.patch(settings):
        joint_graph_passes(joint)


def _remove_aliases(graph: fx.Graph) -> None:
    """Replace each result of ``alias`` or ``detach`` by its input: nothing writes to the values.

    Autograd adds these operators when it saves values. On a GPU, the trace of one rank once had one
    more than that of the other, and so the ranks' graphs differed.
    """
    for operator in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        for node in graph.find_nodes(op="call_function", target=operator):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _save_random_results(joint: fx.Graph) -> None:
    """Save results of attention and of random operators in layers with ``torch.utils.checkpoint``.

    To recompute them, backward would restore the state of the random numbers, which lanes cannot.
    """
    for node in joint.nodes:
        operator = find_operator(node)
        if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
            for each in (node, *(user for user in node.users if user.target is getitem)):
                if "recompute" in each.meta:
                    each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _run_nothing(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def _copy(graph: fx.Graph, *, clones_inputs: bool = False) -> fx.Graph:
    """Copy a graph with the same node names.

    With ``clones_inputs``, inputs that the graph returns are cloned. So all gradients are results
    of operators, also one that is the gradient of the loss or a saved value.
    """
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    output = copy.output_node()
    for node in output.all_input_nodes if clones_inputs else ():
        if node.op == "placeholder":
            with copy.inserting_before(output):
                clone = copy.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta["val"] = node.meta["val"]
            output.replace_input_with(node, clone)
    return copy


def _check_halves(forward: fx.Graph, backward: fx.Graph, num_inputs: int, num_outputs: int) -> None:
    inputs = forward.find_nodes(op="placeholder")
    (results,), (gradients,) = forward.output_node().args, backward.output_node().args
    if len(inputs) != num_inputs or len(gradients) != num_inputs:  # type: ignore[arg-type]
        raise ValueError("lanes need plain tensors that differ from each other as inputs")
    if num_outputs != 1:
        raise ValueError(
            f"the graph has {num_outputs} outputs, but must have one: the loss function must "
            "return a scalar loss alone, and must not write to its inputs or buffers"
        )
    loss = results[0].meta["val"]  # type: ignore[index]
    if loss.dim() != 0:
        raise ValueError(f"the loss (of shape {tuple(loss.shape)}) must be a scalar")
    saved = {node.name for node in results[1:]}  # type: ignore[index]
    read = {node.name for node in backward.find_nodes(op="placeholder")}
    unknown = sorted(name for name in read - saved if not name.startswith(TANGENT))
    if unknown:
        raise RuntimeError(f"backward reads {unknown}, which forward does not save")
