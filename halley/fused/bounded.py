"""Run training steps with buffers of fixed sizes, and repeat a step in which they are too small.

A CUDA graph needs fixed sizes (``max_load``), because the host reads none while the graph runs. If
a rank then gets more rows than its buffers hold, the results of the step are undefined on all
ranks. ``BoundedStep`` finds this out before the optimizer uses them, and runs the step again
outside of the graph with buffers that grow. So no token is dropped and no job ends.

All ranks know of an overflow when the layer call in which it occurs has ended, also ranks that
exchange no rows with the overflowing rank (``_signal_overflow``). So no rank waits in a later call.
"""

import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from halley.core.timeline import CURRENT_OPERATION
from halley.distributed.peers import Collective, all_gather_objects
from halley.fused.buffers import Workspace, Workspaces
from halley.fused.kernels.peer import is_overflow


_POLL_S = 50e-6
# Buffers with ``max_load``, of all layers of this process. The references are weak: strategies own
# the buffers.
_BOUNDED: "weakref.WeakSet[Workspaces]" = weakref.WeakSet()


def make_workspaces(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    max_load: float,
    tp_size: int = 1,
) -> Workspaces:
    """Return buffers that have ``max_load`` in a ``BoundedStep``, and elsewhere grow."""
    workspaces = Workspaces(group, device, tp_size=tp_size)
    workspaces.bounded = Workspaces(group, device, tp_size=tp_size, max_load=max_load)
    _BOUNDED.add(workspaces.bounded)
    return workspaces


@final
class BoundedStep:
    """Run forward and backward of microbatches in buffers of fixed sizes; repeat them if necessary.

    A call returns what the function returns. It is a collective of all ranks of the job. After the
    function, each rank waits for the end of the last forward pass of a layer on its GPU, and the
    ranks exchange, on their CPUs, whether buffers were too small. So backward still runs when the
    call returns, and the host can start the optimizer. If buffers were too small, all ranks restore
    the buffers of the model (``model.buffers()``), set all gradients to zero, and run the
    microbatches since the last optimizer step again by ``exact``. A failure of a kernel is a
    ``RuntimeError``, that of a kernel of backward in the next call.

    Args:
        bounded: forward and backward of one microbatch, for example a function that captures a
            CUDA graph in an early call and replays it later. Gradients add to those in ``grad``.
        exact: the same without a graph.
        model: its layers have buffers of ``make_workspaces``.
        num_microbatches: number of calls before each optimizer step.

    Attributes:
        num_repeated: number of calls so far after which microbatches were repeated.
        needed_load: a ``max_load`` with room for the layers in which these calls exceeded it. Later
            layers of the same calls may need more.
    """

    def __init__(
        self,
        bounded: Callable[..., Any],
        exact: Callable[..., Any],
        *,
        model: nn.Module,
        num_microbatches: int = 1,
    ) -> None:
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches ({num_microbatches}) must be at least 1")
        self._bounded, self._exact, self._model = bounded, exact, model
        self._num_microbatches = num_microbatches
        self._microbatches: list[tuple[Any, ...]] = []  # arguments since the last optimizer step
        self._saved: list[torch.Tensor] = []
        self._forwards = _Forwards()
        self.num_repeated, self.needed_load = 0, 0.0

    def __call__(self, *args: Any) -> Any:
        if not self._microbatches:
            self._saved = [buffer.clone() for buffer in self._model.buffers()]
        # A captured function may copy later arguments into the tensors of an earlier call.
        self._microbatches.append(args if self._num_microbatches == 1 else copy.deepcopy(args))
        with self._forwards.counted(), _bounded_step():
            result = self._bounded(*args)
        self._forwards.wait()
        problem, needed_load = _find_overflow()
        if problem:
            self._report(problem, needed_load)
            self._restore()
            for microbatch in self._microbatches:
                result = self._exact(*microbatch)
        if len(self._microbatches) == self._num_microbatches:
            self._microbatches.clear()
        return result

    @torch.no_grad()
    def _restore(self) -> None:
        for buffer, saved in zip(self._model.buffers(), self._saved, strict=True):
            buffer.copy_(saved)
        for parameter in self._model.parameters():
            if parameter.grad is not None:  # keep its memory, whose address a graph has
                parameter.grad.zero_()

    def _report(self, problem: str, needed_load: float) -> None:
        self.num_repeated += 1
        self.needed_load = max(self.needed_load, needed_load)
        if self.num_repeated == 1 and (not dist.is_initialized() or dist.get_rank() == 0):
            needed = f"this layer needs a max_load of {needed_load}; " if needed_load else ""
            remedy = "the step runs again with exact sizes, and num_repeated counts such steps"
            warnings.warn(f"{problem}; {needed}{remedy}", stacklevel=3)


