"""Run training steps with buffers of fixed sizes, and repeat a step in which they are too small.

A CUDA graph needs fixed sizes (``max_load``), because the host reads none while the graph runs. If
a rank then gets more rows than its buffers hold, the results of the step are undefined on all
ranks. ``BoundedStep`` finds this out before the optimizer uses them, and runs the step again
outside of the graph with buffers that grow. So no token is dropped and no job ends.

All ranks know of an overflow when the layer call in which it occurs has ended, also ranks that
exchange no rows with the overflowing rank (``_signal_overflow``). So no rank waits in a later call.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from halley.distributed.peers import Collective, all_gather_objects
from halley.fused.buffers import Workspace, Workspaces
from halley.fused.kernels.peer import is_overflow


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
    function, each rank waits for its GPU, and the ranks exchange whether buffers were too small.
    Then all ranks restore the buffers of the model (``model.buffers()``), set all gradients to
    zero, and run the microbatches since the last optimizer step again by ``exact``.

    Args:
        bounded: forward and backward of one microbatch, for example a function that captures a
            CUDA graph in an early call and replays it later. Gradients add to those in ``grad``.
        exact: the same without a graph.
        model: its layers have buffers of ``make_workspaces``.
        num_microbatches: number of calls before each optimizer step.

    Attributes:
        num_repeated: number of calls so far after which microbatches were repeated.
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
        self.num_repeated = 0

    def __call__(self, *args: Any) -> Any:
        if not self._microbatches:
            self._saved = [buffer.clone() for buffer in self._model.buffers()]
        # A captured function may copy later arguments into the tensors of an earlier call.
        self._microbatches.append(args if self._num_microbatches == 1 else copy.deepcopy(args))
        with _bounded_step():
            result = self._bounded(*args)
        if problem := _find_overflow():
            self._report(problem)
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

    def _report(self, problem: str) -> None:
        self.num_repeated += 1
        if self.num_repeated == 1 and (not dist.is_initialized() or dist.get_rank() == 0):
            remedy = "the step runs again with exact sizes, and num_repeated counts such steps"
            warnings.warn(f"{problem}; {remedy}", stacklevel=3)


@contextmanager
def _bounded_step() -> Iterator[None]:
    Workspaces.in_bounded_step = True
    try:
        yield
    finally:
        Workspaces.in_bounded_step = False


def _find_overflow() -> str:
    """Return why buffers of a rank were too small, or "" if they were not; reset them if so.

    A collective of all ranks of the job, also of those that share no experts: they may share other
    collectives of the step. Another failure of a kernel is a ``RuntimeError``.
    """
    workspaces = [workspace for each in _BOUNDED for workspace in each.all()]
    own = ""
    _wait_for_gpu()
    for workspace in workspaces:
        try:
            workspace.check()
        except RuntimeError as error:
            if not is_overflow(workspace.host_status):
                raise
            own = own or str(error)
    if not _any_rank(bool(own)):
        return ""
    group = dist.group.WORLD
    problems = all_gather_objects(own, group=group, operation="the report of a repeated step")
    # All kernels of all ranks have ended, so no rank reads or writes flags between these barriers.
    for workspace in workspaces:
        _reset(workspace)
    _wait_for_gpu()
    all_gather_objects("", group=group, operation="the start of a repeated step")
    return next(problem for problem in problems if problem)


def _reset(workspace: Workspace) -> None:
    """Set flags, counters and failures of a workspace to 0, as in a new one."""
    flags = workspace.context().routing_buffer.local
    for tensor in (flags, workspace.counters, workspace.status[:1], workspace.host_status):
        tensor.zero_()


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _any_rank(flag: bool) -> bool:
    """Return whether the flag is true on any rank of the job; a collective."""
    if not dist.is_initialized():
        return flag
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    found = torch.tensor(int(flag), device=device)
    with Collective("the check for too small buffers", group=dist.group.WORLD):
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)
