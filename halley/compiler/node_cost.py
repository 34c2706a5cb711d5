"""Find the time of each graph node: from a profile, by a measurement or by a prediction."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from halley.compiler.fusion import (
    Boundary,
    fused_us,
    inside_kernels,
    is_concat,
    is_fused,
    is_split_sum,
)
from halley.compiler.graph_analysis import (
    GraphAnalysis,
    NodeKind,
    Sizes,
    is_empty,
    is_gemm,
    result_of,
)
from halley.compiler.graph_collectives import (
    ALL_TO_ALL,
    collective_kind,
    find_operator,
    group_of,
    operator_name,
)
from halley.cost.hardware import Predictor
from halley.cost.profiles import Curve, ProfileTable, operation_key
from halley.cost.simulate import NO_CONTENTION, Contention, Operation, Role


_INDEX_STEP = 7919  # a prime, so that consecutive indices are far apart in the table
NodeCost = Callable[[fx.Node], float]
_ROLES: dict[NodeKind, Role] = {
    NodeKind.START: "start",
    NodeKind.WAIT: "wait",
    NodeKind.FUSED: "compute",
    NodeKind.COMPUTE: "compute",
}


@final
@dataclass(eq=False, kw_only=True)
class ProfiledCost:
    """Gives the time of a graph node in us: from a table, by a measurement or by a prediction.

    Attributes:
        boundaries: the ``Boundary`` of each node that Inductor fuses. The node's time is predicted
            from its loads and stores, never measured. If None, each operator is timed alone.
        curve_keys: key of the all-to-all curve of each group in the table, by group name. The curve
            of the largest group serves groups without a curve.
        predicted: keys of predicted operations, whose measured times a table could have.
    """

    predictor: Predictor = field(kw_only=False)
    sizes: Sizes
    boundaries: Mapping[fx.Node, Boundary] | None = None
    table: ProfileTable | None = None  # None: predict all nodes
    device: torch.device | None = None  # device to measure on; None: never measure
    curve_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    predicted: set[str] = field(default_factory=set[str])
    measuring_s: float = 0.0  # seconds spent on measurements so far

    def __call__(self, node: fx.Node) -> float:
        if (group := group_of(node)) is not None:
            curve, sent = self._find_curve(group), exchanged_bytes(node, self.sizes)
            return self.predictor.all_to_all_us(sent) if curve is None else curve.at(sent)
        if is_read(node):
            return self.predictor.hardware.read_us
        results = (*map(result_of, node.all_input_nodes), result_of(node))
        if not any(isinstance(result, torch.Tensor | tuple | list) for result in results):
            return 0.0  # the node computes sizes, on the host
        if self.boundaries is not None and (is_fused(node) or is_concat(node)):
            return fused_us(node, self.boundaries, predictor=self.predictor, sizes=self.sizes)
        key = node_key(node, self.sizes)
        if self.table is not None:
            known, may = self.table.time_us(key), not self.table.offline
            if known is None and may and self.device is not None and key not in self.predicted:
                known = self._measure(node, key, self.table, self.device)
            if known is not None:
                return known
        self.predicted.add(key)
        return _predict_us(node, self.predictor, self.sizes)

    @property
    def contention(self) -> Contention:
        return (self.table and self.table.contention) or NO_CONTENTION

    @property
    def inside(self) -> frozenset[fx.Node]:
        return frozenset() if self.boundaries is None else inside_kernels(self.boundaries)

    def host_us(self, node: fx.Node) -> float:
        """Return host time in us to launch a node; 0 if another node of its kernel counts it."""
        hardware = self.predictor.hardware
        if group_of(node) is not None:
            return hardware.collective_us
        if self.boundaries is None or not (is_fused(node) or is_concat(node)):
            return hardware.call_us
        if is_split_sum(node, self.sizes):
            return hardware.call_us
        boundary = self.boundaries.get(node)
        # Assume that one node of each kernel writes to memory. Count the launch at that node.
        is_launched = boundary is None or boundary.writes
        return hardware.call_us / 3 if is_launched else 0.0

    def _find_curve(self, group: str) -> Curve | None:
        if self.table is None:
            return None
        own = self.table.curve(self.curve_keys.get(group, ALL_TO_ALL))
        return own or self.table.curve(ALL_TO_ALL)

    def _measure(
        self, node: fx.Node, key: str, table: ProfileTable, device: torch.device
    ) -> float | None:
        operator = find_operator(node)
        # Measure only ATen operators: others may wait for other ranks. An operator without a result
        # asserts values: example values would fail, and on a GPU that ends the process.
        if operator is None or operator.namespace != "aten" or result_of(node) is None:
            return None
        begin_s = time.perf_counter()
        found = None
        try:
            # The compiler traces with fake tensors around this call; kernels need real ones.
            with unset_fake_temporarily(), torch.no_grad():
                args, kwargs = example_arguments(node, device, self.sizes)
                found = table.measure(key, lambda: operator(*args, **kwargs), device=device)
        # Raised if the operator refuses the examples or memory is full. Only warn: an error would
        # leave the other ranks waiting for the plan of this rank.
        except RuntimeError as error:
            warnings.warn(
                f"halley predicts {key}, as it failed when measured: {error}", stacklevel=2
            )
        self.measuring_s += time.perf_counter() - begin_s
        return found


def operations(analysis: GraphAnalysis, cost: NodeCost) -> list[Operation]:
    """Return the nodes of a graph as operations of the simulator, in the order of the graph.

    Host times are 0 unless ``cost`` is a ``ProfiledCost``. The first one includes ``graph_us``.
    """
    found: list[Operation] = []
    host = cost if isinstance(cost, ProfiledCost) else None
    begin_us = host.predictor.hardware.graph_us if host else 0.0
    for node, kind, needs in zip(analysis.nodes, analysis.kinds, analysis.needs, strict=True):
        role = _ROLES.get(kind, "free")
        duration_us = cost(node) if role in ("compute", "start") else 0.0
        found.append(
            Operation(
                name=node.name,
                role=role,
                duration_us=duration_us,
                needs=() if kind is NodeKind.OUTPUT else needs,
                host_us=begin_us + host.host_us(node) if host and duration_us else 0.0,
                is_read=is_read(node),
            )
        )
        begin_us = 0.0 if duration_us else begin_us
    return found


def is_read(node: fx.Node) -> bool:
    """Return whether the host waits for a node: ``read_counts``, or a copy from a GPU to a CPU."""
    # A graph traced on a CPU to plan for a GPU has no CUDA tensors: recognise the read by name.
    if operator_name(node) == "halley::read_counts":
        return True
    sources, result = map(result_of, node.all_input_nodes), result_of(node)
    results = cast(Sequence[object], result) if isinstance(result, tuple | list) else (result,)
    from_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in sources)
    to_host = any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in results)
    return from_gpu and to_host


def _is_attention(node: fx.Node) -> bool:
    return operator_name(node).startswith("aten::_scaled_dot_product_")


def node_key(node: fx.Node, sizes: Sizes) -> str:
    """Return the key under which a table of profiles has the time of a node.

    All attention operators share one key in forward and one in backward: PyTorch chooses among them
    by the device on which it traces, but a plan may be for another device.
    """
    name, numbers = str(node.target), [v for v in node.args if isinstance(v, int | float | str)]
    results = map(result_of, node.all_input_nodes)
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    if _is_attention(node):
        is_backward = operator_name(node).endswith("_backward")
        name = f"attention{'_backward' if is_backward else ''}"
        tensors = tensors[: 4 if is_backward else 3]  # query, key, value (backward: and gradient)
        numbers = [_named_arguments(node).get("is_causal", False)]
    shapes, dtypes = [sizes.shape(tensor) for tensor in tensors], [t.dtype for t in tensors]
    return operation_key(name, shapes, dtypes, rest=" ".join(map(str, numbers)))


def _predict_us(node: fx.Node, predictor: Predictor, sizes: Sizes) -> float:
    """Predict a node's time in us from FLOPs and memory; for a fused layer, from FLOPs and link."""
    if collective_kind(node) == "fused":
        return _fused_layer_us(node, predictor, sizes)
    kernel_us = predictor.hardware.kernel_us
    if is_empty(node):
        return kernel_us
    sources = map(result_of, node.all_input_nodes)
    moved = sum(map(sizes.num_bytes, sources)) + sizes.num_bytes(result_of(node))
    memory_us = max(predictor.memory_us(moved, num_ops=0), kernel_us)
    gemm_us = arithmetic_us(node, predictor, sizes)
    return max(memory_us, gemm_us + kernel_us) if gemm_us else memory_us


