"""The strategies to measure a layer by, each at all its settings."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from halley.core.routing import local_experts
from halley.core.sharding import check_tp_size, shard_size
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.ops.expert_forward import check_alignment
from halley.planner.expert_balance import check_spare
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import LayerCase


if TYPE_CHECKING:
    from halley.fused.buffer_cache import Workspaces


GRAPH = "graph"  # the setting of strategies that are replayed
_CHUNK_CANDIDATES = (2, 3, 4, 8)


def check_experts(case: LayerCase, *, ep_size: int, tp_size: int = 1) -> int:
    """Return the experts that each rank holds, or shares, without spare ones.

    Raises:
        ValueError: they do not divide over the ranks and there is no placement, spare ones would be
            more than there are, or their shards are not aligned.
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
    """Check that the weights and tokens of a layer fit a rank; buffers come on top.

    Args:
        ep_size, tp_size: ranks that hold the experts, and that share each of them.
        memory_bytes: that a rank has.
        backward: whether there are gradients of the same size.

    Raises:
        ValueError: they do not fit, or the experts do not divide over the ranks.
    """
    moe, hidden = case.model.moe, case.model.hidden_size
    num_local = check_experts(case, ep_size=ep_size, tp_size=tp_size) + (case.spare or 0)
    up_size = moe.intermediate_size * (2 if moe.activation == "swiglu" else 1)
    num_weights = num_local * hidden * (up_size + moe.intermediate_size) // tp_size
    num_values = case.num_tokens * hidden * (2 + moe.top_k)  # of tokens, results and sent copies
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
    """Return every strategy at each of its settings, named "chunked n=4" or "fused graph".

    Args:
        workspaces: buffers that the strategies with kernels of their own share.
        bounded: such buffers with ``max_load``; if given, these strategies are measured as CUDA
            graphs, too.

    Raises:
        ValueError: an unknown strategy, or experts that do not divide over the ranks.
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
        counts = [n for n in _CHUNK_CANDIDATES if n <= num_local] or [1]
        for n in counts if strategy == "chunked" else [0]:
            name = f"{strategy} n={n}" if n else strategy
            found[name] = build(strategy, num_chunks=n, workspaces=workspaces)
        if bounded is not None and strategy.partition(":")[0] in ("fused", "unfused"):
            found[f"{strategy} {GRAPH}"] = build(strategy, workspaces=bounded)
    return found
