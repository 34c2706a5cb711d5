"""Cut the graphs of a microbatch at collectives and host reads into items, each an ``fx.Graph``.

Microbatches that run side by side interleave their items. An item has inputs and outputs by name.
The example has one MoE layer:

    forward    segment  start  wait   host   segment  start  wait     segment   start wait  segment
               router   counts counts splits gather   dispatch rows   experts   combine rows  loss
    backward   segment  unit ...
               loss     weight gradients, which may run later
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from halley.compiler.graph_analysis import is_gemm, is_random, is_view
from halley.compiler.graph_collectives import collective_kind, is_wait, operator_name
from halley.lanes.capture import TANGENT, StepGraphs


Kind = Literal["segment", "unit", "host", "start", "wait", "sum"]
Lanes = Literal["own", "earlier", "all"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A schedulable ``fx.Graph`` of a microbatch: computation, host read, collective, lane sum.

    Attributes:
        kind: "segment" computes. "unit" computes weight gradients that no collective depends on.
            "start" and "wait" belong to a collective. "host" reads numbers from tensors and
            computes sizes from them. "sum" adds values of several lanes of a divided batch.
        code: the operators; its ``owning_module`` has their attributes. None in tests of schedules.
        inputs, outputs: names of values of a microbatch, in the order of the code's arguments and
            results. "f:" begins names of inputs and values of forward, "b:" those of backward.
        gradients: name of each gradient of a parameter that the item produces, and the position of
            the parameter among the inputs of forward.
    """

    kind: Kind
    code: fx.Graph | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    needs: tuple[int, ...] = ()  # indices of the items that produce the inputs
    gradients: tuple[tuple[str, int], ...] = ()
    is_static: bool = False  # whether all sizes of a segment, unit or sum are known before it runs
    has_rows: bool = False  # whether a "wait" returns rows and not counts, which are int64
    lanes: Lanes = "own"  # whose values a "sum" adds: those of "earlier" lanes, or of "all"

    def read_lanes(self, lane: int, num_lanes: int) -> range:
        """Return the lanes whose values the item of a lane reads; their own items produce them."""
        if self.lanes == "all":
            return range(num_lanes)
        return range(0 if self.lanes == "earlier" else lane, lane + 1)

    def all_needs(self, lane: int, num_lanes: int) -> list[tuple[int, int]]:
        """Return the (lane, item index) pairs that must run before the item of a lane."""
        return [(each, need) for each in self.read_lanes(lane, num_lanes) for need in self.needs]


@dataclass(eq=False)
class _Draft:
    kind: Kind
    nodes: list[fx.Node] = field(default_factory=list)
    is_static: bool = True


def cut_step(graphs: StepGraphs) -> tuple[Item, ...]:
    """Cut the forward and the backward graph into the items of a microbatch, forward first."""
    forward, _ = _cut(graphs.forward.graph)
    backward, shared = _cut(graphs.backward.graph)
    items: list[Item] = []
    producers: dict[str, int] = {}
    for module, drafts, prefix in (
        (graphs.forward, forward, "f:"),
        (graphs.backward, _split_units(backward, shared), "b:"),
    ):
        made: set[fx.Node] = set()
        for draft in drafts:
            item = _finish(draft, module, prefix=prefix, made=made, producers=producers)
            producers |= dict.fromkeys(item.outputs, len(items))
            items.append(item)
    return tuple(items)


def _cut(graph: fx.Graph) -> tuple[list[_Draft], set[fx.Node]]:
    """Divide nodes into drafts of items; also return the nodes that each reading item recomputes.

    A view joins the segment of its source, and a size the host item of its sources. In the order of
    the graph, both may be far from their sources, which would add dependencies between items.
    """
    drafts = [_Draft("segment")]  # for shared nodes that are results of the graph
    draft_of: dict[fx.Node, _Draft] = {}
    shared: set[fx.Node] = set()
    for node in _with_late_sums_last(graph):
        if node.op == "get_attr":
            shared.add(node)
        if node.op != "call_function":
            continue
        sources = [draft_of[each] for each in node.all_input_nodes if each in draft_of]
        draft = max(sources, key=drafts.index, default=None)
        if collective_kind(node) not in (None, "fused") or is_wait(node):
            drafts.append(draft := _Draft("wait" if is_wait(node) else "start"))
        elif _summed_lanes(node) != "own":
            drafts.append(draft := _Draft("sum"))
        elif _is_shared(node, shared):
            shared.add(node)
            continue
        elif _is_host(node, sources):
            if draft is None or draft.kind != "host":
                drafts.append(draft := _Draft("host"))
        elif not (is_view(node) and draft is not None and draft.kind == "segment"):
            draft, is_static = drafts[-1], _is_static(node)
            if draft.kind != "segment" or len(drafts) == 1 or draft.is_static != is_static:
                drafts.append(draft := _Draft("segment", is_static=is_static))
        assert draft is not None
        draft.nodes.append(node)
        draft_of[node] = draft
    for node in shared:
        readers = [each for each in node.users if each not in shared]
        if node.op != "get_attr" and any(each.op == "output" for each in readers):
            drafts[0].nodes.append(node)
    position = {node: at for at, node in enumerate(graph.nodes)}
    drafts[0].nodes.sort(key=position.__getitem__)
    return [draft for draft in drafts if draft.nodes], shared


