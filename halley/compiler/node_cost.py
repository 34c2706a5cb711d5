"""Microseconds of a graph's nodes: measured where a profile knows them, predicted elsewhere."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.fusion import (
    WHOLE,
    Boundary,
    fused_us,
    inside_kernels,
    is_fused,
    is_join,
    is_split_sum,
)
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, fills, is_empty, is_gemm
from halley.compiler.graph_collectives import (
    ALL_TO_ALL,
    collective_kind,
    find_operator,
    group_of,
    operator_name,
)
from halley.compiler.sizes import Sizes, with_values
from halley.cost.hardware import Predictor
from halley.cost.profiles import Curve, ProfileTable, operation_key
from halley.cost.simulate import NO_CONTENTION, Operation, Role


_ATTENTION = "aten::_scaled_dot_product_"
_STEP = 7919  # a prime: neighbours' places are far apart
NodeCost = Callable[[fx.Node], float]
ROLES: dict[NodeKind, Role] = {
    NodeKind.INPUT: "free",
    NodeKind.OUTPUT: "free",
    NodeKind.VIEW: "free",
    NodeKind.START: "start",
    NodeKind.WAIT: "wait",
    NodeKind.FUSED: "compute",
    NodeKind.COMPUTE: "compute",
}


@final
class ProfiledCost:
    """Gives nodes their time: from a table, else by measuring if it may, else predicted.

    Args:
        predictor: for what the table does not know.
        sizes: of what nodes return.
        table: measured times; None predicts all.
        device: where to measure; None never measures.
        curve_keys: which of the table's curves holds for a group, by its name; that of the largest
            where there is none.

    Attributes:
        predicted: keys of the operations that no measurement stands behind; not of fused ones.
        boundaries: of the nodes of the graph as it is now that Inductor fuses: they cost what
            crosses the boundaries of kernels, and are not measured. None prices each operator.
        measuring_s: what measurements have taken.
        contention: of the table; none where it has no such figures.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        sizes: Sizes,
        table: ProfileTable | None = None,
        device: torch.device | None = None,
        curve_keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.predicted: set[str] = set()
        self.boundaries: Mapping[fx.Node, Boundary] | None = None
        self.measuring_s = 0.0
        self.contention = (table and table.contention) or NO_CONTENTION
        self._predictor = predictor
        self._sizes = sizes
        self._table = table
        self._device = device
        self._curve_keys = curve_keys

    def __call__(self, node: fx.Node) -> float:
        """Return the microseconds of a node that computes or starts a collective."""
        if (group := group_of(node)) is not None:
            curve, sent = self._find_curve(group), exchanged_bytes(node, self._sizes)
            return self._predictor.all_to_all_us(sent) if curve is None else curve.at(sent)
        if is_read(node):
            return self._predictor.hardware.read_us
        if not has_tensors(node):
            return 0.0
        if self.boundaries is not None and (is_fused(node) or is_join(node)):
            return fused_us(node, self.boundaries, predictor=self._predictor, sizes=self._sizes)
        key = node_key(node, self._sizes)
        if self._table is not None:
            known, may = self._table.time_us(key), not self._table.offline
            if known is None and may and self._device is not None and key not in self.predicted:
                known = self._measure(node, key, self._table, self._device)
            if known is not None:
                return known
        self.predicted.add(key)
        return predict_us(node, self._predictor, self._sizes)

    @property
    def inside(self) -> frozenset[fx.Node]:
        """Nodes whose results never come to memory, as they stay inside of kernels."""
        return frozenset() if self.boundaries is None else inside_kernels(self.boundaries)

    @property
    def graph_us(self) -> float:
        """Microseconds of the host before it issues the first node."""
        return self._predictor.hardware.graph_us

    def host_us(self, node: fx.Node) -> float:
        """Return the microseconds that the host takes to issue a node."""
        hardware = self._predictor.hardware
        if group_of(node) is not None:
            return hardware.collective_us
        if self.boundaries is None or not (is_fused(node) or is_join(node)):
            return hardware.call_us
        whole = node.meta.get(WHOLE, node)
        if is_split_sum(whole, self._sizes):
            return hardware.call_us
        boundary = self.boundaries.get(whole)
        is_kernel = boundary is None or boundary.writes
        return hardware.call_us / 3 if is_kernel else 0.0

    def _find_curve(self, group: str) -> Curve | None:
        if self._table is None:
            return None
        own = self._table.curve(self._curve_keys.get(group, ALL_TO_ALL))
        return own or self._table.curve(ALL_TO_ALL)

    def _measure(
        self, node: fx.Node, key: str, table: ProfileTable, device: torch.device
    ) -> float | None:
        operator = find_operator(node)
        # Operators of others may wait for other ranks. One without a result checks values, which
        # examples are not, and on a GPU a failed check ends the process.
        if operator is None or operator.namespace != "aten" or _value(node) is None:
            return None
        begin_s = time.perf_counter()
        found = None
        try:
            with with_values():
                args, kwargs = example_arguments(node, device, self._sizes)
                found = table.measure(key, lambda: operator(*args, **kwargs), device=device)
        except RuntimeError as error:  # of examples, or of memory; other ranks wait for this one
            warnings.warn(
                f"halley predicts {key}, as it failed when measured: {error}", stacklevel=2
            )
        self.measuring_s += time.perf_counter() - begin_s
        return found


