"""The load of experts in a run, as placements are planned from it."""

from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from halley.core.counts import write_counts


@final
class ExpertCounts:
    """Adds up the tokens that each expert of each MoE layer gets on this rank."""

    def __init__(self) -> None:
        self._total_ME: torch.Tensor | None = None
        self._num_steps = 0

    def add(self, counts_ME: torch.Tensor) -> None:
        """Count one step; the host reads nothing.

        Args:
            counts_ME: int64, of this rank.
        """
        self._total_ME = counts_ME + (0 if self._total_ME is None else self._total_ME)
        self._num_steps += 1

    def write(self, path: Path, *, step: int) -> None:
        """Write the counts of all ranks since the last call, and begin anew; a collective.

        A model without MoE layers has none, and nothing is written.

        Args:
            path: on a folder that the first rank sees; in place of earlier counts.
            step: training steps done.
        """
        total_ME, num_steps = self._total_ME, self._num_steps
        self._total_ME, self._num_steps = None, 0
        if total_ME is None or not total_ME.numel():
            return
        if dist.is_initialized():
            dist.all_reduce(total_ME)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_counts(path, total_ME.tolist(), first_step=step - num_steps + 1, last_step=step)
