"""The backend "halley" of torch.compile: passes over forward and backward graphs.

With the inner compiler "eager" the passes see the graphs that aot_autograd has divided, and their
operators then run one by one. With "inductor" they run as Inductor's last pass over its own graphs,
and what must stay in order is pinned for its scheduler.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
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

from halley.compiler.gradient_ready import EarlyGradients
from halley.compiler.graph_analysis import NodeKind, node_kind
from halley.compiler.graph_memory import StepPeak
from halley.compiler.options import Options, parse_options
from halley.compiler.pipeline import (
    device_of,
    find_batch_inputs,
    is_backward,
    report_as_is,
    run_passes,
)
from halley.compiler.reserved_sms import leave_sms_beside
from halley.compiler.wgrad.schedule import OrderReport


NAME = "halley"
Compiled = Callable[..., Any]


def run(
    gm: fx.GraphModule,
    *,
    options: dict[str, object] | None = None,
    batch_inputs: Sequence[str] = (),
) -> OrderReport | None:
    """Run the passes over a graph of operators, in place; a collective of the graph's groups.

    For graphs that something else has made: a training step traced by ``make_fx``, or another
    backend's forward or backward.

    Args:
        gm: with functional collectives.
        options: as of the backend; ``inner`` says what will compile the graph, for its price.
        batch_inputs: names of the inputs that have the batch as their first dimension. Without
            any, as in a graph of backward, nothing runs in parts.

    Returns:
        What changed, or None where the graph stays as it is.

    Raises:
        RuntimeError: ranks have different collectives, or one did not come in time.
        ValueError: an option is unknown or not allowed, or there is no such input.
    """
    names = {node.name for node in gm.graph.find_nodes(op="placeholder")}
    if unknown := sorted(set(batch_inputs) - names):
        raise ValueError(f"batch_inputs ({', '.join(unknown)}) must be inputs of the graph")
    report = run_passes(gm.graph, parse_options(options), batch_inputs=batch_inputs)
    if report is not None:
        leave_sms_beside(gm.graph, report.sm_margins)
    gm.recompile()
    return report


@final
class Backend:
    """Compiles the graphs that Dynamo finds; remembers which, to say where overlap ends.

    Args:
        plans_only: the inner compiler is priced and not run, and graphs that stay as they are get
            reports, too.

    Attributes:
        reports: of the graphs that passes have changed, oldest first.
    """

    def __init__(self, *, plans_only: bool = False) -> None:
        self.reports: list[OrderReport] = []
        self._plans_only = plans_only
        self._frames: set[int] = set()
        self._communicates = False
        self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """Take what is compiled from now on for the parts of one model."""
        self._num_undone_before = _num_undone()
        self._frames.clear()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: dict[str, object] | None = None,
    ) -> Compiled:
        """Compile one of Dynamo's graphs.

        Raises:
            ValueError: an option is unknown or not allowed.
        """
        parsed = parse_options(options)
        self._note(gm)
        inputs = _find_inputs(example_inputs)
        early = EarlyGradients(example_inputs)
        if parsed.inner == "inductor" and not self._plans_only:
            from halley.compiler.inductor import compile_by_inductor

            return compile_by_inductor(
                gm,
                example_inputs,
                options=parsed,
                inputs=inputs,
                early=early,
                keep=self.reports.append,
            )
        return self._compile_eager(gm, example_inputs, parsed, inputs=inputs, early=early)

    def _compile_eager(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        *,
        inputs: Sequence[int],
        early: EarlyGradients,
    ) -> Compiled:
        divide = early.dividing(min_cut_rematerialization_partition)
        step_peak = StepPeak(options.unknown_size, divide)

        def compile_graph(part: fx.GraphModule, _: Sequence[Any]) -> Compiled:
            names = find_batch_inputs(part.graph, inputs)
            report = run_passes(
                part.graph, options, batch_inputs=names, step_peak=step_peak.num_bytes
            )
            backward = is_backward(part.graph)
            if report is not None:
                always = backward and early.hands_over
                leave_sms_beside(part.graph, report.sm_margins, always=always)
                part.recompile()
            elif self._plans_only:
                report = report_as_is(part.graph, options)
            if report is not None:
                self.reports.append(report)
            if backward:
                early.take(part.graph)
            return _boxed(part)

        compiler = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=step_peak,
            # Fused layers write to one input in forward and in backward: each in its graph.
            keep_inference_input_mutations=True,
        )
        return compiler(gm, example_inputs)

    def _note(self, gm: fx.GraphModule) -> None:
        """Warn once if a graph that communicates is not the whole model.

        It is not if there are graphs of several frames, of which what follows a graph break is one,
        or if Dynamo gave up a frame: it skips one that breaks in a loop and compiles what that
        calls. A frame that is compiled again is not another graph.
        """
        compile_id = CompileContext.current_compile_id()
        self._communicates = self._communicates or _communicates(gm.graph)
        self._frames.add(0 if compile_id is None else compile_id.frame_id or 0)
        # This frame is not done yet; another that is not was given up.
        is_part = len(self._frames) > 1 or _num_undone() - self._num_undone_before > 1
        if is_part and self._communicates and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "halley compiles the model in parts: computation of one graph does not hide "
                "communication of another. Compile it as a whole, and look for graph breaks with "
                "fullgraph=True",
                stacklevel=2,
            )


def register() -> Backend:
    """Return what ``torch.compile(model, backend="halley")`` uses, with its reports.

    Makes the name known where the package runs without being installed. Called again, it says that
    another model follows.
    """
    BACKEND.begin()
    if NAME not in list_backends():
        register_backend(BACKEND, name=NAME)  # pyright: ignore[reportArgumentType]
    return BACKEND


def _find_inputs(example_inputs: Sequence[Any]) -> list[int]:
    """Return the positions of tensors that come with each call: no parameters, no buffers."""
    return [
        at
        for at, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and getattr(value, "_dynamo_static_input_type", None) is None
    ]


def _communicates(graph: fx.Graph) -> bool:
    """Return whether one of Dynamo's graphs has collectives, which it calls by functions."""
    names = (f"{node.target}" for node in graph.nodes if node.op == "call_function")
    return any("c10d" in name for name in names)


def _num_undone() -> int:
    """Return how many frames Dynamo has begun and not compiled in this process, of any model."""
    return counters["frames"]["total"] - counters["frames"]["ok"]


@final
class _Traced(fx.Interpreter):
    """Runs a graph node by node, and shows the profiler what computes."""

    def run_node(self, n: fx.Node) -> Any:
        if node_kind(n) not in (NodeKind.COMPUTE, NodeKind.FUSED):
            return super().run_node(n)
        with record_function(f"halley::{n.name}"):
            return super().run_node(n)


def _boxed(gm: fx.GraphModule) -> Compiled:
    """Return a function that takes its arguments in a list, empties it, and frees after last use.

    It runs past autograd, which has nothing to record here, and whose way leads through Python for
    collectives and for Halley's operators. Code is generated from the graph: an interpreter would
    take ten microseconds for each node, and the host of a GPU has no more. Only a profiled CPU is
    shown node by node; a GPU shows its kernels by itself.
    """
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    on_cpu = device_of(gm.graph).type == "cpu"

    def call(args: list[Any]) -> Any:
        # Torch tells by no public name whether a profiler runs.
        is_traced = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return _Traced(gm).boxed_run(args) if on_cpu and is_traced else gm.forward(args)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


BACKEND = Backend()  # of that name; torch finds it by the entry point in pyproject.toml
