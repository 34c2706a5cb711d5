"""One model traced once, its graphs run with each of several lists of passes, step by step."""

import warnings
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from halley.compiler.options import Options
from halley.compiler.pipeline import find_batch_inputs, run_passes
from halley.compiler.wgrad.schedule import OrderReport
from tests.compiler.model_case import Model


@final
class Variants:
    """A backend of torch.compile that keeps a copy of each graph for each list of passes.

    Tracing takes most of a test's time, and is the same for all of them.

    Args:
        options: by name of the variant.

    Attributes:
        current: the variant that runs.
        reports: of each variant, forward first.
        graphs: of each variant, forward first.
    """

    def __init__(self, options: dict[str, Options]) -> None:
        self.options = options
        self.current = next(iter(options))
        self.reports: dict[str, list[OrderReport | None]] = {name: [] for name in options}
        self.graphs: dict[str, list[fx.Graph]] = {name: [] for name in options}

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        inputs = [
            at for at, value in enumerate(example_inputs) if not isinstance(value, nn.Parameter)
        ]

        def compile_graph(part: fx.GraphModule, _: Sequence[Any]) -> Any:
            names = find_batch_inputs(part.graph, inputs)
            copies: dict[str, fx.GraphModule] = {}
            for name, options in self.options.items():
                graph = fx.Graph(owning_module=part)
                graph.output(graph.graph_copy(part.graph, {}))
                report = run_passes(graph, options, batch_inputs=names)
                self.reports[name].append(report)
                self.graphs[name].append(graph)
                copies[name] = fx.GraphModule(part, graph)

            def call(args: list[Any]) -> Any:
                return fx.Interpreter(copies[self.current]).boxed_run(args)

            call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
            return call

        compiler = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiler(gm, example_inputs)


def compile_variants(model: nn.Module, variants: Variants) -> Model:
    """Return the compiled model; call it within ``whole_graphs``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it traces
        return torch.compile(model, backend=variants, fullgraph=True)