@final
class CapturedStep:
    """Forward and backward of a microbatch: the first call runs, the second captures, later replay.

    A replay starts all kernels of the step by one call of the host, so the host's time for each
    kernel no longer limits the step. Gradients add to those in ``.grad``, as without a graph. This
    takes time and memory for a copy, unless ``.grad`` is None (``zero_grad()``).

    The capture frees cuBLAS's workspaces of all streams. Capture a graph of your own after this one
    if cuBLAS had run on its stream before the capture.

    Args:
        step: forward and backward. It must not read values from the GPU, so Halley's layers need
            ``max_load``.
        model: the parameters whose gradients ``step`` computes. Their ``.grad`` has memory of the
            graph, which the next call overwrites: clone gradients that must live longer.
        capture: makes a function that runs ``step`` in its first call, captures it in its second
            call, and replays the graph in this and later calls. By default, arguments and result
            of ``step`` are tensors, and each call overwrites the result of the last one.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        model: nn.Module,
        capture: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._captured = _Graph(step) if capture is None else capture(step)
        self._parameters = list(model.parameters())
        self._num_calls = 0
        self._gradients: list[torch.Tensor | None] = []  # that the graph writes

    def __call__(self, *args: Any) -> Any:
        """Return the result of the step."""
        self._num_calls += 1
        if self._num_calls == 1:
            return self._captured(*args)
        added = [each.grad for each in self._parameters]
        if self._num_calls == 2:
            for parameter in self._parameters:
                parameter.grad = None  # so that backward writes a gradient and does not add to it
            result = self._captured(*args)
            self._gradients = [each.grad for each in self._parameters]
        else:
            # The replay overwrites its gradients.
            added = [
                old.clone() if old is not None and old is own else old
                for old, own in zip(added, self._gradients, strict=True)
            ]
            result = self._captured(*args)
        for parameter, own, old in zip(self._parameters, self._gradients, added, strict=True):
            if own is not None and old is not None:
                own += old
            parameter.grad = old if own is None else own
        return result


@final
class _Graph:
    """Runs a function of tensors, then captures it in a CUDA graph, then replays the graph."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self._run, self._is_first = run, True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._args: list[torch.Tensor] = []
        self._result = torch.empty(0)

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        if self._is_first:
            self._is_first = False
            return self._run(*args)
        if self._graph is None:
            self._args, self._graph = [each.clone() for each in args], torch.cuda.CUDAGraph()
            # Free cuBLAS's workspaces, 32 MiB for each thread and stream: the capture allocates its
            # own. Backward runs in this thread, so that it needs no second one.
            torch._C._cuda_clearCublasWorkspaces()
            # "thread_local" allows the watchdog thread of NCCL to query events during the capture.
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                self._result = self._run(*self._args)
        for own, given in zip(self._args, args, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result


@contextmanager
def _bounded_step() -> Iterator[None]:
    Workspaces.in_bounded_step = True
    try:
        yield
    finally:
        Workspaces.in_bounded_step = False


@final
class _Forwards:
    """Waits until the GPU has ended the forward passes of a step, also of a replayed graph."""

    def __init__(self) -> None:
        # By workspace: the number of forward passes of a step, and the count at the end of a step.
        self._num_each: dict[Workspace, int] = {}
        self._targets: dict[Workspace, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the forward passes that the host starts; a replay starts as many as its capture.

        A failure that became known after the last step is a ``RuntimeError``.
        """
        before: dict[Workspace, tuple[int, int]] = {}
        for each in _bounded_workspaces():
            each.check()
            before[each] = each.ended.num_calls, each.ended.read()
        yield
        for each in _bounded_workspaces():
            num_calls, num_ended = before.get(each, (0, 0))
            if each.ended.num_calls > num_calls:
                self._num_each[each] = each.ended.num_calls - num_calls
            self._targets[each] = num_ended + self._num_each.get(each, 0)

    def wait(self) -> None:
        """Return when these forward passes have ended, or when the GPU has no work left."""
        with CURRENT_OPERATION.waiting("the forward passes of a step"):
            while self._are_running() and not torch.cuda.current_stream().query():
                time.sleep(_POLL_S)

    def _are_running(self) -> bool:
        return any(each.ended.read() < target for each, target in self._targets.items())


def _bounded_workspaces() -> list[Workspace]:
    return [workspace for each in _BOUNDED for workspace in each.all()]


def _find_overflow() -> tuple[str, float]:
    """Return why buffers of a rank were too small and which ``max_load`` has room; reset them.

    If no buffers were too small, the reason is "" and nothing is reset. The load is 0 if it was
    the number of tokens that was too large.

    A collective of all ranks of the job, also of those that share no experts: they may share other
    collectives of the step. Another failure of a kernel is a ``RuntimeError``.
    """
    workspaces = _bounded_workspaces()
    own, own_load = "", 0.0
    for workspace in workspaces:
        try:
            workspace.check()
        except RuntimeError as error:
            if not is_overflow(workspace.host_status):
                raise
            own = own or str(error)
            own_load = max(own_load, workspace.needed_load())
    if not _any_rank(bool(own)):
        return "", 0.0
    _wait_for_gpu()
    group = dist.group.WORLD
    operation = "the report of a repeated step"
    reports = all_gather_objects((own, own_load), group=group, operation=operation)
    # All kernels of all ranks have ended, so no rank reads or writes flags between these barriers.
    for workspace in workspaces:
        _reset(workspace)
    _wait_for_gpu()
    all_gather_objects("", group=group, operation="the start of a repeated step")
    return next(problem for problem, _ in reports if problem), max(load for _, load in reports)


def _reset(workspace: Workspace) -> None:
    """Set flags, counters and failures of a workspace to 0, as in a new one."""
    flags = workspace.context().routing_buffer.local
    for tensor in (flags, workspace.counters, workspace.status[:1], workspace.host_status):
        tensor.zero_()


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _any_rank(flag: bool) -> bool:
    """Return whether the flag is true on any rank of the job; a collective of their CPUs."""
    if not dist.is_initialized():
        return flag
    assert dist.group.WORLD is not None
    group = _cpu_group(dist.group.WORLD)
    found = torch.tensor(int(flag))
    with Collective("the check for too small buffers", group=group):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found)


@cache
def _cpu_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of all ranks of the job. The first call for a job is a collective."""
    if dist.get_backend() == "gloo":
        return world
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
