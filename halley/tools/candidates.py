"""Build the strategies that the layer benchmark compares, and check that a layer fits the ranks."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from halley.core.routing import local_experts
from halley.core.sharding import check_tp_size, shard_size
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.ops.expert_gemm import check_alignment
from halley.planner.expert_balance import check_spare
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import LayerCase, LayerTensors


if TYPE_CHECKING:
    from halley.fused.buffer_cache import Workspaces


GRAPH = "graph"  # the setting of a strategy that runs as a CUDA graph
_CHUNK_COUNTS = (2, 3, 4, 8)


def check_experts(case: LayerCase, *, ep_size: int, tp_size: int = 1) -> int:
    """Return the number of experts that each rank holds, without spare ones.

    Args:
        case: the layer.
        ep_size: ranks that hold all experts together.
        tp_size: ranks that share each expert.

    Raises:
        ValueError: the experts do not divide over the ranks and are not placed, there are more
            spare experts than experts, or the rows of a shard are not aligned.
    """
    num_experts, inner = case.model.moe.num_experts, case.model.moe.intermediate_size
    check_tp_size(tp_size, num_ranks=ep_size)
    own_size = shard_size(inner, tp_size=tp_size)
    check_alignment(own_size, name="intermediate_size", dtype=case.dtype)
    if case.spare is None:
        return local_experts(num_experts, ep_size=ep_size, tp_size=tp_size)
    if tp_size > 1:
        raise ValueError(f"spare ({case.spare}) must be left out where ranks share experts")
    return check_spare(num_experts, num_ranks=ep_size, spare=case.spare)


def check_case_memory(
    case: LayerCase, *, ep_size: int, memory_bytes: int, tp_size: int = 1, backward: bool = False
) -> None:
    """Check that weights and tokens of a layer fit the memory of a rank, buffers not counted.

    Args:
        case: the layer.
        ep_size, tp_size: as for ``check_experts``.
        memory_bytes: memory of a rank.
        backward: whether gradients of the same size are needed.

    Raises:
        ValueError: they do not fit, or ``check_experts`` raises.
    """
    moe, hidden = case.model.moe, case.model.hidden_size
    num_local = check_experts(case, ep_size=ep_size, tp_size=tp_size) + (case.spare or 0)
    up_size = moe.intermediate_size * (2 if moe.activation == "swiglu" else 1)
    num_weights = num_local * hidden * (up_size + moe.intermediate_size) // tp_size
    num_values = case.num_tokens * hidden * (2 + moe.top_k)  # tokens, outputs and sent copies
    num_bytes = (num_weights + num_values) * case.dtype.itemsize * (2 if backward else 1)
    if num_bytes > memory_bytes:
        raise ValueError(
            f"model ({case.model.name}) with tokens ({case.num_tokens}) must fit the memory of a "
            f"rank ({memory_bytes / 2**30:.1f} GiB): weights and tokens of a layer take "
            f"{num_bytes / 2**30:.1f} GiB on each of {ep_size} ranks"
        )


def build_candidates(
    case: LayerCase,
    strategies: list[str],
    *,
    groups: ParallelGroups,
    recorder: Recorder,
    device: torch.device,
    workspaces: "Workspaces | None" = None,
    bounded: "Workspaces | None" = None,
) -> dict[str, AbstractStrategy]:
    """Return every strategy at each of its settings, by names such as "chunked n=4".

    Args:
        case: the layer.
        strategies: names of strategies.
        groups, recorder, device: as for ``build_strategy``.
        workspaces: buffers that all strategies with own kernels share.
        bounded: such buffers with ``max_load``. If given, these strategies get a second candidate
            with the setting "graph", which runs as a CUDA graph.

    Raises:
        ValueError: a strategy is unknown, or the experts do not divide over the ranks.
    """
    num_local = check_experts(case, ep_size=groups.ep_size, tp_size=groups.tp_size)
    build = partial(
        build_strategy,
        group=groups.ep,
        recorder=recorder,
        device=device,
        tp_size=groups.tp_size,
    )
    found: dict[str, AbstractStrategy] = {}
    for strategy in strategies:
        counts = [n for n in _CHUNK_COUNTS if n <= num_local] or [1]
        for n in counts if strategy == "chunked" else [0]:
            name = f"{strategy} n={n}" if n else strategy
            found[name] = build(strategy, num_chunks=n, workspaces=workspaces)
        if bounded is not None and strategy.partition(":")[0] in ("fused", "unfused"):
            found[f"{strategy} {GRAPH}"] = build(strategy, workspaces=bounded)
    return found


def compile_ahead(
    strategies: Sequence[AbstractStrategy], tensors: LayerTensors, groups: ParallelGroups
) -> None:
    """Compile the kernels of fused layers before the first run; a collective.

    Each rank compiles a share of the kernels and finds the others in the compiler's cache. Without
    this step, every rank would compile all kernels.

    Args:
        strategies: strategies without own kernels are ignored.
        tensors: of the layer; on a CPU nothing is compiled.
        groups: the ranks of the layer.
    """
    if not tensors.x_TD.is_cuda:
        return
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.strategies.fused import FusedStrategy

    fused = [each for each in strategies if isinstance(each, FusedStrategy)]
    layer = tensors.layer()
    for each in fused:
        each.prepare(*layer)
    tasks = [(each, backward) for each in fused for backward in (False, True)]
    for each, backward in tasks[groups.ep_rank :: groups.ep_size]:
        each.compile(*layer, backward=backward)
    if groups.ep is not None:
        dist.barrier(groups.ep)