def _summed_lanes(node: fx.Node) -> Lanes:
    if operator_name(node) != "halley::sum_over_lanes":
        return "own"
    return "earlier" if node.args[1] else "all"


def _with_late_sums_last(graph: fx.Graph) -> list[fx.Node]:
    """Return all nodes, the sums over all lanes that no collective needs last, with their readers.

    A lane waits at such a sum for all other lanes. At the place of a balance loss in the graph, it
    would delay the dispatch of its layer.
    """
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in needed or collective_kind(node):
            needed.update(node.all_input_nodes)
    sums = {node for node in graph.nodes if _summed_lanes(node) == "all"} - needed
    readers: set[fx.Node] = set()
    for node in graph.nodes:
        if any(source in sums or source in readers for source in node.all_input_nodes):
            readers.add(node)
    return sorted(graph.nodes, key=lambda node: 2 if node in readers else node in sums)


def _is_host(node: fx.Node, sources: list[_Draft]) -> bool:
    from_host = bool(sources) and all(draft.kind == "host" for draft in sources)
    is_read = operator_name(node) == "halley::read_counts" or (is_view(node) and from_host)
    return is_read or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def _is_static(node: fx.Node) -> bool:
    values: Any = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return not free_symbols(values)


def _is_shared(node: fx.Node, shared: set[fx.Node]) -> bool:
    """Return whether each item that reads a node recomputes it, rather than one item for all.

    Such a node is a view of graph inputs, or has no inputs and is not random. Tracing makes one for
    all layers. If only the first layer computed it, two equal layers would differ in their code.
    """
    sources = node.all_input_nodes
    if not sources:
        return not is_random(node)
    return is_view(node) and all(
        each in shared or (each.op == "placeholder" and not each.name.startswith(TANGENT))
        for each in sources
    )


def _split_units(drafts: list[_Draft], shared: set[fx.Node]) -> list[_Draft]:
    """Move weight-gradient GEMMs of backward from segments to "unit" drafts; return all drafts.

    A node may move into a unit if only outputs of the graph and other such nodes read it. Connected
    nodes of a segment are one unit if a GEMM is among them. Without a GEMM they stay, because they
    are cheaper in the kernels that compute their operands.
    """
    movable: set[fx.Node] = set()
    for draft in reversed(drafts):
        for node in reversed(draft.nodes if draft.kind == "segment" else []):
            readers = [each for each in node.users if each.op != "output"]
            from_tuple = any(
                isinstance(each.meta.get("val"), tuple) for each in node.all_input_nodes
            )
            if node not in shared and movable.issuperset(readers) and not from_tuple:
                movable.add(node)
    found: list[_Draft] = []
    for draft in drafts:
        groups = [
            group
            for group in _connected([node for node in draft.nodes if node in movable])
            if any(map(is_gemm, group))
        ]
        moved = set[fx.Node]().union(*groups)
        draft.nodes = [node for node in draft.nodes if node not in moved]
        found += [draft] if draft.nodes else []
        found += [_Draft("unit", group) for group in groups]
    return found


def _connected(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return the connected components of nodes, each in an order in which its nodes can run."""
    groups: list[list[fx.Node]] = []
    for node in nodes:
        joined = [group for group in groups if not set(group).isdisjoint(node.all_input_nodes)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(each for group in joined for each in group), node])
    return groups


def _finish(
    draft: _Draft,
    module: fx.GraphModule,
    *,
    prefix: str,
    made: set[fx.Node],
    producers: dict[str, int],
) -> Item:
    """Build the ``Item`` of a draft, with its graph and value names; add its nodes to ``made``.

    ``made`` are the nodes of earlier items. ``producers`` maps a value name to its item's index.
    """
    own, inputs, body = set(draft.nodes), dict[fx.Node, None](), dict[fx.Node, None]()

    def visit(node: fx.Node) -> None:
        if node not in own and (node.op == "placeholder" or node in made):
            inputs[node] = None
        elif node not in body:
            for source in node.all_input_nodes:
                visit(source)
            body[node] = None

    for node in draft.nodes:
        visit(node)
    results = [node for node in draft.nodes if not own.issuperset(node.users)]
    made |= own
    names = [_name(node, prefix) for node in inputs]
    gradients = module.graph.output_node().args[0] if prefix == "b:" else ()
    value = draft.nodes[0].meta.get("val")
    return Item(
        kind=draft.kind,
        code=_extract(module, list(inputs), list(body), results),
        inputs=tuple(names),
        outputs=tuple(_name(node, prefix) for node in results),
        needs=tuple(sorted({producers[name] for name in names if name in producers})),
        gradients=tuple(
            (_name(node, prefix), position)
            for position, node in enumerate(gradients)  # type: ignore[arg-type]
            if node in own
        ),
        is_static=draft.kind in ("segment", "unit", "sum") and all(map(_is_static, body)),
        has_rows=draft.kind == "wait"
        and isinstance(value, torch.Tensor)
        and value.dtype != torch.int64,
        lanes=_summed_lanes(draft.nodes[0]),
    )


def _extract(
    module: fx.GraphModule, inputs: list[fx.Node], body: list[fx.Node], results: list[fx.Node]
) -> fx.Graph:
    graph = fx.Graph(owning_module=module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta.copy()
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return graph


def _name(node: fx.Node, prefix: str) -> str:
    return ("f:" if node.op == "placeholder" else prefix) + node.name
