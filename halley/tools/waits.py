"""How long ranks wait for communication in a call, measured apart from its time."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder, waited_us


_NUM_SAMPLES = 3


def measure_waits(
    run: Callable[[], None],
    recorder: Recorder,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> float | None:
    """Return the median of the microseconds that the slowest rank waited; a collective.

    None where the layers do not tell, see ``waited_us``.

    Args:
        run: the call.
        recorder: that of its layers, which is silent otherwise.
        device: of this rank.
        group: the ranks.
    """
    samples: list[float | None] = []
    recorder.enabled = True
    for _ in range(_NUM_SAMPLES):
        recorder.collect()
        run()
        samples.append(waited_us(recorder.collect()))
    recorder.enabled = False
    told = [sample for sample in samples if sample is not None]
    slowest = torch.tensor(statistics.median(told) if told else -1.0, device=device)
    if group is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return round(slowest.item(), 1) if slowest.item() >= 0.0 else None
