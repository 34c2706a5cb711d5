"""Gradients of parameters handed over as soon as a backward graph has made them.

What waits for them, such as their sums over ranks, then runs beside the rest of backward, and their
memory is free again once they are taken.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.graph_memory import Halves
from halley.ops.gradient_hook import find_gradient_hook, run_gradient_hook


Divide = Callable[..., Halves]
# In the meta of an output: of which results Inductor keeps the strides. torch 2.11 takes none for
# a node.
_VISIBLE = "user_visible_output_idxs"


@final
class EarlyGradients:
    """Hands over the gradients of one graph's parameters that have a ``gradient_ready_hook``.

    Each call of forward saves these parameters for its backward: one graph may run on those of
    several modules.

    Args:
        example_inputs: of the graph.
    """

    def __init__(self, example_inputs: Sequence[object]) -> None:
        self._positions = [
            at for at, value in enumerate(example_inputs) if find_gradient_hook(value)
        ]
        self._names: dict[int, str] = {}

    @property
    def hands_over(self) -> bool:
        """Whether the graph's backward hands any gradient over."""
        return bool(self._names)

    def dividing(self, divide: Divide) -> Divide:
        """Return what divides a joint graph as ``divide`` does, and then keeps the parameters."""

        def run(gm: fx.GraphModule, inputs: Sequence[object], **kwargs: Any) -> Halves:
            forward, backward = divide(gm, inputs, **kwargs)
            self._keep(forward.graph, backward.graph, num_outputs=kwargs["num_fwd_outputs"])
            return forward, backward

        return run

    def _keep(self, forward: fx.Graph, backward: fx.Graph, *, num_outputs: int) -> None:
        """Hand parameters that have gradients on from forward to backward.

        Args:
            forward, backward: what a joint graph was divided into, changed.
            num_outputs: of forward, but for what it saves.
        """
        inputs = forward.find_nodes(op="placeholder")
        gradients = _results(backward)
        if len(gradients) != len(inputs):  # not one for each input: tokens of effects, subclasses
            return
        made = [at for at in self._positions if gradients[at] is not None]
        results = _results(forward)
        first = next(iter(results[num_outputs:]), None)  # saved; tensors come before numbers
        if not made or first is None or not isinstance(first.meta.get("val"), torch.Tensor):
            return
        known = {node.name: node for node in backward.find_nodes(op="placeholder")}
        self._names = {at: inputs[at].name for at in made}
        missing = [inputs[at] for at in made if inputs[at].name not in known]
        with backward.inserting_before(known[first.name]):
            for parameter in missing:
                backward.placeholder(parameter.name).meta = parameter.meta.copy()
        forward.output_node().args = ((*results[:num_outputs], *missing, *results[num_outputs:]),)

    def take(self, backward: fx.Graph) -> None:
        """Hand gradients over behind the nodes that make them, and return them no more.

        Args:
            backward: in the order in which it will run, changed.
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
