"""Call gradient-ready hooks of parameters while a compiled backward graph runs.

Autograd returns the gradients of a compiled backward graph when the whole graph has ended. A hook
receives a gradient as soon as the graph has computed it, and can start an all-reduce that overlaps
the rest of backward. The memory of the gradient is free once the hook has returned.
"""

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import fx

from halley.ops.gradient_hook import find_gradient_hook, run_gradient_hook


# Key in ``meta`` of an output node: positions of results whose strides Inductor must keep. Inductor
# of torch 2.11 fails if a result at such a position is None, so ``insert`` removes it.
_VISIBLE = "user_visible_output_idxs"


@final
class GradientHooks:
    """Inserts calls of the parameters' ``gradient_ready_hook`` into one compiled backward graph.

    Each call of forward saves for backward the parameters that have a hook, because several modules
    may share one compiled graph.
    """

    def __init__(self, example_inputs: Sequence[object]) -> None:
        self._positions = [
            at for at, value in enumerate(example_inputs) if find_gradient_hook(value)
        ]
        self._names: dict[int, str] = {}  # of parameters with hook and gradient, by input position

    @property
    def has_any(self) -> bool:
        """Whether backward calls any gradient-ready hook; known after ``save_parameters``."""
        return bool(self._names)

    def save_parameters(self, forward: fx.Graph, backward: fx.Graph, *, num_outputs: int) -> None:
        """Make forward return, and backward take, the parameters that have a hook and a gradient.

        The first ``num_outputs`` results of forward are its outputs, the rest is saved.
        """
        inputs = forward.find_nodes(op="placeholder")
        gradients = _results(backward)
        # Insert no hooks if these numbers differ: effect tokens or tensor subclasses cause that.
        if len(gradients) != len(inputs):
            return
        with_gradient = [at for at in self._positions if gradients[at] is not None]
        results = _results(forward)
        first = next(iter(results[num_outputs:]), None)
        if not with_gradient or first is None:
            return
        # Saved tensors come before saved sizes, so the first saved value is a tensor if any is.
        if not isinstance(first.meta.get("val"), torch.Tensor):
            return
        known = {node.name: node for node in backward.find_nodes(op="placeholder")}
        self._names = {at: inputs[at].name for at in with_gradient}
        missing = [inputs[at] for at in with_gradient if inputs[at].name not in known]
        with backward.inserting_before(known[first.name]):
            for parameter in missing:
                backward.placeholder(parameter.name).meta = parameter.meta.copy()
        forward.output_node().args = ((*results[:num_outputs], *missing, *results[num_outputs:]),)

    def insert(self, backward: fx.Graph) -> None:
        """After each gradient, insert the call of its hook; the graph then returns None for it.

        The graph must be in its final order, and is changed in place.
        """
        parameters = {node.name: node for node in backward.find_nodes(op="placeholder")}
        results = list(_results(backward))
        for at, name in self._names.items():
            gradient = results[at]
            if gradient is None or gradient.op == "placeholder":
                continue
            with backward.inserting_after(gradient):
                node = backward.call_function(run_gradient_hook, (gradient, parameters[name]))
            node.meta["val"] = None
            results[at] = None
        output = backward.output_node()
        output.args = (tuple(results),)
        if _VISIBLE in output.meta:
            visible = output.meta[_VISIBLE]
            output.meta[_VISIBLE] = [at for at in visible if results[at] is not None]
        backward.lint()


def _results(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    return tuple(cast(Sequence[fx.Node | None], graph.output_node().args[0]))
