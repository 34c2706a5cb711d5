"""Find the tokens of a rank that must be sent to other nodes, for ``strategies/hierarchical.py``.

A token crosses once to each node that has any of its experts. Each (token, node) pair is a row.
Rows are sent in chunks of consecutive tokens, so that one chunk travels while another is computed.

In this file, N is the number of nodes, S of rows that this rank sends, C of chunks, and E' of
experts of one node.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
import torch.distributed as dist

from halley.core.types import DROPPED, Routing
from halley.distributed.nodes import Nodes
from halley.distributed.peers import Collective
from halley.ops.traceable_routing import sort_slots


_TOO_MANY = "more tokens have experts in another node than max_load allows"


@final
class NodeTables:
    """Tables by expert id: the other node that holds the expert, or the expert's id in this node.

    ``num_experts`` is E'. One lookup replaces several operations on the device.

    Attributes:
        other_node: node of each expert; N for the experts of the own node, and for ``DROPPED``.
        own_id: id of each expert in its node; ``DROPPED`` for experts of other nodes.
    """

    def __init__(self, nodes: Nodes, *, num_experts: int, device: torch.device) -> None:
        self.nodes, self.num_experts = nodes, num_experts
        # The tables have one more element than experts: index ``DROPPED``, -1, reads the last one.
        expert = torch.arange(nodes.num_nodes * num_experts + 1, device=device)
        node = expert // num_experts
        self.other_node = torch.where(node == nodes.node, nodes.num_nodes, node)
        self.own_id = torch.where(node == nodes.node, expert % num_experts, DROPPED)

    def keep_own(self, routing: Routing) -> Routing:
        """Return ``routing`` with ids within this node; other nodes' experts become ``DROPPED``.

        The result has min(K, E') slots for each token: no token has more experts in a node.
        """
        idx_TK, weights_TK = self.own_id.take(routing.topk_idx_TK), routing.topk_weights_TK
        if idx_TK.shape[1] > self.num_experts:
            order_TK = (idx_TK == DROPPED).byte().sort(dim=1, stable=True).indices
            columns_TK = order_TK[:, : self.num_experts]
            idx_TK, weights_TK = idx_TK.gather(1, columns_TK), weights_TK.gather(1, columns_TK)
        return Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The tokens that this rank sends to other nodes, and how many rows it sends and receives.

    Rows are sorted by chunk, then by destination node, then by token. If the rows are all tokens in
    order, ``token_S`` and ``row_TN`` are None.
    """

    token_S: torch.Tensor | None  # token index of each row that is sent
    row_TN: torch.Tensor | None  # index of a token's row to a node; S if there is no such row
    is_used_S: torch.Tensor | None = None  # whether a row is a token that crosses; None: all are
    send_CN: list[list[int]]  # numbers of rows that this rank sends to each node, by chunk
    recv_CN: list[list[int]]  # numbers of rows that this rank receives from each node, by chunk

    @property
    def send_sizes(self) -> list[int]:
        return [sum(counts) for counts in self.send_CN]

    @property
    def recv_sizes(self) -> list[int]:
        return [sum(counts) for counts in self.recv_CN]


def plan_crossing(
    routing: Routing, tables: NodeTables, *, num_chunks: int, group: dist.ProcessGroup
) -> Crossing:
    """Find the rows to send to other nodes, and the numbers of rows to receive; a collective.

    ``routing`` has expert ids of all nodes, and ``group`` the ranks of all nodes. A missing rank is
    a ``RuntimeError``. The host waits for the device.
    """
    idx_TK, nodes = routing.topk_idx_TK, tables.nodes
    num_tokens, num_nodes = idx_TK.shape[0], nodes.num_nodes
    slots, counts = _sort_rows(idx_TK, tables, num_chunks=num_chunks)
    table = idx_TK.new_zeros(2, num_nodes * nodes.ranks_per_node, num_chunks)
    rail = slice(nodes.local_rank, None, nodes.ranks_per_node)
    table[0, rail] = counts.view(num_chunks, num_nodes).t()
    with Collective("route", group=group):
        dist.all_to_all_single(table[1], table[0], group=group)
        sent, received = table.cpu().numpy()
    send_CN = sent[rail].T.tolist()
    num_rows = int(sent[rail].sum())
    token_S = row_TN = None
    if num_nodes > 2 or num_rows < num_tokens:
        slot_S = slots[:num_rows]
        token_S = slot_S // num_nodes
        row = slots.new_full((num_tokens * num_nodes,), num_rows)
        row_TN = row.scatter_(0, slot_S, torch.arange(num_rows, device=row.device))
        row_TN = row_TN.view(num_tokens, num_nodes)
    return Crossing(
        token_S=token_S, row_TN=row_TN, send_CN=send_CN, recv_CN=received[rail].T.tolist()
    )


def _sort_rows(
    idx_TK: torch.Tensor, tables: NodeTables, *, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the (token, node) pairs that cross by chunk, then node, then token; count each group.

    A pair is ``token * N + node``. Pairs that do not cross come last and are not counted. Returns
    all pairs, int64 ``(T * N,)``, and the counts, int64 ``(C * N,)``.
    """
    num_tokens, num_nodes = idx_TK.shape[0], tables.nodes.num_nodes
    node_TK = tables.other_node.take(idx_TK)
    key_TK = node_TK
    if num_chunks > 1:
        token_T1 = torch.arange(num_tokens, device=idx_TK.device)[:, None]
        key_TK = node_TK + token_T1 * num_chunks // max(num_tokens, 1) * num_nodes
    # Dropped slots, and slots of this node's experts, go to the last column, which is cut off.
    key_TN = idx_TK.new_full((num_tokens, num_nodes + 1), DROPPED)
    key_TN = key_TN.scatter_(1, node_TK, key_TK)[:, :num_nodes].contiguous()
    return sort_slots(key_TN, num_chunks * num_nodes)


@final
class FixedCrossing:
    """Plan crossings of fixed sizes on the device: the host reads no counts.

    Each chunk has ``limit(number of tokens)`` rows for each other node. Rows beyond the tokens that
    cross repeat a token and have no experts. If more tokens cross, a device assertion ends the
    process (on a CPU, a ``RuntimeError``). All ranks must have T tokens.
    """

    def __init__(
        self,
        tables: NodeTables,
        *,
        num_tokens: int,
        num_chunks: int,
        limit: Callable[[int], int],
    ) -> None:
        nodes, device = tables.nodes, tables.own_id.device
        self.tables, self.num_tokens, self.num_chunks = tables, num_tokens, num_chunks
        # Token t is in chunk t * C // T, so chunk c begins at token ceil(c * T / C).
        begins = [-(-num_tokens * chunk // num_chunks) for chunk in range(num_chunks + 1)]
        chunk_sizes = [end - begin for begin, end in pairwise(begins)]
        others = [int(node != nodes.node) for node in range(nodes.num_nodes)]
        self.sizes_CN = [[limit(size) * other for other in others] for size in chunk_sizes]
        # All tokens cross in order to a single other node: no row needs an index.
        self._all_cross = nodes.num_nodes == 2 and list(map(sum, self.sizes_CN)) == chunk_sizes
        sizes = torch.tensor(self.sizes_CN, dtype=torch.int64).flatten()
        group_S = torch.arange(len(sizes)).repeat_interleave(sizes)
        place_S = torch.arange(len(group_S)) - (sizes.cumsum(0) - sizes)[group_S]
        self._sizes = sizes.to(device)
        self._group_S, self._place_S = group_S.to(device), place_S.to(device)

    def plan(self, routing: Routing) -> Crossing:
        """Return the crossing of T tokens; ``routing`` has expert ids of all nodes."""
        token_S = row_TN = is_used_S = None
        if not self._all_cross:
            num_nodes, num_rows = self.tables.nodes.num_nodes, len(self._group_S)
            pairs, counts = _sort_rows(routing.topk_idx_TK, self.tables, num_chunks=self.num_chunks)
            is_within = (counts <= self._sizes).all()
            torch._assert_async(is_within, _TOO_MANY)  # pyright: ignore[reportPrivateImportUsage]
            is_used_S = self._place_S < counts[self._group_S]
            first = counts.cumsum(0) - counts
            pair_S = pairs[(first[self._group_S] + self._place_S).clamp_max(len(pairs) - 1)]
            token_S = pair_S // num_nodes
            row = pairs.new_full((len(pairs) + 1,), num_rows)  # unused rows write the last element
            index_S = torch.where(is_used_S, pair_S, len(pairs))
            row.scatter_(0, index_S, torch.arange(num_rows, device=row.device))
            row_TN = row[:-1].view(self.num_tokens, num_nodes)
        return Crossing(
            token_S=token_S,
            row_TN=row_TN,
            is_used_S=is_used_S,
            send_CN=self.sizes_CN,
            recv_CN=self.sizes_CN,
        )
