"""Count the forward passes that a GPU has ended, for a host that does not wait for the GPU."""

from typing import final

import torch


@final
class ForwardCount:
    """The number of ended forward passes of fused layers, also of those in CUDA graphs.

    After a forward pass, its rank knows whether a rank had too many rows, see ``bounded.py``.

    Attributes:
        num_calls: number of calls of ``add``. The replay of a CUDA graph makes none.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(mode=False):  # training cannot write tensors made in this mode
            self._count = torch.zeros(1, dtype=torch.int64, device=device)
            self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.num_calls = 0

    def add(self) -> None:
        """Add 1 once the GPU has ended its work so far; in a CUDA graph, in each replay."""
        self.num_calls += 1
        self._count += 1
        self._on_host.copy_(self._count, non_blocking=True)

    def read(self) -> int:
        """Return the number so far, without a wait."""
        return int(self._on_host)
