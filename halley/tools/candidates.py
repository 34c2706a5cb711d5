"""Prepare the layer benchmark: check sizes, build strategies, find lower bounds of the times."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.routing import shard_size
from halley.core.timeline import Recorder
from halley.core.types import check_tp_size, local_experts
from halley.distributed.mesh import ParallelGroups
from halley.ops.exchange import gather_table
from halley.ops.expert_rows import check_alignment
from halley.planner.expert_balance import check_spare
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_pipelines, build_strategy
from halley.tools.layer_case import LayerCase, LayerTensors
from halley.tools.timer import Row, time_interleaved


if TYPE_CHECKING:
    from halley.fused.buffers import Workspaces


GRAPH = "graph"  # the setting of a strategy that runs as a CUDA graph
_CHUNK_COUNTS = (2, 3, 4, 8)


def chunk_counts(num_local: int) -> list[int]:
    """Return the numbers of chunks that benchmarks try for a rank with ``num_local`` experts."""
    return [n for n in _CHUNK_COUNTS if n <= num_local] or [1]


def check_experts(case: LayerCase, *, ep_size: int, tp_size: int = 1) -> int:
    """Return how many experts a rank holds, without spare ones; check the sizes of the layer.

    A ``ValueError`` means that the experts do not divide over the ranks and no placement is
    planned, that spare experts are too many or used with ``tp_size`` above 1, that ``tp_size`` does
    not divide the ranks, or that the rows of a shard are not aligned.
    """
    num_experts = case.model.moe.num_experts
    check_tp_size(tp_size, num_ranks=ep_size)
    own_size = shard_size(case.model.moe.intermediate_size, tp_size=tp_size)
    check_alignment(own_size, name="intermediate_size", dtype=case.dtype)
    if case.spare is None:
        return local_experts(num_experts, ep_size=ep_size, tp_size=tp_size)
    if tp_size > 1:
        raise ValueError(f"spare ({case.spare}) must be left out where ranks share experts")
    return check_spare(num_experts, num_ranks=ep_size, spare=case.spare)


def check_memory(
    cases: Sequence[LayerCase],
    *,
    ep_size: int,
    memory_bytes: int,
    tp_size: int = 1,
    backward: bool = True,
) -> None:
    """Raise ``ValueError`` if weights, tokens, outputs and token copies exceed ``memory_bytes``.

    ``backward`` adds gradients of the same size. Wrong sizes of a layer are a ``ValueError`` too.
    """
    for case in cases:
        moe, hidden = case.model.moe, case.model.hidden_size
        num_local = check_experts(case, ep_size=ep_size, tp_size=tp_size) + (case.spare or 0)
        num_matrices = 3 if moe.activation == "swiglu" else 2
        num_weights = num_local * hidden * num_matrices * moe.intermediate_size // tp_size
        num_values = case.num_tokens * hidden * (2 + moe.top_k)  # tokens, outputs and sent copies
        num_bytes = (num_weights + num_values) * case.dtype.itemsize * (2 if backward else 1)
        if num_bytes > memory_bytes:
            raise ValueError(
                f"model ({case.model.name}) with tokens ({case.num_tokens}) must fit the memory of "
                f"a rank ({memory_bytes / 2**30:.1f} GiB): weights and tokens of a layer take "
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
    max_load: float = 0.0,
) -> dict[str, AbstractStrategy]:
    """Build each strategy at each of its settings; return them by name, such as "chunked n=4".

    Args:
        workspaces: buffers that all strategies with Triton kernels share.
        bounded: such buffers with ``max_load``. If given, fused, unfused, deduplicated and
            hierarchical get second candidates with the setting "graph", which run as CUDA graphs.
    """
    num_local = check_experts(case, ep_size=groups.ep_size, tp_size=groups.tp_size)
    where = {"group": groups.ep, "recorder": recorder, "device": device, "tp_size": groups.tp_size}
    build = partial(build_strategy, **where)
    settings = {"": 0.0} if bounded is None else {"": 0.0, f" {GRAPH}": max_load}
    candidates: dict[str, AbstractStrategy] = {}
    for strategy in strategies:
        if strategy.partition(":")[0] in ("deduplicated", "hierarchical"):
            for setting, load in settings.items():
                for each, built in build_pipelines(strategy, max_load=load, **where).items():
                    candidates[f"{strategy} {each}{setting}"] = built
            continue
        for n in chunk_counts(num_local) if strategy == "chunked" else [0]:
            name = f"{strategy} n={n}" if n else strategy
            candidates[name] = build(strategy, num_chunks=n, workspaces=workspaces)
        if bounded is not None and strategy.partition(":")[0] in ("fused", "unfused"):
            candidates[f"{strategy} {GRAPH}"] = build(strategy, workspaces=bounded)
    return candidates


def compile_ahead(strategies: Sequence[AbstractStrategy], tensors: LayerTensors) -> None:
    """Compile the GPU kernels of fused and unfused strategies before the first run; a collective.

    Each rank compiles some of the kernels and finds the others in Triton's cache.
    """
    if not tensors.x_TD.is_cuda:
        return
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.strategies.fused import FusedStrategy

    fused = [each for each in strategies if isinstance(each, FusedStrategy)]
    layer, groups = tensors.layer(), tensors.groups
    for each in fused:
        each.prepare(*layer)
    tasks = [(each, backward) for each in fused for backward in (False, True)]
    for each, backward in tasks[groups.ep_rank :: groups.ep_size]:
        each.compile(*layer, backward=backward)
    if groups.ep is not None:
        dist.barrier(groups.ep)


# Bytes that a rank sends to each peer in the all-to-all of ``measure_link``. With fewer bytes, the
# latency would be a large part of the measured time.
_PROBE_BYTES = {"cuda": 32 * 2**20, "cpu": 2 * 2**20}
_BLOCK_M = 128


def bound_gemms(tensors: LayerTensors) -> dict[str, Callable[[], None]]:
    """Return functions, by name, that each run the two grouped GEMMs of a forward pass alone.

    The faster one gives the lower bound. There are as many rows as this rank's experts receive.
    """
    experts, groups = tensors.experts, tensors.groups
    first = groups.ep_rank // groups.tp_size * experts.num_local_experts
    counts_L = tensors.counts_WE[:, first : first + experts.num_local_experts].sum(0)
    num_rows, device = int(counts_L.sum()), tensors.x_TD.device
    sizes = tensors.experts.down_LDF.shape[1:]  # hidden and intermediate size
    x_RD, h_RF = (tensors.x_TD.new_empty(num_rows, size).normal_() for size in sizes)
    ends_L = counts_L.cumsum(0).to(device, torch.int32)

    @torch.no_grad()
    def run() -> None:
        F.grouped_mm(x_RD, experts.up_LGD.transpose(1, 2), offs=ends_L)
        F.grouped_mm(h_RF, experts.down_LDF.transpose(1, 2), offs=ends_L)

    gemms: dict[str, Callable[[], None]] = {"torch gemms": run}
    if device.type == "cuda" and num_rows:
        gemms["triton gemms"] = _triton_gemms(counts_L.to(device), tensors)
    return gemms


def _triton_gemms(counts_L: torch.Tensor, tensors: LayerTensors) -> Callable[[], None]:
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.ops.kernels.grouped_gemm import grouped_gemm
    from halley.ops.kernels.tiles import GemmTile

    # One tile is stored while the next one is loaded, so the store needs its own shared memory. The
    # loads use three pipeline stages instead of four, to leave memory for the store.
    tile = GemmTile(num_stages=3)
    device, weights = counts_L.device, tensors.experts
    tiles_L = (counts_L + _BLOCK_M - 1) // _BLOCK_M
    tile_expert = torch.arange(len(counts_L), dtype=torch.int32, device=device)
    tile_expert = tile_expert.repeat_interleave(tiles_L)
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    num_rows, sizes = int(tiles_L.sum()) * _BLOCK_M, weights.down_LDF.shape[1:]
    x_RD, h_RF = (tensors.x_TD.new_empty(num_rows, size).normal_() for size in sizes)
    up_RG = x_RD.new_empty(len(x_RD), weights.up_LGD.shape[1])
    down_RD = torch.empty_like(x_RD)
    multiply = partial(
        grouped_gemm, tile_expert=tile_expert, block_m=_BLOCK_M, tile=tile, num_programs=num_ctas
    )

    def run() -> None:
        multiply(up_RG, x_RD, weights.up_LGD)
        multiply(down_RD, h_RF, weights.down_LDF)

    return run


def measure_link(
    groups: ParallelGroups, *, device: torch.device, copies_own: bool = False
) -> float:
    """Measure the bytes/s that a rank sends in an all-to-all; 0 for a single rank. Collective.

    With ``copies_own``, each rank also sends itself a part, as the all-to-alls of "sequential" do.
    The copy is not counted, but it takes time in the same NCCL channels.
    """
    if groups.ep is None:
        return 0.0
    splits = [_PROBE_BYTES[device.type]] * groups.ep_size
    if not copies_own:
        splits[groups.ep_rank] = 0
    sent = torch.empty(sum(splits), dtype=torch.uint8, device=device).random_()
    received = torch.empty_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, splits, splits, group=groups.ep)

    timing = time_interleaved({"link": exchange}, device=device, group=groups.ep)["link"]
    return (groups.ep_size - 1) * _PROBE_BYTES[device.type] / (timing.median_us * 1e-6)


def describe_link(groups: ParallelGroups, *, device: torch.device) -> tuple[float, Row]:
    """Measure the link; return its bytes/s and the keys of result lines about it. Collective."""
    link, with_own = (
        measure_link(groups, device=device, copies_own=copies_own) for copies_own in (False, True)
    )
    keys: Row = {
        "link": _link_name(device),
        "link_gb_per_s": round(link / 1e9, 2) or None,
        "all_to_all_gb_per_s": round(with_own / 1e9, 2) or None,
    }
    return link, keys


def _link_name(device: torch.device) -> str | None:
    """Return the link that NCCL_* variables set: "sockets", "channels", "nvlink"; None on CPU."""
    if device.type != "cuda":
        return None
    if os.environ.get("NCCL_NET") == "Socket" and "NCCL_HOSTID" in os.environ:
        return "sockets"
    return "channels" if os.environ.get("NCCL_MAX_NCHANNELS") == "1" else "nvlink"


def wire_us(tensors: LayerTensors, *, link_bytes_per_s: float) -> float:
    """Return the microseconds that the most loaded link needs to send or receive rows. Collective.

    Combine needs the same time: it returns one row per (token, destination rank). A token is sent
    once to each destination rank, even if several of its experts are there. The larger of the sent
    and the received bytes counts, because links work in both directions at once.
    """
    groups = tensors.groups
    if groups.ep is None:
        return 0.0
    set_TK = tensors.routed().topk_idx_TK // tensors.experts.num_local_experts
    num_sets = groups.ep_size // groups.tp_size
    # ``is_sent`` has a column per tensor-parallel group, whose ranks share the same experts.
    is_sent = torch.zeros(set_TK.shape[0], num_sets, device=set_TK.device)
    is_sent.scatter_(1, set_TK, 1.0)
    rows_W = is_sent.sum(0).repeat_interleave(groups.tp_size)
    rows_W[groups.ep_rank] = 0
    rows_WW = gather_table(rows_W, group=groups.ep)
    rows = torch.maximum(rows_WW.sum(0), rows_WW.sum(1)).max().item()
    num_bytes = rows * tensors.x_TD.shape[1] * tensors.x_TD.itemsize
    return num_bytes / link_bytes_per_s * 1e6
