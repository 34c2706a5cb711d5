"""Measure all-to-alls in the process groups of a graph, alone and beside GEMMs, on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import torch
from torch import fx
from torch._C._distributed_c10d import (
    AllToAllOptions,
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

from halley.compiler.consensus import Consensus
from halley.compiler.graph_analysis import Sizes
from halley.compiler.graph_collectives import ALL_TO_ALL, group_of, operator_name
from halley.compiler.node_cost import exchanged_bytes
from halley.cost.profiles import Curve, ProfileTable, Work, measure_contention, measure_curve
from halley.cost.simulate import Contention
from halley.ops.sm_carveout import gemm_with_carveout, has_sm_carveout


_MIN_BYTES = 4096  # size of the smallest measured all-to-all; smaller ones take as long
# Contention is measured with GEMMs of (side, inner) x (inner, side), which take tenths of a
# millisecond, beside an all-to-all of the bytes below, which takes a millisecond or more. GEMMs
# must be as large as those of a model, because small ones suffer more from SMs that the collective
# occupies: with 4 of the 132 SMs of an H200 occupied, a GEMM with a side of 2048 takes 1.9 times as
# long, with 4096 1.55 times, with 8192 1.25 times.
_CPU_SIDE, _CPU_INNER, _CPU_BYTES = 128, 128, 4 * 2**20
_GPU_SIDE, _GPU_INNER, _GPU_BYTES = 8192, 2048, 256 * 2**20
_NUM_EXPERTS = 8  # of the measured grouped GEMM
_SM_MARGINS = (0, 2, 4, 8, 16, 24, 32)  # numbers of SMs that GEMMs leave free in trials


def measure_groups(
    graph: fx.Graph,
    consensus_groups: Sequence[Consensus],
    table: ProfileTable,
    *,
    keys: Mapping[str, str],
    sizes: Sizes,
    device: torch.device,
) -> None:
    """Measure all-to-alls and contention that rank 0's profile lacks; add the results on all ranks.

    All ranks of the groups must call this together. The first group is the largest, and contention
    is measured in it. ``_measure_all_to_all`` chooses the sizes of all-to-alls. ``keys`` is the
    result of ``curve_keys``.
    """
    largest = consensus_groups[0]

    def measure() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        for at, consensus in enumerate(consensus_groups):
            key = keys[consensus.group_name]
            # Measure this curve on all ranks of its group if rank 0 of the largest group lacks it.
            lacks = largest.share(f"curve {at}", lambda key=key: table.curve(key) is None)
            # If no group holds all ranks, ranks of ``consensus`` may have different largest groups,
            # and so different ``lacks``. All of these ranks measure if ``lacks`` is true on any.
            if any(consensus.all_gather(f"lacks curve {at}", lacks)):
                curve = _measure_all_to_all(graph, consensus, sizes=sizes, device=device)
                table.add_curve(key, curve)
        if largest.share("contention", lambda: table.contention is None):
            table.add_contention(measure_group_contention(largest, device))

    # Measure in another thread. In one of four runs that measured in the calling thread, which is
    # tracing, a collective of gloo hung.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(measure).result()


def curve_keys(consensus_groups: Sequence[Consensus]) -> dict[str, str]:
    """Return, by group name, the key under which a table of profiles has the group's all-to-alls.

    Names of groups differ between runs. The key of a smaller group therefore holds its number of
    ranks, and its first and last rank as numbered in the largest group: links inside of a host
    differ from links between hosts. All ranks must call this once, with the largest group first.
    """
    keys: dict[str, str] = {}
    for consensus in consensus_groups:
        if consensus is consensus_groups[0]:
            keys[consensus.group_name] = ALL_TO_ALL
            continue
        places = consensus.all_gather("place", consensus_groups[0].rank)
        key = f"{ALL_TO_ALL} of {len(places)} ranks, {places[0]} to {places[-1]}"
        keys[consensus.group_name] = key
    return keys


def measure_group_contention(consensus: Consensus, device: torch.device) -> Contention:
    """Measure how GEMMs and all-to-alls of a group slow each other down; call on all its ranks.

    On a GPU, the result has the numbers of SMs that GEMMs should leave free for all-to-alls.
    """
    on_gpu = device.type == "cuda"
    shape = (_GPU_SIDE, _GPU_INNER, _GPU_BYTES) if on_gpu else (_CPU_SIDE, _CPU_INNER, _CPU_BYTES)
    side, inner, num_bytes = shape
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left = torch.ones(side, inner, dtype=dtype, device=device)
    right = torch.ones(inner, side, dtype=dtype, device=device)
    measure = partial(
        measure_contention,
        exchange=_make_all_to_all(consensus, num_bytes, device),
        device=device,
        reserved_sms=_SM_MARGINS if on_gpu and has_sm_carveout() else (0,),
    )
    dense = measure(partial(gemm_with_carveout, None, left, right, None))
    if not on_gpu:
        return dense
    # Measure a weight-gradient GEMM of experts, too. A grouped GEMM runs its CTAs in clusters of
    # two, so it has to leave more SMs free than a dense one.
    ends = torch.arange(1, _NUM_EXPERTS + 1, dtype=torch.int32, device=device)
    ends = ends * side // _NUM_EXPERTS
    grad = torch.ones(side, side, dtype=dtype, device=device)
    grouped = measure(partial(gemm_with_carveout, None, left.t(), grad, ends))
    # Memory limits scaling by a number. It slows an all-to-all more than GEMMs do.
    scaled = torch.empty_like(grad)
    scale = measure(lambda _: torch.mul(grad, 2.0, out=scaled), reserved_sms=(0,))
    return Contention(
        compute=(dense.compute + grouped.compute) / 2,
        comm=(dense.comm + grouped.comm) / 2,
        memory_compute=scale.compute,
        memory_comm=scale.comm,
        sm_margin=dense.sm_margin,
        grouped_sm_margin=grouped.sm_margin,
    )


def _measure_all_to_all(
    graph: fx.Graph, consensus: Consensus, *, sizes: Sizes, device: torch.device
) -> Curve:
    """Measure a group's all-to-alls from 4 KiB to at least the graph's largest; return a ``Curve``.

    Other collectives count as all-to-alls that take as long, but of at most ``_GPU_BYTES`` or
    ``_CPU_BYTES``: an all-reduce of all gradients would take too long to measure.
    """
    most = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    sent = [
        exchanged_bytes(node, sizes)
        if operator_name(node) == ALL_TO_ALL
        else min(exchanged_bytes(node, sizes), most)
        for node in graph.nodes
        if group_of(node) == consensus.group_name
    ]
    points = [_MIN_BYTES]
    while points[-1] < max(sent, default=0):
        points.append(points[-1] * 4)
    starts = {size: _make_all_to_all(consensus, size, device) for size in points}
    return measure_curve(lambda size: starts[size]().wait(), points, device=device)


def _make_all_to_all(
    consensus: Consensus, num_bytes: int, device: torch.device
) -> Callable[[], Work]:
    """Return a function that starts an all-to-all of equal splits on fixed tensors."""
    num_bytes = max(1, num_bytes // consensus.num_ranks) * consensus.num_ranks
    sent = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    received = torch.empty_like(sent)
    group = _resolve_process_group(consensus.group_name)  # pyright: ignore[reportArgumentType]
    return lambda: cast(Work, group.alltoall_base(received, sent, [], [], AllToAllOptions()))
