"""Count the live bytes of a graph in a given order, and the peak of a training step."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from torch import fx

from halley.compiler.fusion import find_boundaries, inside_kernels
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, Sizes, result_of


@final
class LiveBytes:
    """Counts the live bytes of a graph for any order of its nodes.

    A buffer is alive from the node that makes it to the last node that reads it or a view of it.
    Exceptions:

    - The operand of a collective is alive until the wait has ended.
    - The caller owns parameters and inputs of the model, so they count as 0 bytes.
    - Activations saved for backward are inputs too. They are freed after their last reader.
    - Outputs are alive until the end.

    Args:
        analysis: of the graph.
        sizes: bytes of results.
        inside: nodes whose results stay inside of a kernel. They have no buffer, and a node that
            reads one keeps the buffers alive from which the kernel computes it.

    Attributes:
        readers: for each node the indices of the nodes that keep its buffer alive, ascending.
        num_bytes: of the buffer of each node, 0 if it has none.
    """

    def __init__(
        self, analysis: GraphAnalysis, sizes: Sizes, *, inside: Collection[fx.Node] = frozenset()
    ) -> None:
        self._analysis = analysis
        self.readers: list[list[int]] = [[] for _ in analysis.nodes]
        self.num_bytes = [0] * len(analysis.nodes)
        position = {node: index for index, node in enumerate(analysis.nodes)}
        held: list[set[int]] = []  # for each node the buffers that a reader of its result needs
        for index, node in enumerate(analysis.nodes):
            read = {buffer for source in node.all_input_nodes for buffer in held[position[source]]}
            for buffer in read:
                self.readers[buffer].append(index)
            kind = analysis.kinds[index]
            if kind is NodeKind.WAIT:  # the result is the buffer of the start, the operand is free
                held.append({buffer for buffer in read if analysis.kinds[buffer] is NodeKind.START})
            elif kind is NodeKind.START:
                held.append({index} | read)
            # Neither has a buffer: readers keep the buffers alive that it is made from.
            elif kind is NodeKind.VIEW or node in inside:
                held.append(read)
                continue
            else:
                held.append({index})
            # aot_autograd calls inputs that the caller owns "primals".
            is_owned = kind is NodeKind.INPUT and node.name.startswith("primals")
            if kind not in (NodeKind.WAIT, NodeKind.OUTPUT) and not is_owned:
                self.num_bytes[index] = sizes.num_bytes(result_of(node))

    def peak(self, order: Sequence[int]) -> int:
        """Return the most live bytes in an order of nodes."""
        return max(self.alive(order), default=0)

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return the live bytes while each node of ``order`` runs."""
        place = {index: at for at, index in enumerate(order)}
        # -1: a buffer without readers is freed by the node that makes it.
        last = [max((place[r] for r in readers), default=-1) for readers in self.readers]
        freed_after = [0] * len(order)
        for index, at in place.items():
            freed_after[max(at, last[index])] += self.num_bytes[index]
        live = sum(self.num_bytes[index] for index in self._analysis.find(NodeKind.INPUT))
        found: list[int] = []
        for at, index in enumerate(order):
            if self._analysis.kinds[index] is not NodeKind.INPUT:
                live += self.num_bytes[index]
            found.append(live)
            live -= freed_after[at]
        return found


Halves = tuple[fx.GraphModule, fx.GraphModule]


@final
class StepPeak:
    """A partition function for aot_autograd that also counts the peak memory of a training step.

    The peak of a step is mostly at the beginning of backward, when all saved activations are alive.
    A pass may raise the peak of forward up to that of backward without need for more memory.

    Args:
        unknown_size: assumed for sizes that depend on data.
        divide: partition function that divides a joint graph into forward and backward.
        fuses: whether the inner compiler fuses nodes into kernels, as Inductor does.

    Attributes:
        num_bytes: the larger peak of forward and backward. It is 0 before the call, and where no
            joint graph exists because nothing needs a gradient.
    """

    def __init__(
        self, unknown_size: int, divide: Callable[..., Halves], *, fuses: bool = False
    ) -> None:
        self.num_bytes = 0
        self._unknown_size = unknown_size
        self._divide = divide
        self._fuses = fuses

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        """Return forward and backward as ``divide`` does, and set ``num_bytes``."""
        halves = self._divide(gm, joint_inputs, **kwargs)
        sizes = Sizes(self._unknown_size)
        for half in halves:
            analysis = GraphAnalysis(half.graph)
            boundaries = find_boundaries(half.graph, sizes) if self._fuses else {}
            live = LiveBytes(analysis, sizes, inside=inside_kernels(boundaries))
            self.num_bytes = max(self.num_bytes, live.peak(range(len(analysis.nodes))))
        return halves