def operations(analysis: GraphAnalysis, cost: NodeCost) -> list[Operation]:
    """Return the nodes of a graph as the cost model takes them."""
    found: list[Operation] = []
    begin_us = cost.graph_us if isinstance(cost, ProfiledCost) else 0.0
    for index, node in enumerate(analysis.nodes):
        role = ROLES[analysis.kinds[index]]
        duration_us = cost(node) if role in ("compute", "start") else 0.0
        needs = analysis.needs[index] if role != "free" else _data_needs(analysis, index)
        found.append(
            Operation(
                name=node.name,
                role=role,
                duration_us=duration_us,
                needs=needs,
                host_us=begin_us + host_us(node, cost) if duration_us else 0.0,
                is_read=is_read(node),
            )
        )
        begin_us = 0.0 if duration_us else begin_us
    return found


def host_us(node: fx.Node, cost: NodeCost) -> float:
    """Return the microseconds that the host takes to issue a node, where a cost knows them."""
    return cost.host_us(node) if isinstance(cost, ProfiledCost) else 0.0


def is_read(node: fx.Node) -> bool:
    """Return whether a node copies from a GPU to the host's memory: the host waits for it.

    Where a plan is made for another device than the graph's, that is known by the name alone.
    """
    if operator_name(node) == "halley::read_counts":
        return True
    values = [_value(source) for source in node.all_input_nodes]
    from_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in values)
    found = _value(node)
    results = cast(Sequence[object], found) if isinstance(found, tuple | list) else (found,)
    to_host = any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in results)
    return from_gpu and to_host


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is the whole of an attention, forward or backward."""
    return operator_name(node).startswith(_ATTENTION)


def has_tensors(node: fx.Node) -> bool:
    """Return whether a node reads or returns tensors, and not numbers of the host alone."""
    values = (*map(_value, node.all_input_nodes), _value(node))
    return any(isinstance(value, torch.Tensor | tuple | list) for value in values)


def node_key(node: fx.Node, sizes: Sizes) -> str:
    """Return the key of a node in a table of profiles.

    Attention has one key for all operators of it: which one a graph has depends on the machine
    that traces, and a plan is made on another than it is for.
    """
    name, numbers = str(node.target), [v for v in node.args if isinstance(v, int | float | str)]
    tensors = [
        value for value in map(_value, node.all_input_nodes) if isinstance(value, torch.Tensor)
    ]
    if is_attention(node):
        is_backward = operator_name(node).endswith("_backward")
        name = f"attention{'_backward' if is_backward else ''}"
        tensors = tensors[: 4 if is_backward else 3]  # gradient, queries, keys, values
        numbers = [_named_arguments(node).get("is_causal", False)]
    shapes, dtypes = [sizes.shape(tensor) for tensor in tensors], [t.dtype for t in tensors]
    return operation_key(name, shapes, dtypes, rest=" ".join(map(str, numbers)))


def predict_us(node: fx.Node, predictor: Predictor, sizes: Sizes) -> float:
    """Predict a node by a roofline: arithmetic of matrix products, or the bytes that it moves."""
    values = [_value(source) for source in node.all_input_nodes]
    if collective_kind(node) == "fused":
        return _fused_us(node, predictor, sizes)
    if fills(node):  # reads a part and writes as much
        return _memory_us(2 * sizes.num_bytes(values[1]), predictor)
    if is_empty(node):
        return predictor.hardware.kernel_us
    moved = sum(map(sizes.num_bytes, values)) + sizes.num_bytes(_value(node))
    memory_us = _memory_us(moved, predictor)
    if not is_gemm(node) and not is_attention(node):
        return memory_us
    arithmetic_s = _gemm_flops(node, sizes) / predictor.hardware.gemm_flops_per_s
    return max(memory_us, arithmetic_s * 1e6 + predictor.hardware.kernel_us)


def exchanged_bytes(node: fx.Node, sizes: Sizes) -> int:
    """Return the bytes a rank of the all-to-all that takes as long as a node's collective.

    By what crosses the wire in a ring: what a gather returns, and an all-reduce's operands twice.
    Source: NCCL's own tests, which compare bandwidths of collectives by these factors.
    """
    if "all_gather" in operator_name(node):
        return sizes.num_bytes(_value(node))
    sent = sum(sizes.num_bytes(_value(source)) for source in node.all_input_nodes)
    return 2 * sent if "all_reduce" in operator_name(node) else sent


def _memory_us(num_bytes: float, predictor: Predictor) -> float:
    return max(predictor.memory_us(num_bytes, num_ops=0), predictor.hardware.kernel_us)


def example_arguments(
    node: fx.Node, device: torch.device, sizes: Sizes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a node's shapes, to run it alone.

    Floats are random: an H200 multiplies ones an eighth faster, presumably with less power. Rows
    that are looked up or added to are spread over the table, as most are: on a GPU sums that meet
    wait for each other. Other integers are all 0.
    """
    tables = _tables(node, sizes)
    generator = torch.Generator(device).manual_seed(0)  # not that of the training run

    def example(source: fx.Node) -> Any:
        value = _value(source)
        if isinstance(value, torch.Tensor):
            shape = sizes.shape(value)
            if source in tables:
                places = torch.arange(math.prod(shape), device=device) * _STEP
                return (places % tables[source]).view(shape)
            if value.is_floating_point():
                filled = torch.empty(shape, dtype=value.dtype, device=device)
                return filled.normal_(generator=generator)
            return torch.zeros(shape, dtype=value.dtype, device=device)
        if isinstance(value, tuple | list):
            raise ValueError(f"{source.name} returns several tensors, and {node.name} takes all")
        return sizes.number(cast(int | torch.SymInt, value))

    return (
        cast(tuple[Any, ...], fx.map_arg(node.args, example)),
        cast(dict[str, Any], fx.map_arg(node.kwargs, example)),
    )


