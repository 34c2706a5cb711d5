"""The routing table of all ranks, brought to the host while the device goes on working."""

from typing import final

import torch
import torch.distributed as dist

from halley.core.routing import count_tokens_per_expert
from halley.core.types import Routing
from halley.ops.exchange import gather_counts


@final
class CountTable:
    """Routed rows of each expert on each rank of a group; gathered when made, read when needed.

    Args:
        routing: this rank's routing.
        num_experts: experts of all ranks.
        group: the ranks; None for a rank on its own.

    Attributes:
        device_WE: the table, int64, on the device of the routing.
    """

    def __init__(
        self, routing: Routing, *, num_experts: int, group: dist.ProcessGroup | None
    ) -> None:
        counts_E = count_tokens_per_expert(routing.topk_idx_TK, num_experts)
        self.device_WE = gather_counts(counts_E, group=group)
        # Pinned and behind an event: later work may be queued before the host has read it.
        self._host_WE = self.device_WE.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if self.device_WE.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> torch.Tensor:
        """Wait for the copy; return ``(W, E)`` int64 on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host_WE
