"""Count the live bytes of a graph in a given order, and the peak of a training step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from halley.compiler.fusion import find_boundaries, inside_kernels
from halley.compiler.gradient_ready import GradientHooks
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, Sizes, result_of


@final
class LiveBytes:
    """Counts the live bytes of a graph for any order of its nodes.

    A buffer is alive from the node that makes it to the last node that reads it or a view of it.
    The operand of a collective is alive until the wait has ended, an output until the end.
    Activations saved for backward are inputs, freed after their last reader. The caller owns
    parameters and inputs of the model, so they count as 0 bytes. The results of nodes in ``inside``
    stay inside of a kernel and have no buffer: a node that reads such a result keeps alive the
    buffers from which the kernel computes it.
    """

    def __init__(
        self, analysis: GraphAnalysis, sizes: Sizes, *, inside: Collection[fx.Node] = frozenset()
    ) -> None:
        self._analysis = analysis
        # For each node the indices of the nodes that keep its buffer alive, ascending.
        self.readers: list[list[int]] = [[] for _ in analysis.nodes]
        self.num_bytes = [0] * len(analysis.nodes)  # size of each node's buffer, 0 if it has none
        position = {node: index for index, node in enumerate(analysis.nodes)}
        held: list[set[int]] = []  # for each node the buffers that a reader of its result needs
        for index, node in enumerate(analysis.nodes):
            read = {buffer for source in node.all_input_nodes for buffer in held[position[source]]}
            for buffer in read:
                self.readers[buffer].append(index)
            kind = analysis.kinds[index]
            if kind is NodeKind.WAIT:  # a wait returns the start's buffer and frees the operand
                held.append({buffer for buffer in read if analysis.kinds[buffer] is NodeKind.START})
            elif kind is NodeKind.START:
                held.append({index} | read)
            elif kind is NodeKind.VIEW or node in inside:
                held.append(read)
                continue
            else:
                held.append({index})
            # aot_autograd names inputs that the caller owns "primals". They count as 0 bytes.
            is_owned = kind is NodeKind.INPUT and node.name.startswith("primals")
            if kind not in (NodeKind.WAIT, NodeKind.OUTPUT) and not is_owned:
                self.num_bytes[index] = sizes.num_bytes(result_of(node))

    def peak(self, order: Sequence[int]) -> int:
        return max(self.alive(order), default=0)

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return, for each position of an order, the live bytes while the node there runs."""
        place = {index: at for at, index in enumerate(order)}
        # Position of each buffer's last reader. -1: no reader, freed after the node that makes it.
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
@dataclass(eq=False, kw_only=True)
class StepPartitioner(CustomPartitionerFn):
    """Splits a joint graph into forward and backward; predicts the higher of their memory peaks.

    The peak ``num_bytes`` is mostly at the beginning of backward, when all saved activations are
    alive. If a pass raises the peak of forward up to this peak, the step needs no more memory.
    ``num_bytes`` is 0 before the call, and if nothing needs a gradient: no joint graph exists then.
    """

    split: Callable[..., Halves]  # partitioner of aot_autograd that does the split
    hooks: GradientHooks  # forward saves each parameter that has a gradient-ready hook
    unknown_size: int  # assumed for sizes that depend on data
    fuses: bool  # whether the inner compiler fuses nodes into kernels, as Inductor does
    num_bytes: int = 0

    def uuid(self) -> None:
        """Return None, so that Inductor caches no graph that this partitioner has split."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        forward, backward = halves = self.split(gm, joint_inputs, **kwargs)
        num_outputs = kwargs["num_fwd_outputs"]
        self.hooks.save_parameters(forward.graph, backward.graph, num_outputs=num_outputs)
        sizes = Sizes(self.unknown_size)
        for half in halves:
            analysis = GraphAnalysis(half.graph)
            boundaries = find_boundaries(half.graph, sizes) if self.fuses else {}
            live = LiveBytes(analysis, sizes, inside=inside_kernels(boundaries))
            self.num_bytes = max(self.num_bytes, live.peak(range(len(analysis.nodes))))
        return halves
