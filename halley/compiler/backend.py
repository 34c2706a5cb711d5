"""The backend "halley" of ``torch.compile``: runs the passes of ``pipeline.py`` over graphs.

With the inner compiler "eager", the passes change the graphs of aot_autograd, whose operators then
run one by one. With "inductor", the passes are Inductor's ``post_grad_custom_post_pass``.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch._dynamo.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import (
    list_backends,  # pyright: ignore[reportUnknownVariableType]
    register_backend,
)
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch.fx.graph import _BoxedCodeGen  # pyright: ignore[reportPrivateUsage]
from torch.profiler import record_function

from halley.compiler.gradient_ready import GradientHooks
from halley.compiler.graph_analysis import NodeKind, node_kind
from halley.compiler.graph_memory import StepPartitioner
from halley.compiler.options import Options, parse_options
from halley.compiler.pipeline import (
    device_of,
    is_backward,
    report_unchanged,
    reserve_sms,
    run_passes,
)
from halley.compiler.wgrad.schedule import OrderReport


NAME = "halley"
Compiled = Callable[..., Any]


def run(gm: fx.GraphModule, *, options: dict[str, object] | None = None) -> OrderReport | None:
    """Run the compiler passes on a graph in place; return a report, or None if no order is planned.

    Use it for graphs that come from elsewhere: a training step traced by ``make_fx``, or the
    forward or backward graph of another backend. All ranks of the graph's process groups must call
    it. Option ``inner`` names the compiler that the graph will go to: predicted times depend on it.

    Raises:
        RuntimeError: the ranks' collectives differ, or a rank is missing.
        ValueError: an option is unknown, or its value is not allowed.
    """
    report = run_passes(gm.graph, parse_options(options))
    if report is not None:
        reserve_sms(gm.graph, report.sm_margins)
    gm.recompile()
    return report


@final
class Backend:
    """Compiles graphs of Dynamo; applies the passes to their forward and backward graphs.

    ``reports`` has a report of each forward or backward graph whose order was planned, oldest
    first. With ``plans_only``, the inner compiler does not run, and all graphs have reports.
    """

    def __init__(self, *, plans_only: bool = False) -> None:
        self.reports: list[OrderReport] = []
        self._plans_only = plans_only
        self._frames: set[int] = set()
        self._communicates = False
        self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """Make the graph-break check ignore earlier graphs: later graphs belong to a new model."""
        self._num_pending_before = _num_pending_frames()
        self._frames.clear()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: dict[str, object] | None = None,
    ) -> Compiled:
        """Return a function that runs a Dynamo graph; raise ``ValueError`` if options are wrong."""
        parsed = parse_options(options)
        self._warn_of_graph_break(gm)
        hooks = GradientHooks(example_inputs)
        if parsed.inner == "inductor" and not self._plans_only:
            from halley.compiler.inductor import compile_by_inductor

            return compile_by_inductor(
                gm,
                example_inputs,
                options=parsed,
                hooks=hooks,
                add_report=self.reports.append,
            )
        return self._compile_eager(gm, example_inputs, parsed, hooks=hooks)

    def _compile_eager(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        *,
        hooks: GradientHooks,
    ) -> Compiled:
        partitioner = StepPartitioner(
            split=min_cut_rematerialization_partition,
            hooks=hooks,
            unknown_size=options.unknown_size,
            fuses=False,
        )

        def compile_graph(half: fx.GraphModule, _: Sequence[Any]) -> Compiled:
            backward = is_backward(half.graph)
            report = run_passes(half.graph, options, step_peak=partitioner.num_bytes)
            if report is not None:
                reserve_sms(half.graph, report.sm_margins, in_all=backward and hooks.has_any)
            elif self._plans_only:
                report = report_unchanged(half.graph, options)
            if report is not None:
                self.reports.append(report)
            if backward:
                hooks.insert(half.graph)
            return _make_callable(half)

        compiler = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=partitioner,
            # Fused layers write to their ordering token, an input of both graphs. This option keeps
            # the writes in the graphs. Without it, torch would copy to the input after each graph.
            keep_inference_input_mutations=True,
        )
        return compiler(gm, example_inputs)

    def _warn_of_graph_break(self, gm: fx.GraphModule) -> None:
        """Warn once if the model is compiled as several graphs and any of them has collectives.

        One sign is graphs of several Python frames: a graph break starts a new frame, but a
        recompilation does not. Another sign is a frame that Dynamo gave up: Dynamo skips a frame
        with a graph break in a loop, and compiles the functions that this frame calls.
        """
        compile_id = CompileContext.current_compile_id()
        self._communicates = self._communicates or _communicates(gm.graph)
        self._frames.add(0 if compile_id is None else compile_id.frame_id or 0)
        # The frame of this graph is pending. Any other pending frame is one that Dynamo gave up.
        is_part = len(self._frames) > 1 or _num_pending_frames() - self._num_pending_before > 1
        if is_part and self._communicates and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "halley compiles the model in several graphs: computation of one graph cannot "
                "overlap communication of another. Compile the whole model, and find graph breaks "
                "with fullgraph=True",
                stacklevel=2,
            )


def register() -> Backend:
    """Register the backend "halley" if torch does not list it, call its ``begin``, and return it.

    If Halley is installed, its entry point registers the backend. ``Backend.reports`` has reports.
    """
    BACKEND.begin()
    if NAME not in list_backends():
        register_backend(BACKEND, name=NAME)  # pyright: ignore[reportArgumentType]
    return BACKEND


def compile_function(
    function: Callable[..., Any], *, fullgraph: bool = True, **options: Any
) -> Callable[..., Any]:
    """Return a function that runs ``function`` compiled by ``torch.compile`` with ``Backend``.

    Raises a ``ValueError`` if an option is unknown or has a value that is not allowed.
    """
    parse_options(options)
    compiled: Any = torch.compile(  # pyright: ignore[reportUnknownMemberType]
        function, backend=Backend(), fullgraph=fullgraph, options=options or None
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        # The splits of all-to-alls are numbers that the graph reads from tensors. Without this
        # flag, Dynamo breaks the graph at each read.
        settings = torch._dynamo.config
        with settings.patch(capture_scalar_outputs=True):  # pyright: ignore[reportUnknownMemberType]
            return compiled(*args, **kwargs)

    return call


def _communicates(graph: fx.Graph) -> bool:
    names = (f"{node.target}" for node in graph.nodes if node.op == "call_function")
    return any("c10d" in name for name in names)


def _num_pending_frames() -> int:
    """Return how many Python frames of this process Dynamo has begun to trace but not compiled."""
    return counters["frames"]["total"] - counters["frames"]["ok"]


@final
class _ProfiledInterpreter(fx.Interpreter):
    """Interprets a graph node by node, with a profiler record for each node that computes."""

    def run_node(self, n: fx.Node) -> Any:
        if node_kind(n) not in (NodeKind.COMPUTE, NodeKind.FUSED):
            return super().run_node(n)
        with record_function(f"halley::{n.name}"):
            return super().run_node(n)


def _make_callable(gm: fx.GraphModule) -> Compiled:
    """Return a function that runs a graph on a list of arguments and clears it to free memory.

    The operators skip the autograd dispatch key: autograd records nothing here, and for collectives
    and Halley's operators that key runs Python code. The function runs generated code, because an
    interpreter would cost the host about 10 us for each node. Only under a profiler on a CPU it
    interprets the graph, to record each node; on a GPU the profiler sees the kernels.
    """
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    on_cpu = device_of(gm.graph).type == "cpu"

    def call(args: list[Any]) -> Any:
        # torch has no public function that tells whether a profiler runs: call a private one.
        is_profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return (
                _ProfiledInterpreter(gm).boxed_run(args)
                if on_cpu and is_profiled
                else gm.forward(args)
            )

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


BACKEND = Backend()  # torch.compile finds it by the entry point in pyproject.toml
