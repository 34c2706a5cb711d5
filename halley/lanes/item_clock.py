"""Measure the time of each item of a step, on a GPU without delays of the host."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import final

import torch

from halley.core.timeline import Recorder, Span, delay_gpu


_MARGIN = 1.5  # the waits of all ranks in multiples of rank 0's times, for ranks with a slower host
_MAX_WAIT_US = 50_000.0  # a first call compiles, which may take seconds


def item_name(microbatch: int, index: int, kind: str) -> str:
    """Return the name of the span of an item, as "0.3.wait"."""
    return f"{microbatch}.{index}.{kind}"


def span_item(name: str) -> tuple[int, int]:
    """Return the microbatch and the item index in a name that ``item_name`` has made."""
    microbatch, index, _ = name.split(".")
    return int(microbatch), int(index)


@final
class ItemClock:
    """Records the items of a step, as a ``Recorder``; on a GPU, without delays of the host.

    Small kernels end before the host has launched the next one, and the gaps would count as time of
    their item. CUDA graphs have no such gaps. So before each item that computes or starts a
    collective, the GPU waits for as long as the host has needed for an item with the same hash.

    Args:
        keys: hash of each item.
        device: of this rank.

    Attributes:
        launch_us: microseconds that the host needed for each hash: the shortest time so far.
    """

    def __init__(self, keys: Sequence[str], device: torch.device) -> None:
        self.launch_us: dict[str, float] = {}
        self._keys, self._recorder = keys, Recorder(device)
        self._on_gpu = device.type == "cuda"
        self._waits_us: Mapping[str, float] = {}

    def wait_for_host(self, launch_us: Mapping[str, float]) -> None:
        """From now on, let the GPU wait before each item; the same times on all ranks.

        Different waits would let the ranks start their collectives at different times.
        """
        self._waits_us = {key: min(_MARGIN * each, _MAX_WAIT_US) for key, each in launch_us.items()}

    @contextmanager
    def span(self, name: str, *, stream: str = "compute") -> Generator[None]:
        """Record the ``with`` block as the span of one item."""
        key = self._keys[span_item(name)[1]]
        if self._on_gpu and stream == "compute" and (wait_us := self._waits_us.get(key)):
            delay_gpu(wait_us)
        start_s = time.perf_counter()
        with self._recorder.span(name, stream=stream):
            yield
        launch_us = (time.perf_counter() - start_s) * 1e6
        self.launch_us[key] = min(launch_us, self.launch_us.get(key, inf))

    def collect(self) -> list[Span]:
        """Return the spans since the last call, as ``Recorder.collect``."""
        return self._recorder.collect()