def arithmetic_us(node: fx.Node, predictor: Predictor, sizes: Sizes) -> float:
    """Predict the arithmetic time in us of GEMMs, attention and the head; 0 for other nodes."""
    if operator_name(node) == "halley::head_loss":
        arguments = _named_arguments(node)
        hidden, weight = (
            sizes.shape(cast(torch.Tensor, result_of(arguments[name])))
            for name in ("hidden", "weight")
        )
        num_gemms = 3 if arguments["with_gradients"] else 1
        flops = 2.0 * num_gemms * math.prod(hidden) * weight[0]
    elif is_gemm(node) or _is_attention(node):
        flops = _gemm_flops(node, sizes)
    else:
        return 0.0
    return flops / predictor.hardware.gemm_flops_per_s * 1e6


def exchanged_bytes(node: fx.Node, sizes: Sizes) -> int:
    """Return the bytes per rank of an all-to-all that takes as long as a node's collective.

    In a ring, an all-gather moves the bytes of its result, and an all-reduce moves the bytes of its
    operand twice. Source: the bus bandwidth factors of nccl-tests.
    """
    if "all_gather" in operator_name(node):
        return sizes.num_bytes(result_of(node))
    sent = sum(sizes.num_bytes(result_of(source)) for source in node.all_input_nodes)
    return 2 * sent if "all_reduce" in operator_name(node) else sent


