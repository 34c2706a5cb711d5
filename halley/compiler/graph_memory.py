"""How many bytes a graph holds at its worst moment, in a given order."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast, final

from torch import fx

from halley.compiler.fusion import find_boundaries, inside_kernels
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, fills
from halley.compiler.sizes import Sizes


@final
class LiveBytes:
    """Counts what is alive in the orders of one graph.

    A buffer is alive from the node that makes it to the last one that reads it or a view of it.
    What a collective sends stays until its wait has ended. Inputs that the caller owns all the
    while (parameters, and inputs of the model) do not count; others, activations kept for
    backward, are let go after their last use. Outputs stay.

    Args:
        analysis: of the graph.
        sizes: of what its nodes return.
        inside: nodes whose results never come to memory, as they stay inside of kernels: who reads
            one reads what it is made of.

    Attributes:
        readers: indices of the nodes that keep the buffer of each node alive, ascending.
        num_bytes: of each node's buffer, 0 where it has none.
    """

    def __init__(
        self, analysis: GraphAnalysis, sizes: Sizes, *, inside: Collection[fx.Node] = frozenset()
    ) -> None:
        self._analysis = analysis
        self.readers: list[list[int]] = [[] for _ in analysis.nodes]
        self.num_bytes = [0] * len(analysis.nodes)
        position = {node: index for index, node in enumerate(analysis.nodes)}
        held: list[set[int]] = []  # buffers that live as long as a node's result is read
        for index, node in enumerate(analysis.nodes):
            read = {buffer for source in node.all_input_nodes for buffer in held[position[source]]}
            for buffer in read:
                self.readers[buffer].append(index)
            kind = analysis.kinds[index]
            if kind is NodeKind.WAIT:  # what was sent may go
                held.append({buffer for buffer in read if analysis.kinds[buffer] is NodeKind.START})
            elif kind is NodeKind.START:
                held.append({index} | read)
            elif kind is NodeKind.VIEW or node in inside:
                held.append(read)
                continue
            elif fills(node):
                held.append(held[position[cast(fx.Node, node.args[0])]])
                continue
            else:
                held.append({index})
            if kind not in (NodeKind.WAIT, NodeKind.OUTPUT) and not _is_owned(node):
                self.num_bytes[index] = sizes.num_bytes(node.meta.get("val"))

    def peak(self, order: Sequence[int]) -> tuple[int, int]:
        """Return the bytes alive at the worst moment and the position in ``order`` where it is."""
        alive = self.alive(order)
        peak = max(alive, default=0)
        return peak, alive.index(peak) if peak else 0

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return the bytes alive while each node of ``order`` runs."""
        place = {index: at for at, index in enumerate(order)}
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


def _is_owned(node: fx.Node) -> bool:
    """Return whether the caller keeps an input: aot_autograd calls its own ones "primals"."""
    return node.op == "placeholder" and node.name.startswith("primals")


Halves = tuple[fx.GraphModule, fx.GraphModule]


@final
class StepPeak:
    """Divides a joint graph as torch does, and counts the live bytes of both halves.

    A step's peak mostly stands at the beginning of backward, which begins with all that forward has
    kept. Forward may come as high before the step needs more memory.

    Args:
        unknown_size: taken for sizes that depend on data.
        divide: a joint graph into forward and backward.
        fuses: whether what compiles the halves makes kernels of several nodes, as Inductor does.

    Attributes:
        num_bytes: at the worst moment of both; 0 before the call, and without backward.
    """

    def __init__(
        self,
        unknown_size: int,
        divide: Callable[..., Halves],
        *,
        fuses: bool = False,
    ) -> None:
        self.num_bytes = 0
        self._unknown_size = unknown_size
        self._divide = divide
        self._fuses = fuses

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        """Return forward and backward."""
        halves = self._divide(gm, joint_inputs, **kwargs)
        sizes = Sizes(self._unknown_size)
        for half in halves:
            analysis = GraphAnalysis(half.graph)
            boundaries = find_boundaries(half.graph, sizes) if self._fuses else {}
            inside = inside_kernels(boundaries)
            peak, _ = LiveBytes(analysis, sizes, inside=inside).peak(range(len(analysis.nodes)))
            self.num_bytes = max(self.num_bytes, peak)
        return halves
