"""What the ranks of groups measure together: all-to-alls, alone and beside computation."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast, final

import torch
from torch import fx
from torch._C._distributed_c10d import (
    AllToAllOptions,
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

from halley.compiler.consensus import Consensus
from halley.compiler.graph_collectives import ALL_TO_ALL, group_of, operator_name
from halley.compiler.node_cost import exchanged_bytes
from halley.compiler.sizes import Sizes
from halley.cost.measure import Work, measure_contention, measure_curve
from halley.cost.profiles import Curve, ProfileTable
from halley.cost.simulate import Contention
from halley.ops.sm_carveout import gemm_with_carveout, has_sm_carveout


_SMALLEST_BYTES = 4096  # of an all-to-all that is measured: below, all is latency
# Products of this many rows and columns and of this inner size, in bfloat16 on a GPU, beside an
# all-to-all of as many bytes: tenths of a millisecond beside some. Small results slow down more
# than a model's where the wire takes processors: with 4 of an H200's 132 taken those of 2048 rows
# and columns by 1.9, of 4096 by 1.55, of 8192 by 1.25.
_CPU_SIDE, _CPU_INNER, _CPU_BYTES = 128, 128, 4 * 2**20
_GPU_SIDE, _GPU_INNER, _GPU_BYTES = 8192, 2048, 256 * 2**20
_NUM_GROUPS = 8
# Multiprocessors for products to leave free.
_SM_MARGINS = (0, 2, 4, 8, 16, 24, 32)


def measure_groups(
    graph: fx.Graph,
    consensus_groups: Sequence[Consensus],
    table: ProfileTable,
    *,
    keys: Mapping[str, str],
    sizes: Sizes,
    device: torch.device,
) -> None:
    """Add what rank 0's table lacks of figures of groups; a collective of all of them.

    Args:
        graph: whose collectives there is to know about.
        consensus_groups: of its groups, the largest first. Contention is that of the largest
            group, and its rank 0 decides.
        table: of this rank; that of rank 0 has a file.
        keys: of their curves, as of ``curve_keys``.
        sizes: of what nodes return.
        device: of the tensors.
    """
    lead = consensus_groups[0]

    def measure() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        # What rank 0 lacks all ranks measure: one that knows it must not stay away. Ranks of a
        # smaller group may be told by several rank 0s, if the largest does not hold them all.
        for at, consensus in enumerate(consensus_groups):
            key = keys[consensus.group_name]
            lacks = lead.share(f"curve {at}", lambda key=key: table.curve(key) is None)
            if any(consensus.tell(f"lacks curve {at}", lacks)):
                curve = measure_all_to_all(graph, consensus, sizes=sizes, device=device)
                table.add_curve(key, curve)
        if lead.share("contention", lambda: table.contention is None):
            table.add_contention(_measure_contention(lead, device))

    # On a thread of its own, which traces nothing: started from a compiling thread, one of four
    # runs stood still in a collective of gloo.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(measure).result()


def curve_keys(consensus_groups: Sequence[Consensus]) -> dict[str, str]:
    """Return under which key a table has the all-to-all curve of each group, by its name.

    A name says nothing in another run, but how many ranks a group has and where they stand in the
    largest one does: links within a host are others than those between hosts.

    Args:
        consensus_groups: of a graph's groups, the largest first; asked once for a graph.

    Raises:
        RuntimeError: a rank of a group did not come in time.
    """
    keys: dict[str, str] = {}
    for consensus in consensus_groups:
        if consensus is consensus_groups[0]:
            keys[consensus.group_name] = ALL_TO_ALL
            continue
        places = consensus.tell("place", consensus_groups[0].rank)
        key = f"{ALL_TO_ALL} of {len(places)} ranks, {places[0]} to {places[-1]}"
        keys[consensus.group_name] = key
    return keys


def _measure_contention(consensus: Consensus, device: torch.device) -> Contention:
    on_gpu = device.type == "cuda"
    sizes = (_GPU_SIDE, _GPU_INNER, _GPU_BYTES) if on_gpu else (_CPU_SIDE, _CPU_INNER, _CPU_BYTES)
    side, inner, num_bytes = sizes
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left = torch.ones(side, inner, dtype=dtype, device=device)
    right = torch.ones(inner, side, dtype=dtype, device=device)
    exchange = _Exchange(consensus, num_bytes, device).start
    measure = partial(
        measure_contention,
        exchange=exchange,
        device=device,
        reserved_sms=_SM_MARGINS if on_gpu and has_sm_carveout() else (0,),
    )
    dense = measure(partial(gemm_with_carveout, None, left, right, None))
    if not on_gpu:
        return dense
    # Weight gradients of experts. Blocks of such products come in pairs: they have to leave more.
    ends = torch.arange(1, _NUM_GROUPS + 1, dtype=torch.int32, device=device) * side // _NUM_GROUPS
    grad = torch.ones(side, side, dtype=dtype, device=device)
    grouped = measure(partial(gemm_with_carveout, None, left.t(), grad, ends))
    return Contention(
        compute=(dense.compute + grouped.compute) / 2,
        comm=(dense.comm + grouped.comm) / 2,
        sm_margin=dense.sm_margin,
        grouped_sm_margin=grouped.sm_margin,
    )


def measure_all_to_all(
    graph: fx.Graph, consensus: Consensus, *, sizes: Sizes, device: torch.device
) -> Curve:
    """Return the curve of equal all-to-alls, to beyond a group's largest; a collective of it.

    Args:
        graph: whose collectives there is to know about. Others than all-to-alls are taken for such
            of as many bytes on the wire; of them so many are measured as are beside products.
        consensus: of the group.
        sizes: of what nodes return.
        device: of the tensors.
    """
    most = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    sent = [
        exchanged_bytes(node, sizes)
        if operator_name(node) == ALL_TO_ALL
        else min(exchanged_bytes(node, sizes), most)
        for node in graph.nodes
        if group_of(node) == consensus.group_name
    ]
    points = [_SMALLEST_BYTES]
    while points[-1] < max(sent, default=0):
        points.append(points[-1] * 4)
    exchanges = {size: _Exchange(consensus, size, device) for size in points}
    return measure_curve(lambda size: exchanges[size].start().wait(), points, device=device)


@final
class _Exchange:
    """An equal all-to-all of a group, always of the same tensors; one at a time."""

    def __init__(self, consensus: Consensus, num_bytes: int, device: torch.device) -> None:
        num_bytes = max(1, num_bytes // consensus.num_ranks) * consensus.num_ranks
        self._sent = torch.zeros(num_bytes, dtype=torch.int8, device=device)
        self._received = torch.empty_like(self._sent)
        self._group = _resolve_process_group(consensus.group_name)  # pyright: ignore[reportArgumentType]
        self._work: Work | None = None

    def start(self) -> "_Exchange":
        """Start it; return what to wait for."""
        options = AllToAllOptions()
        work = self._group.alltoall_base(self._received, self._sent, [], [], options)
        self._work = cast(Work, work)
        return self

    def is_completed(self) -> bool:
        assert self._work is not None
        return self._work.is_completed()

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
