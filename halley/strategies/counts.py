"""The routing table of all ranks, brought to the host while the device goes on working."""

from typing import final

import numpy as np
import torch
import torch.distributed as dist

from halley.ops.exchange import gather_counts


@final
class CountTable:
    """Routed rows of each expert on each rank of a group; gathered when made, read when needed.

    Args:
        keys_N: this rank's routed slots, sorted: expert ids, then larger values for dropped ones.
        num_experts: experts of all ranks.
        group: the ranks; None for a rank on its own.
    """

    def __init__(
        self, keys_N: torch.Tensor, *, num_experts: int, group: dist.ProcessGroup | None
    ) -> None:
        # In sorted keys a search finds where each expert ends: no atomics, no host read.
        experts_E = torch.arange(num_experts, dtype=keys_N.dtype, device=keys_N.device)
        ends_E = torch.searchsorted(keys_N, experts_E, right=True)
        ends_WE = gather_counts(ends_E, group=group)
        # Pinned and behind an event: later work may be queued before the host has read it.
        self._ends_WE = ends_WE.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if ends_WE.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> np.ndarray:
        """Wait for the copy; return the counts, ``(W, E)`` int64."""
        if self._copied is not None:
            self._copied.synchronize()
        return np.diff(self._ends_WE.numpy(), axis=1, prepend=0)
