"""Compile the kernels of fused layers before they run: many at a time, each rank its share."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from halley.kernels.launch import compile_only
from halley.moe.parallel import ParallelGroups
from halley.perf.layer_case import LayerTensors, outputs_of
from halley.strategies.base import AbstractStrategy
from halley.strategies.fused import FusedStrategy


def compile_ahead(
    strategies: Sequence[AbstractStrategy],
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    directions: Sequence[bool] = (False, True),
) -> None:
    """Compile what a layer launches; a collective. Other ranks find it in the compiler's cache.

    Args:
        strategies: those with kernels of their own count.
        tensors: of the layer; on a CPU nothing is compiled.
        directions: forward without gradients (False), with backward (True).
    """
    found = [each for each in strategies if isinstance(each, FusedStrategy)]
    if not tensors.x_TD.is_cuda or not found:
        return
    for each in found:
        each.prepare(tensors.x_TD, tensors.routed(), tensors.experts)
    tasks = [(each, backward) for each in found for backward in directions]
    with only_compiling(groups):
        for each, backward in tasks[groups.ep_rank :: groups.ep_size]:
            outputs_of(each, tensors, backward=backward)
    if groups.ep is not None:
        dist.barrier(groups.ep)


@contextmanager
def only_compiling(groups: ParallelGroups) -> Generator[None, None, None]:
    """Compile what layers launch, forward and backward, and launch nothing, on this rank."""
    num_threads = max(1, (os.cpu_count() or 1) // groups.num_ranks)
    # Autograd's own threads know nothing of what this one only compiles.
    with compile_only(num_threads), torch.autograd.set_multithreading_enabled(False):
        yield
