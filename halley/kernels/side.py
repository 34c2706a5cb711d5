# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""A second stream beside the current one, and a gate that holds a launch until another has begun."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from halley.kernels.launch import Launcher
from halley.kernels.layout import STARTED
from halley.kernels.peer import poll


_STARTED = tl.constexpr(STARTED)


@triton.jit(do_not_specialize=["num_programs"])
def gate_kernel(tickets, status, num_programs):
    """Wait until that many programs of another launch have started, or a wait has failed."""
    healthy = True
    while (poll(tickets + _STARTED, "gpu") < num_programs) & healthy:
        healthy = tl.atomic_add(status, 0, sem="relaxed", scope="gpu") == 0


_launch = Launcher(gate_kernel)


def open_gate(tickets: torch.Tensor, num_programs: int, status: torch.Tensor) -> None:
    """Hold the current stream until that many programs have counted themselves as started.

    They must be launched already, on another stream.
    """
    _launch(1, (tickets, status, num_programs), (), num_warps=1)


class _Side:
    """The stream beside, of one device, and what is still to be joined."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.forked, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.held = 0
        self.pending = False


_SIDES: dict[int, _Side] = {}


def _side() -> _Side:
    device = torch.cuda.current_device()
    if device not in _SIDES:
        _SIDES[device] = _Side()
    return _SIDES[device]


@contextmanager
def beside() -> Generator[torch.cuda.Stream]:
    """Give a stream beside the current one, which goes on when both are done.

    Within ``joined_later`` it goes on at once.
    """
    side, main = _side(), torch.cuda.current_stream()
    side.forked.record(main)
    side.stream.wait_event(side.forked)
    yield side.stream
    side.done.record(side.stream)
    if side.held:
        side.pending = True
    else:
        main.wait_event(side.done)


@contextmanager
def joined_later(*, on_gpu: bool) -> Generator[None]:
    """Let what is launched meanwhile run beside the work on the other stream, too.

    Nothing that this work writes may be read meanwhile, and nothing that it reads be given back.
    """
    if not on_gpu:
        yield
        return
    side = _side()
    side.held += 1
    try:
        yield
    finally:
        side.held -= 1
        if side.pending and not side.held:
            torch.cuda.current_stream().wait_event(side.done)
            side.pending = False
