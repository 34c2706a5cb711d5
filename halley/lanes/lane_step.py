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
from dataclasses import asdict, dataclass, replace
from typing import Any, final, get_args

import torch
from torch import fx, nn

from halley.compiler.consensus import Consensus, compare_graphs, share_in_groups
from halley.compiler.graph_analysis import is_random
from halley.compiler.graph_collectives import ALL_TO_ALL, operator_name, unknown_collectives
from halley.compiler.group_cost import measure_group_contention
from halley.compiler.pipeline import device_of
from halley.core.timeline import Recorder, Span
from halley.core.validation import build, check_choice, check_type
from halley.cost.hardware import predictor_of
from halley.cost.simulate import NO_CONTENTION
from halley.lanes.capture import TANGENT, Arguments, Capture, Inner, StepGraphs
from halley.lanes.cut import cut_step
from halley.lanes.executor import Executor, one_after_another
from halley.lanes.item_clock import ItemClock
from halley.lanes.lane_memory import StorageRecorder, predict_memory
from halley.lanes.lane_schedule import LanePlan, plan_lanes
from halley.lanes.lane_times import find_memory_shares, measured_durations
from halley.lanes.segment_compiler import SegmentCompiler
from halley.lanes.segment_graphs import can_capture
from halley.ops.sharded_parameters import ShardedParameters


# Steps are measured after this number of calls of each item: the first call allocates memory, and
# the second one records allocations. With several microbatches, both are in the first step.
_NUM_FIRST_CALLS = 2
_NUM_MEASURED_STEPS = 2
# With CUDA graphs, one more step is measured, in which each graph runs this often before the run
# that is measured: a busy GPU may have a lower clock rate (docs/LOG.md, 2026-11-29: Mixtral-8x7B).
_NUM_REPEATS = 4
_RANKS_BATCH = {"halley::take_slots_by_weight"}  # operators whose results need the whole batch
_ONE_AFTER_ANOTHER = "microbatches run one after another"


@dataclass(frozen=True, kw_only=True)
class _Options:
    num_microbatches: int
    max_lanes: int
    max_bytes: int | None
    divides_batch: bool
    recorder: Recorder | None
    timeout_s: float


