"""Compile a training step whose microbatches run side by side: the entry point ``compile_step``.

capture   torch.compile traces the loss function: forward and backward graph (capture.py)
compare   the ranks compare their graphs (halley.compiler.consensus)
cut       at collectives and host reads (cut.py)
compile   each distinct segment once (segment_compiler.py)
measure   the first steps run one microbatch after another
schedule  rank 0 orders all items by the measured times, all ranks check (lane_schedule.py)
run       further steps in that order (executor.py)
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final, get_args

import torch
from torch import fx

from halley.compiler.consensus import compare_graphs, share_in_groups
from halley.compiler.graph_analysis import is_random
from halley.compiler.graph_collectives import ALL_TO_ALL, operator_name, unknown_collectives
from halley.compiler.pipeline import device_of
from halley.core.timeline import Recorder, Span
from halley.core.validation import build, check_choice, check_type
from halley.lanes.capture import TANGENT, Arguments, Capture, Inner, StepGraphs
from halley.lanes.cut import cut_step
from halley.lanes.executor import Executor, Order, one_after_another
from halley.lanes.lane_schedule import LanePlan, measured_durations, plan_lanes
from halley.lanes.segment_compiler import SegmentCompiler


_NUM_WARM_UP_STEPS = 1  # not measured, because the first step allocates memory
_NUM_MEASURED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class _Options:
    num_microbatches: int
    max_lanes: int
    recorder: Recorder | None
    timeout_s: float


def compile_step(
    loss_function: Callable[..., Any],
    num_microbatches: int,
    *,
    max_lanes: int = 2,
    inner: Inner = "inductor",
    recorder: Recorder | None = None,
    timeout_s: float = 300.0,
) -> "LaneStep":
    """Return a function that runs forward and backward of all microbatches of a batch.

    The all-to-alls of one microbatch run under the computation of another and under weight-gradient
    GEMMs. Losses and gradients are equal bit for bit to those of one microbatch after another.

    Args:
        loss_function: a module or a function of tensors that returns a scalar loss. It must be one
            graph, so MoE layers must use a strategy that can be traced, such as "functional".
        num_microbatches: parts of a batch, along the first dimension of its tensors.
        max_lanes: most microbatches that run side by side. Each holds its saved activations.
        inner: compiler of the segments: "inductor", or "eager" for operators one by one.
        recorder: records a span for each item; waits are in the stream "exposed".
        timeout_s: time that a rank waits for the others, in seconds.

    Example::

        step = compile_step(lambda tokens, targets: loss(model(tokens), targets), 2)
        losses = step(tokens, targets)  # (2,); gradients are in ``.grad``
    """
    for name, value in (("num_microbatches", num_microbatches), ("max_lanes", max_lanes)):
        check_type(value, int, name=name)
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    check_choice(inner, get_args(Inner), name="inner")
    options = _Options(
        num_microbatches=num_microbatches,
        max_lanes=max_lanes,
        recorder=recorder,
        timeout_s=timeout_s,
    )
    return LaneStep(loss_function, inner, options=options)


@final
class LaneStep:
    """A training step of several microbatches, made by ``compile_step``."""

    def __init__(
        self, loss_function: Callable[..., Any], inner: Inner, *, options: _Options
    ) -> None:
        self._capture = Capture(loss_function, inner=inner)
        self._compiler = SegmentCompiler(inner)
        self._options = options
        self._programs: dict[StepGraphs, _Program] = {}
        self._last: _Program | None = None

    @property
    def plan(self) -> LanePlan | None:
        """The plan for the graphs of the last step; None before planning or with a fallback."""
        return None if self._last is None else self._last.plan

    @property
    def fallback(self) -> str:
        """Reason why the last step's microbatches can never run side by side; "" if they can."""
        return "" if self._last is None else self._last.fallback

    @property
    def num_items(self) -> tuple[int, int]:
        """Number of items of a microbatch in the last step, and of distinct items in all steps."""
        return (0 if self._last is None else len(self._last.items)), len(self._compiler.calls)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of a batch; return the loss of each of k microbatches, ``(k,)``.

        The gradients of all microbatches are added to ``.grad``. A parameter with a gradient-ready
        hook gives each microbatch's gradient to the hook instead. ``batch`` are the arguments of
        the loss function for all microbatches, each ``(k * B, ...)``.

        Raises:
            RuntimeError: the ranks' collectives differ, or a rank is missing; on all ranks.
            ValueError: the batch cannot be divided, or ``Capture.collect`` rejects the function.
        """
        calls = [self._capture.collect(*each) for each in self._divide(batch)]
        graphs = calls[0].graphs
        if any(call.graphs is not graphs for call in calls):
            raise ValueError("the loss function must have the same graph for all microbatches")
        if graphs not in self._programs:
            self._programs[graphs] = _Program(graphs, self._compiler, options=self._options)
        self._last = self._programs[graphs]
        return self._last.run(calls)

    def _divide(self, batch: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        num_microbatches = self._options.num_microbatches
        for at, value in enumerate(batch):
            check_type(value, torch.Tensor, name=f"argument {at}")
            if value.dim() == 0 or value.shape[0] % num_microbatches:
                raise ValueError(
                    f"the first dimension of argument {at} (shape {tuple(value.shape)}) must be a "
                    f"multiple of num_microbatches ({num_microbatches})"
                )
        parts = [value.chunk(num_microbatches) for value in batch]
        return list(zip(*parts, strict=True))


@final
class _Program:
    """Runs the compiled items of a step's graphs; after measured steps, plans the items' order."""

    def __init__(self, graphs: StepGraphs, compiler: SegmentCompiler, *, options: _Options) -> None:
        self.plan: LanePlan | None = None  # None until steps are measured, or with a fallback
        self._options = options
        forward, backward = (each.graph for each in graphs.modules)
        self._groups, differing = compare_graphs(forward, backward, timeout_s=options.timeout_s)
        self.fallback = _find_fallback([*forward.nodes, *backward.nodes], differing)
        if self.fallback:
            warnings.warn(f"microbatches run one after another: {self.fallback}", stacklevel=4)
        self.items = cut_step(graphs)
        compiled = [compiler.compile(item) for item in self.items]
        self._keys = [key for key, _ in compiled]
        self._calls = [call for _, call in compiled]
        self._loss = f"f:{forward.output_node().args[0][0].name}"  # type: ignore[index, union-attr]
        self._inputs = [f"f:{node.name}" for node in forward.find_nodes(op="placeholder")]
        self._tangents = {
            f"f:{node.name}": torch.ones((), dtype=value.dtype, device=value.device)
            for node in backward.find_nodes(op="placeholder")
            if node.name.startswith(TANGENT)
            for value in (node.meta["val"],)
        }
        device = device_of(forward)
        self._clock, self._off = Recorder(device), Recorder(device, enabled=False)
        self._is_cuda = device.type == "cuda"
        self._num_steps = 0
        self._measured: list[list[Span]] = []  # spans of each measured step
        self._executor = self._build(
            one_after_another(self.items, num_microbatches=options.num_microbatches)
        )

    def run(self, calls: Sequence[Arguments]) -> torch.Tensor:
        """Run one step; return the losses ``(k,)``; after the last measured step, make the plan."""
        inputs = [
            {**dict(zip(self._inputs, call.values, strict=True)), **self._tangents}
            for call in calls
        ]
        is_planned = self.plan is not None or bool(self.fallback)
        is_measured = not is_planned and self._num_steps >= _NUM_WARM_UP_STEPS
        losses = self._executor.run(
            inputs,
            calls[0].values,
            recorder=self._clock if is_measured else self._options.recorder or self._off,
        )
        self._num_steps += 1
        if is_measured:
            self._measured.append(self._clock.collect())
        if len(self._measured) == _NUM_MEASURED_STEPS:
            self.plan = self._share_plan()
            self._measured.clear()
            self._executor = self._build(self.plan.order)
        return torch.stack(losses)

    def _build(self, order: Order) -> Executor:
        captures = self._is_cuda and self.plan is not None
        return Executor(self.items, self._calls, order, loss=self._loss, captures=captures)

    def _share_plan(self) -> LanePlan:
        """Plan the order on rank 0 from rank 0's measured times; return the plan on all ranks."""

        def make() -> dict[str, Any]:
            plan = plan_lanes(
                self.items,
                measured_durations(self.items, self._keys, self._measured),
                num_microbatches=self._options.num_microbatches,
                max_lanes=self._options.max_lanes,
            )
            return asdict(plan)

        return build(LanePlan, share_in_groups(self._groups, "lanes", make))


def _find_fallback(nodes: Sequence[fx.Node], differing: Sequence[int]) -> str:
    if unknown := unknown_collectives(nodes):
        return f"halley does not know how these operators communicate: {', '.join(unknown)}"
    if random := {operator_name(node) for node in nodes if is_random(node)}:
        return f"lanes would change the order of random numbers of {', '.join(sorted(random))}"
    if differing:
        return f"the computation of ranks {list(differing)} differs from that of rank 0"
    if not any(operator_name(node) == ALL_TO_ALL for node in nodes):
        return "the graph has no all-to-all"
    return ""
