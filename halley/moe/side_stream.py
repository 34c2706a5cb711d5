"""Work beside the experts: on a CUDA stream of its own, under their communication."""

from collections.abc import Callable
from functools import cache
from typing import final

import torch


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device that all layers share: their work never overlaps."""
    return torch.cuda.Stream(device)


@final
class SideStream:
    """A function of a tensor, begun at once; the caller goes on and takes the result later.

    On a GPU it runs on a stream of its own, between what the caller's stream has had queued and
    ``wait``; autograd runs its backward on that stream too, and orders it. Elsewhere, and while a
    compiler traces, which orders work itself, it runs where it stands.

    Args:
        function: differentiable; allocates what it returns.
        x: its argument, of any shape, made on the current stream.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self._stream: torch.cuda.Stream | None = None
        if not x.is_cuda or torch.compiler.is_compiling():
            self._y = function(x)
            return
        self._stream = _side_stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(self._stream)  # its memory is the caller's stream's to give away
        with torch.cuda.stream(self._stream):
            self._y = function(x)

    def wait(self) -> torch.Tensor:
        """Return the function's result, ready for the current stream."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._y.device)
            current.wait_stream(self._stream)
            self._y.record_stream(current)
        return self._y
