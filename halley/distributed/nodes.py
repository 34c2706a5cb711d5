"""Divide the ranks of a process group into nodes, and create a process group for each node."""

from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist

from halley.distributed.peers import all_gather_objects, host_name, rank_and_size, time_limit


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Node and local rank of this rank, in a group whose ranks are numbered node by node."""

    node: int = 0
    num_nodes: int = 1
    local_rank: int = 0  # number of this rank inside its node
    ranks_per_node: int = 1
    local: dist.ProcessGroup | None = None  # group of this node; None for nodes of one rank

    def splits(self, counts_N: list[int]) -> list[int]:
        """Return the split sizes of an all-to-all by rank, from row counts for each of N nodes.

        The rows for a node go to the rank there that has the same local rank as this rank.
        """
        splits = [0] * (self.num_nodes * self.ranks_per_node)
        splits[self.local_rank :: self.ranks_per_node] = counts_N
        return splits


def find_nodes(group: dist.ProcessGroup | None, *, ranks_per_node: int = 0) -> Nodes:
    """Return this rank's ``Nodes`` in a group; create a process group per node. Collective.

    All ranks of the default group call it at the same time, each with the group it belongs to.

    Args:
        group: the ranks over which experts are spread; None for a single rank.
        ranks_per_node: ranks of a node, which must divide the group. 0 finds the nodes by the hosts
            of the ranks. A host is known by its name, or by ``NCCL_HOSTID``, as in NCCL itself. All
            hosts must have the same number of ranks, which follow each other.
    """
    if group is None:
        return Nodes()
    own = tuple(dist.get_process_group_ranks(group))
    asked = all_gather_objects(
        (own, host_name(), ranks_per_node), group=dist.group.WORLD, operation="the search for nodes"
    )
    hosts = {rank: name for rank, (_, name, _) in enumerate(asked)}
    sizes = {
        ranks: size or _find_ranks_per_node(ranks, hosts)
        for ranks, size in dict.fromkeys((ranks, size) for ranks, _, size in asked)
    }
    for ranks, size in sizes.items():
        if size < 1 or len(ranks) % size:
            raise ValueError(
                f"ranks_per_node ({size}) must divide the ranks of the group ({len(ranks)})"
            )
    # new_group is a collective of all ranks of the job, so each rank creates all groups.
    local = None
    for ranks, size in sizes.items():
        for first in range(0, len(ranks), size):
            members = list(ranks[first : first + size])
            if size > 1:
                made = dist.new_group(members, timeout=time_limit(group))
                local = cast(dist.ProcessGroup, made) if dist.get_rank() in members else local
    size = sizes[own]
    node, local_rank = divmod(rank_and_size(group)[0], size)
    position = {"node": node, "num_nodes": len(own) // size, "local_rank": local_rank}
    return Nodes(**position, ranks_per_node=size, local=local)


def _find_ranks_per_node(ranks: tuple[int, ...], host_of: dict[int, str]) -> int:
    hosts = [host_of[rank] for rank in ranks]
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{count} on {name}" for name, count in counts.items())
        raise ValueError(f"hosts must have the same number of ranks of the group: {described}")
    size = counts[hosts[0]]
    if any(len(set(hosts[first : first + size])) > 1 for first in range(0, len(hosts), size)):
        raise ValueError(
            f"ranks of one host must follow each other in the group: {', '.join(hosts)}"
        )
    return size
