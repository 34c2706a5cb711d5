"""Microseconds of consecutive nodes of a graph, as they are and as a pipeline of parts."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast, final

import torch
from torch import fx

from halley.compiler.graph import NodeKind, node_kind
from halley.compiler.node_cost import ROLES, NodeCost
from halley.compiler.partition.axes import (
    Axes,
    Axis,
    Batch,
    BatchFlow,
    Counts,
    Division,
    Last,
    Rows,
)
from halley.compiler.partition.region import Region
from halley.compiler.sizes import Sizes
from halley.cost.graph_cost import Operation, graph_time
from halley.cost.simulate import NO_CONTENTION, Contention


_Key: TypeAlias = tuple[fx.Node, int | None]  # a node, and the part; None is the whole


@final
class PipelineCost:
    """Prices ranges of one graph by simulating them alone.

    A part's node costs what it does on the part's shapes. Of rows whose number depends on data a
    part has its share: Lancet takes an irregular all-to-all for an equal one, too.

    Args:
        flow: of the graph.
        cost: microseconds of a node.
        sizes: of what nodes return.
        contention: of computation and communication.
    """

    def __init__(
        self,
        flow: BatchFlow,
        *,
        cost: NodeCost,
        sizes: Sizes,
        contention: Contention = NO_CONTENTION,
    ) -> None:
        self._flow = flow
        self._cost = cost
        self.sizes = sizes
        self._contention = contention
        self._known: dict[_Key, float] = {}

    def as_is(self, nodes: Sequence[fx.Node]) -> float:
        """Return the time of nodes in their order."""
        return self._time([((node, None), (), self._whole(node)) for node in nodes])

    def in_parts(self, region: Region, num_parts: int) -> float:
        """Return the time of a region in parts, in the order of the pipeline."""
        divided = {node for stage in region.stages for node in stage}
        works: list[tuple[_Key, Sequence[_Key], float]] = []
        for node in region.before:
            works.append(((node, None), (), self._whole(node)))
        for node, part in region.steps(num_parts):
            call = self._flow.calls[node]
            before: list[_Key] = []
            if isinstance(call, Division) and call.carry is not None and part > 0:
                before.append((node, part - 1))
            before += [(source, part) for source in node.all_input_nodes if source in divided]
            works.append(((node, part), before, self._part(node, num_parts)))
        for ending, node in region.after:
            if ending == "merge":
                parts: list[_Key] = [(node, part) for part in range(num_parts)]
                works.append(((node, None), parts, self._merge(node)))
            else:
                works.append(((node, None), (), self._whole(node)))
        return self._time(works)

    def _time(self, works: Sequence[tuple[_Key, Sequence[_Key], float]]) -> float:
        """Return the time of works in their order, each with what it needs beside its inputs."""
        position = {key: at for at, (key, _, _) in enumerate(works)}
        operations: list[Operation] = []
        for (node, part), more, duration_us in works:
            inputs: list[_Key] = [(source, None) for source in node.all_input_nodes]
            is_merge = part is None and any(key[0] is node for key in more)
            kind = NodeKind.COMPUTE if is_merge else node_kind(node)
            role = ROLES[kind]
            if kind is NodeKind.VIEW or (is_merge and duration_us == 0.0):
                role = "free"
            needs = {position[key] for key in (*inputs, *more) if key in position}
            operations.append(
                Operation(
                    name=f"{node.name}.{part}",
                    role=role,
                    duration_us=duration_us if role in ("compute", "start") else 0.0,
                    needs=tuple(sorted(at for at in needs if at < len(operations))),
                )
            )
        return graph_time(operations, range(len(operations)), self._contention).makespan_us

    def _whole(self, node: fx.Node) -> float:
        if (node, None) not in self._known:
            role = ROLES[node_kind(node)]
            self._known[node, None] = self._cost(node) if role in ("compute", "start") else 0.0
        return self._known[node, None]

    def _part(self, node: fx.Node, num_parts: int) -> float:
        if (node, num_parts) not in self._known:
            takes_time = ROLES[node_kind(node)] in ("compute", "start")
            time_us = self._cost(self._shadow(node, num_parts)) if takes_time else 0.0
            self._known[node, num_parts] = time_us
        return self._known[node, num_parts]

    def _merge(self, node: fx.Node) -> float:
        """Return the time to read parts and write the whole; of rows, once more to order them."""
        axis = self._flow.axes[node]
        if isinstance(axis, Counts | Last) or not isinstance(node.meta["val"], torch.Tensor):
            return 0.0
        source = self._placeholder(node.meta["val"])
        whole = self._scratch.call_function(torch.ops.aten.cat.default, ([source],))
        whole.meta["val"] = source.meta["val"]
        return self._cost(whole) * (2 if isinstance(axis, Rows) else 1)

    @cached_property
    def _scratch(self) -> fx.Graph:
        module = next(iter(self._flow.axes)).graph.owning_module
        return fx.Graph(owning_module=module)

    def _shadow(self, node: fx.Node, num_parts: int) -> fx.Node:
        """Return a node like this one, with the shapes of a part."""
        call = self._flow.calls[node]
        assert isinstance(call, Division)

        def operand(source: fx.Node) -> fx.Node:
            if source.op == "get_attr":
                return self._scratch.create_node("get_attr", source.target)
            axes = call.splits.get(source) or self._flow.axes[source]
            return self._placeholder(self._of_part(source.meta["val"], axes, num_parts))

        args = cast(tuple[Any, ...], fx.map_arg(node.args, operand))
        kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, operand))
        assert callable(node.target)
        shadow = self._scratch.call_function(node.target, args, kwargs)
        shadow.meta["val"] = self._of_part(node.meta["val"], self._flow.axes[node], num_parts)
        return shadow

    def _placeholder(self, value: object) -> fx.Node:
        node = self._scratch.create_node("placeholder", "x")
        node.meta["val"] = value
        return node

    def _of_part(self, value: object, axes: Axes, num_parts: int) -> object:
        """Return a value of a part's shape, without memory."""
        if isinstance(value, tuple | list):
            items = cast(Sequence[object], value)
            each: Iterable[Axis | None] = axes if isinstance(axes, tuple) else [axes] * len(items)
            return tuple(
                self._of_part(item, axis, num_parts) for item, axis in zip(items, each, strict=True)
            )
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(self.sizes.shape(value))
        if isinstance(axes, Batch | Rows):
            shape[axes.dim] = max(1, shape[axes.dim] // num_parts)
        return torch.empty(shape, dtype=value.dtype, device="meta")
