"""Strategies by name, for configurations and command lines."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.cost.hardware import CPU, H200, find_hardware
from halley.cost.predict import Predictor
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.chunked import ChunkedStrategy
from halley.strategies.sequential import SequentialStrategy


if TYPE_CHECKING:
    from halley.ops.workspaces import Workspaces


STRATEGIES = ("sequential", "chunked", "unfused", "fused", "auto")
TRAINABLE = ("sequential", "chunked", "auto")  # those with a backward


def build_strategy(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    recorder: Recorder,
    device: torch.device,
    num_chunks: int = 0,
    workspaces: "Workspaces | None" = None,
) -> AbstractStrategy:
    """Return the strategy of that name for the ranks of ``group``.

    Args:
        name: one of ``STRATEGIES``.
        group: the ranks over which experts are spread; None for a rank on its own.
        num_chunks: chunks of "chunked"; 0 lets the cost model choose.
        workspaces: buffers of the fused kernels, which several strategies may share; None for its
            own, which all layers that the strategy runs share.

    Raises:
        ValueError: there is no such strategy.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy ({name}) must be one of {', '.join(STRATEGIES)}")
    if name == "sequential":
        return SequentialStrategy(group, recorder=recorder)
    if name == "chunked":
        predictor = predictor_of(device)
        return ChunkedStrategy(group, recorder=recorder, predictor=predictor, num_chunks=num_chunks)
    if name == "auto":
        candidates = {
            each: build_strategy(
                each,
                group,
                recorder=recorder,
                device=device,
                num_chunks=num_chunks,
                workspaces=workspaces,
            )
            for each in ("sequential", "chunked", "fused")
        }
        return AutoStrategy(candidates, group=group, device=device, recorder=recorder)
    # Only where they are wanted: Triton is not there on every platform, and slow to import.
    from halley.ops.workspaces import Workspaces
    from halley.strategies.fused import FusedStrategy

    workspaces = workspaces or Workspaces(group, device)
    return FusedStrategy(workspaces, recorder=recorder, fused=name == "fused")


def check_trainable(name: str) -> None:
    """Check that a strategy of that name can train.

    Raises:
        ValueError: there is no such strategy, or it has no backward.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy ({name}) must be one of {', '.join(STRATEGIES)}")
    if name not in TRAINABLE:
        raise ValueError(
            f"strategy ({name}) must be one of {', '.join(TRAINABLE)} in training: "
            "it has no backward yet"
        )


def predictor_of(device: torch.device) -> Predictor:
    """Return the cost model of ``device``; a GPU without figures is taken for an H200."""
    if device.type == "cpu":
        return Predictor(CPU)
    try:
        return Predictor(find_hardware(torch.cuda.get_device_name(device)))
    except ValueError:
        return Predictor(H200)