def _tables(node: fx.Node, sizes: Sizes) -> dict[fx.Node, int]:
    """Return, for operands of int64 that are places in another operand, how many there are."""
    table = _value(node.all_input_nodes[0]) if node.all_input_nodes else None
    name, places = operator_name(node), node.args[1] if len(node.args) > 1 else None
    if not isinstance(table, torch.Tensor):
        return {}
    if name == "aten::embedding" and isinstance(places, fx.Node):
        return {places: sizes.shape(table)[0]}
    if name not in ("aten::index", "aten::index_put") or not isinstance(places, Sequence):
        return {}
    found: dict[fx.Node, int] = {}
    for place, size in zip(cast(Sequence[object], places), sizes.shape(table), strict=False):
        value = place.meta.get("val") if isinstance(place, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            found[cast(fx.Node, place)] = size
    return found


def _fused_us(node: fx.Node, predictor: Predictor, sizes: Sizes) -> float:
    """Predict an operator that communicates inside: of each half, what takes longer is the time.

    A half is a grouped product with the experts' matrices; beside it a row travels for each token
    and expert. Of rows as many are taken as this rank's tokens choose experts.
    """
    given = _named_arguments(node)
    shapes = {
        name: sizes.shape(value)
        for name, argument in given.items()
        if isinstance(argument, fx.Node) and isinstance(value := _value(argument), torch.Tensor)
    }
    num_rows = next(iter(shapes.values()))[0]
    if "topk_idx" in shapes:
        num_rows = math.prod(shapes["topk_idx"])
    elif isinstance(top_k := given.get("top_k"), int):
        num_rows *= top_k
    halves = [shape for shape in shapes.values() if len(shape) == 3]
    matrices = [_value(source) for source in node.all_input_nodes]
    itemsize = next(x.element_size() for x in matrices if isinstance(x, torch.Tensor))
    # The first dimension of a matrix is the expert; up is (G, D), down (D, F).
    widths = [shapes[name][at] for name, at in (("up", 2), ("down", 1)) if name in shapes]
    rate = predictor.hardware.gemm_flops_per_s
    return predictor.hardware.launch_us + sum(
        max(
            2e6 * num_rows * shape[1] * shape[2] / rate,
            predictor.all_to_all_us(num_rows * width * itemsize),
        )
        for shape, width in zip(halves, widths, strict=True)
    )


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return what a node calls its operator with by position, by the operator's names."""
    operator = find_operator(node)
    assert operator is not None
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return dict(zip((argument.name for argument in arguments), node.args, strict=False))


def _gemm_flops(node: fx.Node, sizes: Sizes) -> float:
    """Return two operations for each element of the left operand and column of the right.

    This holds for all of a product's forms: dense, batched, and grouped with the groups along the
    rows or along the inner dimension. Attention has two products of a batch, queries by keys and
    that by values, and five backward, half of each where it is causal.
    """
    if is_attention(node):
        is_backward = operator_name(node).endswith("_backward")
        query, key = (_value(each) for each in node.all_input_nodes[is_backward : is_backward + 2])
        assert isinstance(query, torch.Tensor)
        assert isinstance(key, torch.Tensor)
        share = 0.5 if _named_arguments(node).get("is_causal", False) else 1.0
        pairs = math.prod(sizes.shape(query)) * sizes.shape(key)[-2]
        return 2.0 * (5 if is_backward else 2) * share * pairs
    shapes = [
        sizes.shape(value)
        for value in map(_value, node.all_input_nodes)
        if isinstance(value, torch.Tensor) and value.ndim >= 2
    ]
    left, right = (shapes * 2)[-2:]  # twice: a square's operands are one node
    return 2.0 * math.prod(left) * right[-1]


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _data_needs(analysis: GraphAnalysis, index: int) -> tuple[int, ...]:
    """Return needs of a node that takes no time, without the order that the output brings."""
    return () if analysis.kinds[index] is NodeKind.OUTPUT else analysis.needs[index]
