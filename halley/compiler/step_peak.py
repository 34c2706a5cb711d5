"""The most that a training step holds: the peaks of forward and of backward, known to both."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import fx

from halley.compiler.fusion import find_boundaries, inside_kernels
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.sizes import Sizes


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