def example_arguments(
    node: fx.Node, device: torch.device, sizes: Sizes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword example arguments of a node's operator, to time it alone.

    Floats are random: an H200 multiplies matrices of ones an eighth faster, presumably with less
    power. Indices are spread over the table that they index, as most are in training: additions to
    one row would wait for each other on a GPU. Other integers are 0.
    """
    table_sizes = _indexed_sizes(node, sizes)
    generator = torch.Generator(device).manual_seed(0)  # leaves the training's generator unchanged

    def example(source: fx.Node) -> Any:
        result = result_of(source)
        if isinstance(result, torch.Tensor):
            shape = sizes.shape(result)
            if source in table_sizes:
                indices = torch.arange(math.prod(shape), device=device) * _INDEX_STEP
                return (indices % table_sizes[source]).view(shape)
            if result.is_floating_point():
                filled = torch.empty(shape, dtype=result.dtype, device=device)
                return filled.normal_(generator=generator)
            return torch.zeros(shape, dtype=result.dtype, device=device)
        if isinstance(result, tuple | list):
            raise ValueError(f"{node.name} must not take the tuple of tensors of {source.name}")
        return sizes.number(cast(int | torch.SymInt, result))

    return (
        cast(tuple[Any, ...], fx.map_arg(node.args, example)),
        cast(dict[str, Any], fx.map_arg(node.kwargs, example)),
    )


def _indexed_sizes(node: fx.Node, sizes: Sizes) -> dict[fx.Node, int]:
    """Return a node's inputs that are indices into its first input, with their upper limits."""
    table = result_of(node.all_input_nodes[0]) if node.all_input_nodes else None
    name, indices = operator_name(node), node.args[1] if len(node.args) > 1 else None
    if not isinstance(table, torch.Tensor):
        return {}
    if name == "aten::embedding" and isinstance(indices, fx.Node):
        return {indices: sizes.shape(table)[0]}
    if name not in ("aten::index", "aten::index_put") or not isinstance(indices, Sequence):
        return {}
    found: dict[fx.Node, int] = {}
    for index, size in zip(cast(Sequence[object], indices), sizes.shape(table), strict=False):
        result = result_of(index) if isinstance(index, fx.Node) else None
        if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
            found[cast(fx.Node, index)] = size
    return found


def _fused_layer_us(node: fx.Node, predictor: Predictor, sizes: Sizes) -> float:
    """Predict the time in us of a fused layer: two GEMMs overlapped with dispatch and combine.

    Each GEMM takes its own time or that of its transfer, whichever is longer. The prediction
    assumes that this rank sends one row for each choice of its tokens, and receives as many.
    """
    arguments = _named_arguments(node)
    up_LGD, down_LDF, topk_idx_TK = (
        sizes.shape(cast(torch.Tensor, result_of(arguments[name])))
        for name in ("up", "down", "topk_idx")
    )
    num_rows = math.prod(topk_idx_TK)
    itemsize = cast(torch.Tensor, result_of(node.all_input_nodes[0])).element_size()
    wire_us = predictor.all_to_all_us(num_rows * up_LGD[2] * itemsize)
    rate = predictor.hardware.gemm_flops_per_s
    return predictor.hardware.launch_us + sum(
        max(2e6 * num_rows * weight[1] * weight[2] / rate, wire_us) for weight in (up_LGD, down_LDF)
    )


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    operator = find_operator(node)
    assert operator is not None
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return dict(zip((argument.name for argument in arguments), node.args, strict=False))


def _gemm_flops(node: fx.Node, sizes: Sizes) -> float:
    """Return the FLOPs of attention, or of a GEMM: 2 * elements of left * columns of right.

    This holds for dense, batched and grouped GEMMs, with groups along rows or the inner dimension.
    Attention has 2 batched GEMMs (queries by keys, scores by values), and its backward has 5. A
    causal mask halves the FLOPs.
    """
    if _is_attention(node):
        is_backward = operator_name(node).endswith("_backward")
        inputs = node.all_input_nodes[is_backward : is_backward + 2]  # skips a gradient in backward
        query, key = (cast(torch.Tensor, result_of(each)) for each in inputs)
        share = 0.5 if _named_arguments(node).get("is_causal", False) else 1.0
        pairs = math.prod(sizes.shape(query)) * sizes.shape(key)[-2]
        return 2.0 * (5 if is_backward else 2) * share * pairs
    shapes = [
        sizes.shape(result)
        for result in map(result_of, node.all_input_nodes)
        if isinstance(result, torch.Tensor) and result.ndim >= 2
    ]
    left, right = (shapes * 2)[-2:]  # doubled, as ``mm(x, x)`` has one input node
    return 2.0 * math.prod(left) * right[-1]
