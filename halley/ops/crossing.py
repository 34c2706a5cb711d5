"""Rows that cross between nodes, with gradients: which, their messages, and the sums at the source.

A crossing is one exchange of tokens and the return of their partial sums. ``plan_crossing`` finds
the rows; ``send_rows`` and ``receive_rows`` are the two halves of the exchange, so that other work
can run in between; ``add_returned`` adds the partial sums. The backward pass of ``receive_rows``
starts to return gradients, and that of ``send_rows`` waits for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Routing
from halley.distributed.nodes import Nodes
from halley.distributed.peers import Collective
from halley.ops.exchange import Exchange


# Dtype of the tokens that the forward pass sends between nodes; "" keeps the dtype of the tokens.
WireDtype = Literal["", "float8"]
_FLOAT8 = torch.float8_e4m3fn
_GROUP = 128  # columns that share a scale, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2)
_SMALLEST_MAX = 1e-20  # keeps the scale of a group of zeros above 0


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The rows of this rank that cross the network, sorted by node, then by token.

    Attributes:
        node: this rank's node.
        num_tokens: tokens of this rank.
        num_experts: experts of a node.
        token_S: token of each row that this rank sends.
        send_splits: rows to each node, in order of node; 0 to the own one.
        recv_splits: rows from each node.
    """

    node: int
    num_tokens: int
    num_experts: int
    token_S: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]

    def exchanges(
        self, nodes: Nodes, *, group: dist.ProcessGroup, recorder: Recorder
    ) -> tuple[Exchange, Exchange]:
        """Return the exchanges that bring rows to other nodes, and partial sums back."""
        send, receive = nodes.splits(self.send_splits), nodes.splits(self.recv_splits)
        common: dict[str, Any] = {"group": group, "recorder": recorder}
        return (
            Exchange(send_splits=send, recv_splits=receive, name="dispatch", **common),
            Exchange(send_splits=receive, recv_splits=send, name="combine", **common),
        )

    def by_node(self, rows_SX: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens and the rows of each node; no token occurs twice in one node."""
        sizes = self.send_splits
        return zip(self.token_S.split(sizes), rows_SX.split(sizes), strict=True)

    def node_of_rows(self) -> torch.Tensor:
        """Return the destination node of each row, ``(S,)``."""
        nodes = np.repeat(np.arange(len(self.send_splits)), self.send_splits)
        return torch.from_numpy(nodes).to(self.token_S.device)


def plan_crossing(
    routing: Routing, *, nodes: Nodes, num_experts: int, group: dist.ProcessGroup
) -> Crossing:
    """Find the rows to send, and how many rows arrive. Collective; the host waits for the counts.

    Args:
        routing: of this rank's tokens, with expert ids of all nodes.
        nodes: the ranks of ``group`` as nodes.
        num_experts: experts of a node.
        group: the ranks of all nodes.

    Raises:
        RuntimeError: a rank is missing; names the ranks.
    """
    idx_TK = routing.topk_idx_TK
    num_tokens, num_nodes = idx_TK.shape[0], nodes.num_nodes
    # One more column takes the dropped slots; the column of the own node is cleared.
    node_TK = torch.where(idx_TK == DROPPED, num_nodes, idx_TK // num_experts)
    wanted_TN = idx_TK.new_zeros(num_tokens, num_nodes + 1, dtype=torch.uint8)
    wanted_TN.scatter_(1, node_TK, 1)
    wanted_TN[:, nodes.node] = 0
    wanted_NT = wanted_TN[:, :num_nodes].t().contiguous()
    counts_2W = idx_TK.new_zeros(2, num_nodes * nodes.ranks_per_node)
    rail = slice(nodes.local_rank, None, nodes.ranks_per_node)
    counts_2W[0, rail] = wanted_NT.sum(dim=1, dtype=torch.int64)
    with Collective("route", group=group):
        dist.all_to_all_single(counts_2W[1], counts_2W[0], group=group)
    send_splits, recv_splits = counts_2W[:, rail].tolist()
    # A stable sort of single bytes is one radix pass, and it needs no further read by the host.
    order = wanted_NT.flatten().sort(descending=True, stable=True).indices
    return Crossing(
        node=nodes.node,
        num_tokens=num_tokens,
        num_experts=num_experts,
        token_S=order[: sum(send_splits)] % max(num_tokens, 1),
        send_splits=send_splits,
        recv_splits=recv_splits,
    )


def keep_node(routing: Routing, *, node: int, num_experts: int) -> Routing:
    """Return the routing of this rank's tokens inside its node.

    Ids count from the first expert of the node. Slots of other nodes are dropped.
    """
    return _keep_node(routing, node, num_experts=num_experts)[0]


def _keep_node(
    routing: Routing, node: torch.Tensor | int, *, num_experts: int
) -> tuple[Routing, torch.Tensor | None]:
    """Drop the slots whose experts are in other nodes.

    Args:
        routing: with expert ids of all nodes.
        node: the node to keep, one for all tokens or ``(T, 1)``.
        num_experts: experts of a node, E'.

    Returns:
        The routing inside the node, with min(K, E') slots for each token, and the columns of the
        slots that it keeps, ``(T, E')``; None for all K. A token has at most E' experts in a node.
    """
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
    here_TK = (idx_TK != DROPPED) & (idx_TK // num_experts == node)
    columns_TK = None
    if idx_TK.shape[1] > num_experts:
        order_TK = here_TK.byte().sort(dim=1, descending=True, stable=True).indices
        columns_TK = order_TK[:, :num_experts]
        idx_TK, weights_TK, here_TK = (
            values.gather(1, columns_TK) for values in (idx_TK, weights_TK, here_TK)
        )
    kept = Routing(
        topk_idx_TK=torch.where(here_TK, idx_TK % num_experts, DROPPED),
        topk_weights_TK=torch.where(here_TK, weights_TK, 0.0),
    )
    return kept, columns_TK


@final
class Wire:
    """The messages of one forward pass and its backward pass between nodes.

    A row of the forward message holds a token, its float32 weights and its int32 expert ids inside
    the node, as bytes: one all-to-all instead of three. A row of the backward message holds the
    gradients of token and weights.

    With dtype "float8", a token crosses as E4M3 with one float32 scale for each 128 columns.

    Args:
        crossing: the rows that cross.
        exchange: the all-to-all that brings them to other nodes, and their gradients back.
        hidden_size, top_k: D and K of the layer.
        dtype: dtype of the tokens in forward messages.
    """

    def __init__(
        self,
        crossing: Crossing,
        exchange: Exchange,
        *,
        hidden_size: int,
        top_k: int,
        dtype: WireDtype,
    ) -> None:
        self.crossing, self.exchange = crossing, exchange
        self.hidden_size, self.top_k, self.dtype = hidden_size, top_k, dtype
        self.weights_bytes = 4 * min(top_k, crossing.num_experts)  # of a row

    def pack(self, x_SD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the rows of a forward message, uint8; ``routing`` is inside the nodes."""
        parts = [routing.topk_weights_TK.float(), routing.topk_idx_TK.int()]
        if self.dtype == "float8":
            parts += _quantize(x_SD)
        else:
            parts.append(x_SD)
        return torch.cat([_view(part, torch.uint8) for part in parts], dim=1)

    def unpack(
        self, message_RB: torch.Tensor, *, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens in ``dtype``, float32 weights and int64 expert ids of a message."""
        words = self.weights_bytes
        weights, idx = message_RB[:, :words], message_RB[:, words : 2 * words]
        tokens = message_RB[:, 2 * words :]
        if self.dtype == "float8":
            num_groups = -(-self.hidden_size // _GROUP)
            scale, codes = tokens[:, : 4 * num_groups], tokens[:, 4 * num_groups :]
            x_RD = _dequantize(_view(scale, torch.float32), codes, dtype=dtype)
            x_RD = x_RD[:, : self.hidden_size].contiguous()
        else:
            x_RD = _view(tokens, dtype)
        weights_RK = _view(weights, torch.float32)
        return x_RD, weights_RK, _view(idx, torch.int32).long()


def _view(rows_SX: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of rows as another dtype, with more or fewer columns."""
    if not rows_SX.numel():  # its strides are arbitrary, also after contiguous()
        num_columns = rows_SX.shape[1] * rows_SX.itemsize // dtype.itemsize
        return rows_SX.new_empty(rows_SX.shape[0], num_columns, dtype=dtype)
    return rows_SX.contiguous().view(dtype)


def _quantize(x_SD: torch.Tensor) -> list[torch.Tensor]:
    """Return a float32 scale for each 128 columns, and the columns divided by it, in E4M3."""
    padded = F.pad(x_SD.float(), (0, -x_SD.shape[1] % _GROUP))
    groups = padded.unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(2).clamp_min(_SMALLEST_MAX) / torch.finfo(_FLOAT8).max
    codes = (groups / scale[:, :, None]).to(_FLOAT8)
    return [scale, codes.flatten(1)]


def _dequantize(scale: torch.Tensor, codes: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    values = _view(codes, _FLOAT8).float().unflatten(1, (-1, _GROUP))
    return (values * scale[:, :, None]).flatten(1).to(dtype)


def send_rows(x_TD: torch.Tensor, routing: Routing, *, wire: Wire) -> torch.Tensor:
    """Start to send the rows that cross; return a tensor to pass to ``receive_rows``."""
    return _SendRows.apply(  # pyright: ignore[reportReturnType]
        x_TD, routing.topk_weights_TK, routing.topk_idx_TK, wire
    )


def receive_rows(started: torch.Tensor, *, wire: Wire) -> tuple[torch.Tensor, Routing]:
    """Wait for the rows of other nodes; return them and their routing inside this node."""
    x_RD, weights_RK, idx_RK = _ReceiveRows.apply(started, wire)  # pyright: ignore
    return x_RD, Routing(topk_idx_TK=idx_RK, topk_weights_TK=weights_RK)


def add_returned(
    y_own_TD: torch.Tensor, returned_SD: torch.Tensor, *, crossing: Crossing
) -> torch.Tensor:
    """Return the sums of the partial sums of all nodes, added in float32 in order of node.

    Args:
        y_own_TD: partial sums of this rank's tokens by the experts of its own node.
        returned_SD: partial sums of other nodes, in the order in which the rows were sent.
    """
    return _AddReturned.apply(  # pyright: ignore[reportReturnType]
        y_own_TD, returned_SD, crossing
    )


class _SendRows(torch.autograd.Function):
    """Start to send the rows that cross; the backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, idx_TK, wire):
        crossing = wire.crossing
        token_S, num_experts = crossing.token_S, crossing.num_experts
        routing = Routing(
            topk_idx_TK=idx_TK.index_select(0, token_S),
            topk_weights_TK=weights_TK.index_select(0, token_S),
        )
        node_S1 = crossing.node_of_rows()[:, None]
        routing, columns_SK = _keep_node(routing, node_S1, num_experts=num_experts)
        ctx.save_for_backward(columns_SK, routing.topk_idx_TK != DROPPED)
        ctx.wire, ctx.dtypes = wire, (x_TD.dtype, weights_TK.dtype)
        message = wire.pack(x_TD.index_select(0, token_S), routing)
        wire.exchange.launch(message, backward=False)
        # This result links both halves in the autograd graph. The exchange holds the rows.
        return x_TD.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        columns_SK, here_SK = ctx.saved_tensors
        wire: Wire = ctx.wire
        message = wire.exchange.finish(backward=True)
        words = wire.weights_bytes
        grad_weights = _view(message[:, :words], torch.float32)
        grad_weights = torch.where(here_SK, grad_weights, 0.0)
        if columns_SK is not None:
            full = grad_weights.new_zeros(grad_weights.shape[0], wire.top_k)
            grad_weights = full.scatter_(1, columns_SK, grad_weights)
        x_dtype, weights_dtype = ctx.dtypes
        grad_rows = _view(message[:, words:], x_dtype)
        return (
            _sum_by_token(grad_rows, wire.crossing, dtype=x_dtype),
            _sum_by_token(grad_weights, wire.crossing, dtype=weights_dtype),
            None,
            None,
        )


class _ReceiveRows(torch.autograd.Function):
    """Wait for the rows of other nodes; the backward pass starts to return their gradients."""

    @staticmethod
    def forward(ctx, started, wire):
        ctx.wire = wire
        x_RD, weights_RK, idx_RK = wire.unpack(
            wire.exchange.finish(backward=False), dtype=started.dtype
        )
        ctx.mark_non_differentiable(idx_RK)
        return x_RD, weights_RK, idx_RK

    @staticmethod
    def backward(ctx, grad_RD, grad_RK, _):
        message = torch.cat([_view(grad_RK, torch.uint8), _view(grad_RD, torch.uint8)], dim=1)
        ctx.wire.exchange.launch(message, backward=True)
        return grad_RD.new_zeros(()), None


def _sum_by_token(rows_SX: torch.Tensor, crossing: Crossing, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 sum of each token's rows in order of node, ``(T, X)``."""
    total = rows_SX.new_zeros(crossing.num_tokens, rows_SX.shape[1], dtype=torch.float32)
    for token, rows in crossing.by_node(rows_SX):
        total.index_add_(0, token, rows.float())  # no token occurs twice, so the order is fixed
    return total.to(dtype)


class _AddReturned(torch.autograd.Function):
    """Add the partial sums of all nodes in float32, in order of node."""

    @staticmethod
    def forward(ctx, y_own_TD, returned_SD, crossing):
        ctx.token_S = crossing.token_S
        total = torch.zeros_like(y_own_TD, dtype=torch.float32)
        for node, (token, rows) in enumerate(crossing.by_node(returned_SD)):
            if node == crossing.node:
                total += y_own_TD
            else:
                total.index_add_(0, token, rows.float())
        return total.to(y_own_TD.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.index_select(0, ctx.token_S), None
