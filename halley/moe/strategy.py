"""Strategies by name, for configurations and command lines."""

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.cost.hardware import CPU, H200, find_hardware
from halley.cost.predict import Predictor
from halley.strategies.base import AbstractStrategy
from halley.strategies.chunked import ChunkedStrategy
from halley.strategies.sequential import SequentialStrategy


STRATEGIES = ("sequential", "chunked")


def build_strategy(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    recorder: Recorder,
    device: torch.device,
    num_chunks: int = 0,
) -> AbstractStrategy:
    """Return the strategy of that name for the ranks of ``group``.

    Args:
        name: one of ``STRATEGIES``.
        group: the ranks over which experts are spread; None for a rank on its own.
        num_chunks: chunks of "chunked"; 0 lets the cost model choose.

    Raises:
        ValueError: there is no such strategy.
    """
    if name == "sequential":
        return SequentialStrategy(group, recorder=recorder)
    if name == "chunked":
        predictor = predictor_of(device)
        return ChunkedStrategy(group, recorder=recorder, predictor=predictor, num_chunks=num_chunks)
    raise ValueError(f"strategy ({name}) must be one of {', '.join(STRATEGIES)}")


def predictor_of(device: torch.device) -> Predictor:
    """Return the cost model of ``device``; a GPU without figures is taken for an H200."""
    if device.type == "cpu":
        return Predictor(CPU)
    try:
        return Predictor(find_hardware(torch.cuda.get_device_name(device)))
    except ValueError:
        return Predictor(H200)
