"""Compile the kernels of fused layers before any of them runs: each rank its share."""

from collections.abc import Sequence

import torch.distributed as dist

from halley.distributed.mesh import ParallelGroups
from halley.strategies.base import AbstractStrategy
from halley.tools.layer_case import LayerTensors


def compile_ahead(
    strategies: Sequence[AbstractStrategy],
    tensors: LayerTensors,
    groups: ParallelGroups,
) -> None:
    """Compile what a layer launches; a collective. Other ranks find it in the compiler's cache.

    Without it each rank would compile all of it, each kind of pass when it first runs.

    Args:
        strategies: those with kernels of their own count.
        tensors: of the layer; on a CPU nothing is compiled.
    """
    if not tensors.x_TD.is_cuda:
        return
    # Only here: Triton is not there on every platform.
    from halley.strategies.fused import FusedStrategy

    found = [each for each in strategies if isinstance(each, FusedStrategy)]
    layer = tensors.layer()
    for each in found:
        each.prepare(*layer)
    tasks = [(each, backward) for each in found for backward in (False, True)]
    for each, backward in tasks[groups.ep_rank :: groups.ep_size]:
        each.compile(*layer, backward=backward)
    if groups.ep is not None:
        dist.barrier(groups.ep)
