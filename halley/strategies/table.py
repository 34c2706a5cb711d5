"""What strategies with an all-to-all share: the routing table, the order of arrivals."""

from typing import final

import numpy as np
import torch
import torch.distributed as dist

from halley.core.routing import expert_starts, order_by_expert
from halley.core.types import DispatchPlan
from halley.ops.exchange import gather_table
from halley.ops.permute import Permutation


@final
class RoutingTable:
    """Where each expert's slots start on each rank; gathered when made, read when needed.

    Args:
        keys_N: this rank's sorted keys, as from ``sort_slots``.
        num_experts: experts of all ranks.
        group: the ranks; None for a rank on its own.
    """

    def __init__(
        self, keys_N: torch.Tensor, *, num_experts: int, group: dist.ProcessGroup | None
    ) -> None:
        starts_WE1 = gather_table(expert_starts(keys_N, num_experts), group=group)
        # Pinned and behind an event: later work may be queued before the host has read it.
        self._starts_WE1 = starts_WE1.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if starts_WE1.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> np.ndarray:
        """Wait for the copy; return it, ``(W, E + 1)`` int64."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._starts_WE1.numpy()


def arrival_order(plan: DispatchPlan, *, device: torch.device) -> tuple[Permutation, torch.Tensor]:
    """Return the order of a plan's received rows by expert, and where each expert's rows end.

    Laid out on the host, which has nothing else to do while the rows travel, in pinned memory, as
    a copy from any other would wait for them.

    Returns:
        The order and ``(L,)`` int32, on ``device``.
    """
    num_local, num_recv = plan.num_local, plan.num_recv
    host = torch.empty(
        num_local + 2 * num_recv, dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    order_by_expert(plan, host.numpy())
    ends_L, arrival_R, place_R = host.to(device, non_blocking=True).split(
        [num_local, num_recv, num_recv]
    )
    return Permutation(arrival_R, place_R), ends_L
