"""Measured times of items on a GPU do not contain the time that the host needs to launch them.

pytest tests/lanes/test_item_clock_cuda.py
"""

import time

import torch

from halley.lanes.item_clock import ItemClock, item_name
from tests.gpus import needs_gpu


pytestmark = needs_gpu


def test_slow_launches_do_not_count() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = ItemClock(["segment"], device)
    value = torch.zeros(16, device=device)

    def measure() -> float:
        with clock.span(item_name(0, 0, "segment")):
            for _ in range(10):
                value.add_(1.0)
                time.sleep(0.001)
        (span,) = clock.collect()
        return span.duration_us

    measure()  # loads the kernel
    assert measure() > 8_000.0  # from the first to the last of ten kernels
    clock.wait_for_host(clock.launch_us)
    assert measure() < 1_000.0