def compile_step(
    loss_function: Callable[..., Any],
    num_microbatches: int,
    *,
    max_lanes: int = 2,
    max_bytes: int | None = None,
    divides_batch: bool = False,
    inner: Inner = "inductor",
    recorder: Recorder | None = None,
    timeout_s: float = 300.0,
) -> "LaneStep":
    """Return a function that runs forward and backward of all microbatches of a batch.

    The all-to-alls of one microbatch run under the computation of another and under weight-gradient
    GEMMs. Losses and gradients are equal bit for bit to those of one microbatch after another; on a
    GPU, GEMMs that leave SMs free for communication may sum in another order.

    On a GPU, ``.grad`` may have memory that the next step writes to. That step moves a ``.grad``
    that still exists to other memory, but not views of it: clone views that must live longer. The
    first step resets torch's peak memory statistics.

    Args:
        loss_function: a module or a function of tensors that returns a scalar loss. It must be one
            graph, so MoE layers must use a strategy that can be traced, such as "functional".
            Modules of FSDP2 (``fully_shard``) must be part of a module: their gradients are
            reduced once in each call of the step.
        num_microbatches: parts of a batch, along the first dimension of its tensors.
        max_lanes: most microbatches that run side by side. Each holds its saved activations.
        max_bytes: most bytes of the values between items, predicted for rank 0
            (``LanePlan.peak_bytes``). The step that makes the plan raises a ValueError, on all
            ranks, if every order needs more. None is no limit.
        divides_batch: compute the loss and the gradients of the whole batch: its routers drop the
            tokens that they drop of the undivided batch. The loss must be a mean over sequences.
            A weight-gradient GEMM then runs later only if this needs no more memory, by simulation.
        inner: compiler of the segments: "inductor", or "eager" for operators one by one. With
            "inductor", traced graphs are kept in the directory of Inductor's cache.
        recorder: records a span for each item, once there is a plan; waits are in the stream
            "exposed". On a GPU, the items of one CUDA graph have one span.
        timeout_s: time that a rank waits for the others, in seconds.

    Example::

        step = compile_step(lambda tokens, targets: loss(model(tokens), targets), 2)
        losses = step(tokens, targets)  # (2,); gradients are in ``.grad``
    """
    for name, value in (("num_microbatches", num_microbatches), ("max_lanes", max_lanes)):
        check_type(value, int, name=name)
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    check_type(max_bytes, int | None, name="max_bytes")
    check_choice(inner, get_args(Inner), name="inner")
    options = _Options(
        num_microbatches=num_microbatches,
        max_lanes=max_lanes,
        max_bytes=max_bytes,
        divides_batch=divides_batch,
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
        num_lanes = options.num_microbatches if options.divides_batch else 1
        self._capture = Capture(loss_function, inner=inner, num_lanes=num_lanes)
        self._compiler = SegmentCompiler(inner)
        self._sharded = ShardedParameters(loss_function)
        self._options = options
        self._compared: dict[StepGraphs, tuple[list[Consensus], str]] = {}
        self._programs: dict[StepGraphs, _Program] = {}
        self._last: _Program | None = None
        self._fallback = ""
        # Runs the batches that cannot be divided with equal results.
        self._undivided: LaneStep | None = None
        if num_lanes > 1:
            one = replace(options, num_microbatches=1)
            self._undivided = LaneStep(loss_function, inner, options=one)

    @property
    def plan(self) -> LanePlan | None:
        """The plan for the graphs of the last step; None before planning or with a fallback."""
        return None if self._last is None else self._last.plan

    @property
    def fallback(self) -> str:
        """Reason why the last step's microbatches can never run side by side; "" if they can."""
        return self._fallback

    @property
    def num_items(self) -> tuple[int, int]:
        """Number of items of a microbatch in the last step, and of distinct items in all steps."""
        return (0 if self._last is None else len(self._last.items)), len(self._compiler.calls)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of a batch; return the loss of each of k microbatches, ``(k,)``.

        With ``divides_batch``, return the loss of the whole batch, ``()``.

        The gradients of all microbatches are added to ``.grad``. A parameter with a gradient-ready
        hook gives each microbatch's gradient to the hook instead. ``batch`` are the arguments of
        the loss function for all microbatches, each ``(k * B, ...)``.

        Raises:
            RuntimeError: the ranks' collectives differ, or a rank is missing; on all ranks.
            ValueError: the batch cannot be divided, ``Capture.collect`` rejects the function, or
                each order of the items needs more than ``max_bytes``.
        """
        microbatches = self._divide(batch)
        with self._sharded.unsharded(len(microbatches)):
            return self._run(batch, microbatches)

    def _run(
        self, batch: Sequence[torch.Tensor], microbatches: Sequence[tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        calls = [self._capture.collect(*each) for each in microbatches]
        graphs = calls[0].graphs
        if any(call.graphs is not graphs for call in calls):
            raise ValueError("the loss function must have the same graph for all microbatches")
        if graphs not in self._compared:
            self._compared[graphs] = self._compare(graphs)
        groups, self._fallback = self._compared[graphs]
        if self._fallback and self._undivided:
            self._last = None
            return self._undivided(*batch)
        if graphs not in self._programs:
            self._programs[graphs] = _Program(
                graphs,
                self._compiler,
                groups=groups,
                is_planned=not self._fallback,
                captures=not self._sharded,
                options=self._options,
            )
        self._last = self._programs[graphs]
        losses = self._last.run(calls)
        return losses.mean() if self._options.divides_batch else losses

    def _compare(self, graphs: StepGraphs) -> tuple[list[Consensus], str]:
        """Compare the ranks' graphs; return their groups, and the reason of a fallback or ""."""
        forward, backward = (each.graph for each in graphs.modules)
        groups, difference = compare_graphs(forward, backward, timeout_s=self._options.timeout_s)
        nodes = [*forward.nodes, *backward.nodes]
        fallback = _find_fallback(nodes, difference, is_divided=self._undivided is not None)
        if fallback and self._options.num_microbatches > 1:
            result = "the batch is not divided" if self._undivided else _ONE_AFTER_ANOTHER
            warnings.warn(f"{result}: {fallback}", stacklevel=4)
        return groups, fallback

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

    def __init__(
        self,
        graphs: StepGraphs,
        compiler: SegmentCompiler,
        *,
        groups: Sequence[Consensus],
        is_planned: bool,
        captures: bool,
        options: _Options,
    ) -> None:
        self.plan: LanePlan | None = None  # None until steps are measured, or if not ``is_planned``
        self._problem = ""  # why there is no plan; the ranks share their answer only once
        self._groups, self._is_planned, self._options = groups, is_planned, options
        forward, backward = (each.graph for each in graphs.modules)
        self.items = cut_step(graphs)
        compiled = [compiler.compile(item) for item in self.items]
        self._keys = [key for key, _ in compiled]
        self._calls = [call for _, call in compiled]
        self._device = device = device_of(forward)
        self._captures = captures and device.type == "cuda"
        self._recorded = StorageRecorder(
            self.items,
            self._calls,
            {
                at: self._keys[at]
                for at, item in enumerate(self.items)
                if is_planned and self._captures and can_capture(item)
            },
            num_microbatches=options.num_microbatches,
        )
        self._loss = f"f:{forward.output_node().args[0][0].name}"  # type: ignore[index, union-attr]
        self._inputs = [f"f:{node.name}" for node in forward.find_nodes(op="placeholder")]
        share = 1 / options.num_microbatches if options.divides_batch else 1.0  # of the loss
        self._tangents = {
            f"f:{node.name}": torch.full((), share, dtype=value.dtype, device=value.device)
            for node in backward.find_nodes(op="placeholder")
            if node.name.startswith(TANGENT)
            for value in (node.meta["val"],)
        }
        self._clock, self._off = ItemClock(self._keys, device), Recorder(device, enabled=False)
        self._num_steps = 0
        self._measured: list[list[Span]] = []  # spans of each measured step
        self._first_order = one_after_another(self.items, num_microbatches=options.num_microbatches)
        self._rest_bytes = 0
        self._executor = Executor(
            self.items, self._recorded.calls, self._first_order, loss=self._loss
        )

    def run(self, calls: Sequence[Arguments]) -> torch.Tensor:
        """Run one step; return the losses ``(k,)``; after the last measured step, make the plan."""
        inputs = [
            {**dict(zip(self._inputs, call.values, strict=True)), **self._tangents}
            for call in calls
        ]
        if self._problem:
            raise ValueError(self._problem)
        needs_plan = self._is_planned and self.plan is None
        num_calls = self._num_steps * self._options.num_microbatches
        is_measured = needs_plan and num_calls >= _NUM_FIRST_CALLS
        if is_measured:
            what = f"launch {len(self._measured)}"
            launch_us = share_in_groups(self._groups, what, lambda: self._clock.launch_us)
            self._clock.wait_for_host(launch_us)
        if is_measured and not self._measured:
            self._rest_bytes = self._find_rest_bytes(calls[0].values)
            self._executor = self._build_measured()
        losses = self._executor.run(
            inputs,
            calls[0].values,
            recorder=self._clock if needs_plan else self._options.recorder or self._off,
            num_repeats=_NUM_REPEATS if len(self._measured) == _NUM_MEASURED_STEPS else 0,
        )
        self._num_steps += 1
        spans = self._clock.collect() if needs_plan else []
        if is_measured:
            self._measured.append(spans)
        if len(self._measured) == _NUM_MEASURED_STEPS + self._captures:
            measured, self._measured = self._measured, []
            lent = self._executor.release()
            self.plan = plan = self._share_plan(measured)
            self._executor = Executor(
                self.items,
                self._calls,
                plan.order,
                loss=self._loss,
                captures=self._captures,
                joins=self._captures,
                graph_bytes=plan.graph_bytes,
                sm_margins=plan.sm_margins,
                lent=lent,
            )
        return torch.stack(losses)

    def _build_measured(self) -> Executor:
        """Return the executor of measured steps. On GPUs, items are CUDA graphs, as in later steps.

        The kernels of a CUDA graph start with shorter gaps than those that Python launches. Each
        item is a graph here. The forecast of memory is that of joined ones, which need no less.
        """
        memory = self._recorded.record(rest_bytes=self._rest_bytes)
        graph_bytes = predict_memory(self.items, memory, self._first_order).graph_bytes
        return Executor(
            self.items,
            self._calls,
            self._first_order,
            loss=self._loss,
            captures=self._captures,
            graph_bytes=graph_bytes,
        )

    def _find_rest_bytes(self, parameters: Sequence[Any]) -> int:
        """Return the bytes that are allocated on the GPU without ``.grad``; 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        gradients = [each.grad for each in parameters if isinstance(each, nn.Parameter)]
        held = sum(each.nbytes for each in gradients if each is not None)
        return torch.cuda.memory_allocated(self._device) - held

    def _share_plan(self, measured: Sequence[Sequence[Span]]) -> LanePlan:
        """Plan the order on rank 0 from rank 0's measured times; return the plan on all ranks."""
        contention = NO_CONTENTION
        if self._device.type == "cuda" and self._groups:
            contention = measure_group_contention(self._groups[0], self._device)

        # Repeated graphs multiply the delays between ranks, so all-to-alls are measured without.
        steps = measured[:_NUM_MEASURED_STEPS]
        durations_us, at_full_clock_us = (
            measured_durations(self.items, self._keys, computing=each, communicating=steps)
            for each in (measured[-1], steps[-1])
        )
        predictor = predictor_of(self._device)

        def make() -> dict[str, Any] | str:
            try:
                plan = plan_lanes(
                    self.items,
                    durations_us,
                    num_microbatches=self._options.num_microbatches,
                    max_lanes=self._options.max_lanes,
                    memory=self._recorded.record(rest_bytes=self._rest_bytes),
                    max_bytes=self._options.max_bytes,
                    saves_memory=self._options.divides_batch,
                    contention=contention,
                    memory_shares=find_memory_shares(self.items, at_full_clock_us, predictor),
                )
            except ValueError as error:  # all ranks raise it
                return str(error)
            return asdict(plan)

        made = share_in_groups(self._groups, "lanes", make)
        if isinstance(made, str):
            self._problem = made
            raise ValueError(made)
        return build(LanePlan, made)


def _find_fallback(nodes: Sequence[fx.Node], difference: str, *, is_divided: bool) -> str:
    if unknown := unknown_collectives(nodes):
        return f"halley does not know how these operators communicate: {', '.join(unknown)}"
    if random := {operator_name(node) for node in nodes if is_random(node)}:
        return f"lanes would change the order of random numbers of {', '.join(sorted(random))}"
    if difference:
        return difference
    if not any(operator_name(node) == ALL_TO_ALL for node in nodes):
        return "the graph has no all-to-all"
    if is_divided and (ranked := {operator_name(node) for node in nodes} & _RANKS_BATCH):
        return f"these operators rank the tokens of the whole batch: {', '.join(sorted(ranked))}"
    return ""
