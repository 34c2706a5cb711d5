"""Send tokens to other nodes that have their experts, and return partial sums; differentiable.

``Wire`` does this for the rows that a ``Crossing`` lists (``ops/crossing.py``):

    send_rows      start to send the tokens of all chunks; backward waits for their gradients
    receive_rows   wait for the tokens of one chunk; backward starts to return their gradients
    return_sums    start to return the partial sums of one chunk; backward waits for their gradients
    add_returned   wait for and add all partial sums; backward starts to send their gradients

In this file, S is the number of rows that this rank sends, R of rows that it receives in a chunk,
C of rows that it sends in a chunk (in ``send_CN``: of chunks), and N the number of nodes.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Routing
from halley.ops.crossing import Crossing, NodeTables
from halley.ops.exchange import Exchange


# Dtype of the tokens that the forward pass sends between nodes; "" keeps the dtype of the tokens.
WireDtype = Literal["", "float8"]
_FLOAT8 = torch.float8_e4m3fn
_GROUP = 128  # columns that share a scale, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2)
FLOAT8_BYTES = 1 + 4 / _GROUP  # bytes of a value of "float8" with its part of the float32 scale
_SMALLEST_MAX = 1e-20  # keeps the scale of a group of zeros above 0
_FLOAT8_CAPABILITY = (8, 9)  # GPUs from Ada on convert to E4M3 in hardware, as Triton requires
_PADDED_BITS = 5  # padding adds at most 1/16 of the rows, or 7 rows, so that few sizes occur


@final
class Wire:
    """All-to-alls between nodes for one forward pass of a layer and its backward pass.

    A chunk crosses in two all-to-alls: weights and ids as float32 and int32 words, then the tokens.
    The gradients of both return in the same way. With dtype "float8", tokens cross as E4M3, and
    the words contain one float32 scale for each 128 columns.

    Received rows are padded by rows without experts, so that few different numbers of rows occur:
    layers are recorded and compiled for each number. ``group`` has the ranks of all nodes.
    """

    def __init__(
        self,
        crossing: Crossing,
        *,
        tables: NodeTables,
        group: dist.ProcessGroup,
        recorder: Recorder,
        hidden_size: int,
        dtype: WireDtype,
    ) -> None:
        self.crossing, self.tables, self.dtype = crossing, tables, dtype
        self.hidden_size = hidden_size
        self.recv_sizes, nodes = crossing.recv_sizes, tables.nodes
        splits = [
            (nodes.splits(sent), nodes.splits(received))
            for sent, received in zip(crossing.send_CN, crossing.recv_CN, strict=True)
        ]
        exchange = partial(Exchange, group=group, recorder=recorder)
        self.words, self.tokens = (
            [exchange(send_splits=s, recv_splits=r, name=name) for s, r in splits]
            for name in ("dispatch of routing", "dispatch")
        )
        self.sums = [exchange(send_splits=r, recv_splits=s, name="combine") for s, r in splits]
        self._buffers: dict[Exchange, torch.Tensor] = {}

    def send_rows(self, x_TD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, ...]:
        """Start to send the tokens of all chunks; return each chunk's input of ``receive_rows``."""
        return _SendRows.apply(  # pyright: ignore[reportReturnType]
            x_TD, routing.topk_weights_TK, routing.topk_idx_TK, self
        )

    def receive_rows(self, started: torch.Tensor, *, chunk: int) -> tuple[torch.Tensor, Routing]:
        """Wait for the tokens of a chunk; return the padded rows and their routing in this node."""
        x_RD, weights_RK, idx_RK = _ReceiveRows.apply(started, self, chunk)  # pyright: ignore
        routing = Routing(topk_idx_TK=idx_RK, topk_weights_TK=weights_RK)
        return x_RD, self.tables.keep_own(routing)

    def return_sums(self, y_RD: torch.Tensor, *, chunk: int) -> torch.Tensor:
        """Start to send back a chunk's partial sums; return an input of ``add_returned``."""
        return _ReturnSums.apply(y_RD, self, chunk)  # pyright: ignore[reportReturnType]

    def add_returned(
        self, y_own_TD: torch.Tensor, returned: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Wait for all partial sums; return each token's sum over the nodes, rounded once.

        ``y_own_TD`` are sums by this node's experts, ``returned`` are results of ``return_sums``.
        """
        return _AddReturned.apply(y_own_TD, self, *returned)  # pyright: ignore[reportReturnType]

    def launch_to_experts(
        self, exchange: Exchange, rows_CX: torch.Tensor, *, chunk: int, backward: bool
    ) -> None:
        """Start to send a chunk's rows, or gradients of partial sums, to the experts' nodes."""
        num_rows = self.recv_sizes[chunk]
        buffer = rows_CX.new_empty(_pad_rows(num_rows), rows_CX.shape[1])
        if len(buffer) > num_rows:
            buffer[num_rows:] = 0
        self._buffers[exchange], exchange.received = buffer, buffer[:num_rows]
        exchange.launch(rows_CX, backward=backward)

    def finish_to_experts(self, exchange: Exchange, *, backward: bool) -> torch.Tensor:
        """Wait for ``launch_to_experts``; return the received rows, padded by rows of zeros."""
        exchange.finish(backward=backward)
        return self._buffers.pop(exchange)

    def launch_to_tokens(
        self, exchanges: list[Exchange], rows_RX: torch.Tensor, *, chunk: int, backward: bool
    ) -> None:
        """Start to return a chunk's partial sums, or gradients of rows, to the tokens' nodes.

        There is one exchange per chunk. The rows of all chunks arrive in one buffer.
        """
        sizes = self.crossing.send_sizes
        if exchanges[0] not in self._buffers:
            buffer = rows_RX.new_empty(sum(sizes) + 1, rows_RX.shape[1])
            if self.crossing.row_TN is not None:  # else nothing reads the last row
                buffer[-1] = 0
            self._buffers[exchanges[0]] = buffer
        first = sum(sizes[:chunk])
        received = self._buffers[exchanges[0]][first : first + sizes[chunk]]
        exchanges[chunk].received = received
        exchanges[chunk].launch(rows_RX[: self.recv_sizes[chunk]], backward=backward)

    def finish_to_tokens(self, exchanges: list[Exchange], *, backward: bool) -> torch.Tensor:
        """Wait for all chunks; return their rows and one more row (zeros if ``row_TN`` is set)."""
        for exchange in exchanges:
            exchange.finish(backward=backward)
        return self._buffers.pop(exchanges[0])


def _view(rows_SX: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of rows as another dtype, with more or fewer columns."""
    if not rows_SX.numel():  # an empty tensor has arbitrary strides, even after contiguous()
        num_columns = rows_SX.shape[1] * rows_SX.itemsize // dtype.itemsize
        return rows_SX.new_empty(rows_SX.shape[0], num_columns, dtype=dtype)
    return rows_SX.contiguous().view(dtype)


def _quantize(x_SD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to E4M3 in groups of 128 columns; return padded codes and a scale per group."""
    padded = F.pad(x_SD.float(), (0, -x_SD.shape[1] % _GROUP))
    groups = padded.unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(2).clamp_min(_SMALLEST_MAX) / torch.finfo(_FLOAT8).max
    codes = (groups / scale[:, :, None]).to(_FLOAT8)
    return codes.flatten(1), scale


def _dequantize(codes: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    values = codes.float().unflatten(1, (-1, _GROUP))
    return (values * scale[:, :, None]).flatten(1).to(dtype)


def _in_one_kernel(
    convert: Callable[..., Any], rows: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Call ``_quantize`` or ``_dequantize``, compiled into one kernel on GPUs that have E4M3."""
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= _FLOAT8_CAPABILITY:
        convert = _compile(convert)
    return convert(rows, *args, **options)


@cache
def _compile(convert: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(convert, dynamic=True, fullgraph=True)


def _pad_rows(num_rows: int) -> int:
    """Round a row count up by at most 1/16 or 7 rows, so that few different sizes occur."""
    step = 1 << max(3, num_rows.bit_length() - _PADDED_BITS)
    return -(-num_rows // step) * step


def _sum_nodes(
    rows_SX: torch.Tensor, wire: Wire, *, own_TX: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of each token's rows from all nodes, rounded once.

    ``rows_SX`` is from ``finish_to_tokens``. ``own_TX`` are rows that this node computed, if any.
    """
    row_TN, own_node = wire.crossing.row_TN, wire.tables.nodes.node
    if row_TN is None:
        rows_TX = rows_SX[:-1]
        return rows_TX if own_TX is None else own_TX + rows_TX
    parts = [
        own_TX if node == own_node else rows_SX.index_select(0, row_T)
        for node, row_T in enumerate(row_TN.unbind(1))
    ]
    parts = [part for part in parts if part is not None]
    if len(parts) > 2:  # a sum over a dimension adds in float32 and rounds once
        return torch.stack(parts).sum(0)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weights_TK, idx_TK, wire):
        ctx.wire, ctx.dtypes = wire, (x_TD.dtype, weights_TK.dtype)
        words = torch.cat([_view(weights_TK.float(), torch.int32), idx_TK.int()], dim=1)
        token_S, rows = wire.crossing.token_S, x_TD
        if token_S is not None:
            words, rows = words.index_select(0, token_S), rows.index_select(0, token_S)
        if wire.crossing.is_used_S is not None:  # unused rows have no experts
            ids_SK = words[:, idx_TK.shape[1] :]
            ids_SK.masked_fill_(~wire.crossing.is_used_S[:, None], DROPPED)
        if wire.dtype == "float8":
            codes, scale = _in_one_kernel(_quantize, rows)
            rows = codes.view(torch.uint8)  # bytes: not every backend can send float8
            words = torch.cat([words, _view(scale, torch.int32)], dim=1)
        sizes = wire.crossing.send_sizes
        pairs = zip(words.split(sizes), rows.split(sizes), strict=True)
        for chunk, (words_CX, rows_CD) in enumerate(pairs):
            for exchange, part in ((wire.words[chunk], words_CX), (wire.tokens[chunk], rows_CD)):
                wire.launch_to_experts(exchange, part, chunk=chunk, backward=False)
        # The scalars only link ``_SendRows`` to ``_ReceiveRows`` in the autograd graph: then
        # autograd runs both backward passes in order. The wire's buffers hold the rows.
        return tuple(x_TD.new_zeros(()) for _ in sizes)

    @staticmethod
    def backward(ctx, *_):
        wire: Wire = ctx.wire
        x_dtype, weights_dtype = ctx.dtypes
        grad_weights = wire.finish_to_tokens(wire.words, backward=True)
        grad_x = wire.finish_to_tokens(wire.tokens, backward=True)
        return (
            _sum_nodes(grad_x, wire).to(x_dtype),
            _sum_nodes(grad_weights, wire).to(weights_dtype),
            None,
            None,
        )


class _ReceiveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, started, wire, chunk):
        ctx.wire, ctx.chunk = wire, chunk
        words_RX = wire.finish_to_experts(wire.words[chunk], backward=False)
        x_RD = wire.finish_to_experts(wire.tokens[chunk], backward=False)
        num_words, num_groups = words_RX.shape[1], 0
        if wire.dtype == "float8":
            num_groups = x_RD.shape[1] // _GROUP
            scale = _view(words_RX[:, num_words - num_groups :], torch.float32)
            x_RD = _in_one_kernel(_dequantize, x_RD.view(_FLOAT8), scale, dtype=started.dtype)
            x_RD = x_RD[:, : wire.hidden_size].contiguous()
        top_k = (num_words - num_groups) // 2
        weights_RK = _view(words_RX[:, :top_k], torch.float32)
        idx_RK = words_RX[:, top_k : 2 * top_k].long()
        if len(idx_RK) > wire.recv_sizes[chunk]:
            idx_RK[wire.recv_sizes[chunk] :] = DROPPED
        ctx.mark_non_differentiable(idx_RK)
        return x_RD, weights_RK, idx_RK

    @staticmethod
    def backward(ctx, grad_RD, grad_RK, _):
        wire: Wire = ctx.wire
        for exchanges, rows in ((wire.words, grad_RK), (wire.tokens, grad_RD)):
            wire.launch_to_tokens(exchanges, rows, chunk=ctx.chunk, backward=True)
        return grad_RD.new_zeros(()), None, None


class _ReturnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, wire, chunk):
        ctx.wire, ctx.chunk = wire, chunk
        wire.launch_to_tokens(wire.sums, y_RD, chunk=chunk, backward=False)
        return y_RD.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        wire: Wire = ctx.wire
        return wire.finish_to_experts(wire.sums[ctx.chunk], backward=True), None, None


class _AddReturned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_own_TD, wire, *_):
        ctx.wire = wire
        return _sum_nodes(wire.finish_to_tokens(wire.sums, backward=False), wire, own_TX=y_own_TD)

    @staticmethod
    def backward(ctx, grad_TD):
        wire: Wire = ctx.wire
        sizes, token_S = wire.crossing.send_sizes, wire.crossing.token_S
        rows = grad_TD if token_S is None else grad_TD.index_select(0, token_S)
        parts = rows.split(sizes)
        # Gradients are sent in reverse order of chunks, because backward computes in that order.
        for chunk in reversed(range(len(sizes))):
            wire.launch_to_experts(wire.sums[chunk], parts[chunk], chunk=chunk, backward=True)
        return grad_TD, None, *(grad_TD.new_zeros(()) for _ in sizes)
