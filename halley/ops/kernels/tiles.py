# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Device functions that compute one tile of a grouped GEMM, and the TMA descriptors they need."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, kw_only=True)
class GemmTile:
    """Shape of one GEMM tile, and of the loop that computes it.

    ``run`` is the number of adjacent tiles that one CTA computes in one loop. The loads of the
    next tile start during the last steps of the previous tile. 0, for weight gradients only,
    chooses the run and the tile size from the number of rows.
    """

    block_n: int = 256  # columns of the output before the activation
    block_k: int = 64  # depth of one step of the loop
    group: int = 8  # row tiles that are computed for a column tile before the next column tile
    run: int = 1
    num_warps: int = 8
    per_sm: int = 1  # CTAs on one SM; one of them can multiply while the other stores
    num_stages: int = 4  # of the software pipeline of the loop


@triton.jit
def tile_of(ticket, num_tiles, num_columns, GROUP: tl.constexpr):
    """Return the (row tile, column tile) that a CTA computes for a ticket.

    Consecutive tickets are ``GROUP`` row tiles of one column tile, so that the L2 cache still holds
    its weights. Example: 3 row tiles, 2 column tiles, ``GROUP`` 2: tickets 0 to 5 are tiles (0, 0),
    (1, 0), (0, 1), (1, 1), (2, 0) and (2, 1).
    """
    width = GROUP * num_columns
    first = (ticket // width) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = ticket % width
    return first + within % size, within // size


@triton.jit
def multiply_step(
    acc, a_desc, b_desc, row, expert, column, k,
    TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add ``a[row tile, k block] @ b[expert, column tile, k block].T`` to ``acc``, an output tile.

    ``b`` is (experts, projections, columns of a projection, depth). A tile has the same columns of
    every projection side by side, because the activation needs gate and up value of a column. If
    transposed, for gradients, ``b`` is (experts, 1, depth, columns).
    """
    a = a_desc.load([row, k])
    if TRANSPOSED:
        return tl.dot(a, b_desc.load([expert, 0, k, column]).reshape(BLOCK_K, BLOCK_N), acc)
    else:
        b = b_desc.load([expert, 0, column, k]).reshape(BLOCK_N, BLOCK_K)
        return tl.dot(a, b.T, acc)


@triton.jit
def multiply_tile(
    a_desc, b_desc, row, expert, column, DEPTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``a[row : row + BLOCK_M] @ b[expert, :, column :].T`` in float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        acc = multiply_step(
            acc, a_desc, b_desc, row, expert, column, k, TRANSPOSED, BLOCK_N, BLOCK_K
        )
    return acc


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the left and the right half of an output tile; no value moves to another thread."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


def describe(base: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return the TMA descriptor of a tensor. Skips Triton's constructor, whose checks are slow."""
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.block_shape, desc.padding = base, block, "zero"
    desc.shape, desc.strides = list(base.shape), list(base.stride())
    return desc


def describe_rows(rows: torch.Tensor, *, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return the TMA descriptor of a contiguous matrix of rows."""
    return describe(rows, [block_rows, block_columns])


def describe_weights(
    weight: torch.Tensor, *, num_projections: int, tile: GemmTile, transposed: bool = False
) -> TensorDescriptor:
    """Return the TMA descriptor of contiguous stacked weights.

    They are ``(L, num_projections * columns, depth)``, or ``(L, depth, columns)`` if the GEMM
    multiplies by the transposed weights.
    """
    block = [tile.block_n // num_projections, tile.block_k]
    if transposed:
        block = [tile.block_k, tile.block_n]
    stacked = weight.view(len(weight), num_projections, -1, weight.shape[2])
    return describe(stacked, [1, num_projections, *block])


@triton.jit
def _gelu(x):
    """Return the exact GELU, with erf."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):
    """Return the derivative of GELU: the normal CDF, plus x times the normal density."""
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def store_activated(
    acc, h_desc, pre_desc, row, column,
    GATED: tl.constexpr, SAVE_PRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the activation of an output tile and, with ``SAVE_PRE``, the activation's inputs."""
    if GATED:
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        h_desc.store([row, column], (gate * tl.sigmoid(gate) * up).to(h_desc.dtype))
        if SAVE_PRE:
            half: tl.constexpr = BLOCK_N // 2
            pre_desc.store([row, 0, column], gate.to(h_desc.dtype).reshape(BLOCK_M, 1, half))
            pre_desc.store([row, 1, column], up.to(h_desc.dtype).reshape(BLOCK_M, 1, half))
    else:
        h_desc.store([row, column], _gelu(acc).to(h_desc.dtype))
        if SAVE_PRE:
            pre_desc.store([row, 0, column], acc.to(h_desc.dtype).reshape(BLOCK_M, 1, BLOCK_N))


@triton.jit
def _load_pre(pre_RG, row, column, GATED: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr):
    """Load some columns of the activation's inputs: (gate, up), or without gate (up, up)."""
    at, inside = _columns_at(row, column, 2 * SIZE if GATED else SIZE, SIZE, QUARTER)
    gate = tl.load(pre_RG + at, mask=inside, other=0.0)
    if GATED:
        return gate, tl.load(pre_RG + at + SIZE, mask=inside, other=0.0)
    else:
        return gate, gate


@triton.jit
def _columns_at(row, column, STRIDE: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr):
    """Return offsets of some columns of rows, and a mask of the columns that exist."""
    columns = column + tl.arange(0, QUARTER)
    at = (row.to(tl.int64) * STRIDE)[:, None] + columns[None, :]
    return at, (columns < SIZE)[None, :]


@triton.jit
def _store_gradient_quarter(
    grad, gate, up, weight, h_RF, dpre_RG, row, column,
    GATED: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a quarter of a tile; return the row sums of gradient times h."""
    dtype: tl.constexpr = h_RF.dtype.element_ty
    at, inside = _columns_at(row, column, 2 * SIZE if GATED else SIZE, SIZE, QUARTER)
    gate = gate.to(tl.float32)
    grad_h = weight[:, None] * grad
    if GATED:
        up = up.to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        h = silu * up
        grad_gate = grad_h * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dpre_RG + at, grad_gate.to(dtype), mask=inside)
        tl.store(dpre_RG + at + SIZE, (grad_h * silu).to(dtype), mask=inside)
    else:
        h = _gelu(gate)
        tl.store(dpre_RG + at, (grad_h * _gelu_slope(gate)).to(dtype), mask=inside)
    at, inside = _columns_at(row, column, SIZE, SIZE, QUARTER)
    tl.store(h_RF + at, (weight[:, None] * h).to(dtype), mask=inside)
    return tl.sum(grad * h, axis=1)


@triton.jit
def prefetch_pre(
    pre_RG, row, column,
    GATED: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch into the L2 cache the activation's inputs that ``store_gradient`` will load."""
    LINE: tl.constexpr = 128 // (pre_RG.dtype.element_ty.primitive_bitwidth // 8)
    NUM_LINES: tl.constexpr = (BLOCK_N + LINE - 1) // LINE
    columns = column + tl.arange(0, NUM_LINES) * LINE
    columns = tl.minimum(columns, SIZE - 1)[None, :]
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    for projection in tl.static_range(2 if GATED else 1):
        at = rows * (2 * SIZE if GATED else SIZE) + columns + projection * SIZE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b64 $0, $1;", "=l,l", [(pre_RG + at).to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store_gradient(
    grad, num_rows, h_RF, pre_RG, dpre_RG, weight_R, dweight_RJ, row, column, tile_column,
    GATED: tl.constexpr, SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the three results of a backward tile from ``grad``, the gradient of the activation h.

    - ``dpre``: gradient of the activation's inputs, ``weight * grad * act'(pre)``.
    - ``h``: ``weight * act(pre)``, for the second projection's gradient; forward does not save it.
    - ``dweight``: summand of the routing weight's gradient, the row sum of ``grad * act(pre)``.
    """
    QUARTER: tl.constexpr = BLOCK_N // 4
    within = tl.arange(0, BLOCK_M)
    real = within < num_rows
    rows = row + within
    weight = tl.load(weight_R + rows, mask=real, other=0.0)
    left, right = halves(grad, BLOCK_M, BLOCK_N)
    first, second = halves(left, BLOCK_M, BLOCK_N // 2)
    third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
    # One quarter after the other, because the inputs of a whole tile do not fit into registers.
    dweight = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(4):
        quarter = first if i == 0 else second if i == 1 else third if i == 2 else fourth
        gate, up = _load_pre(pre_RG, rows, column + i * QUARTER, GATED, SIZE, QUARTER)
        dweight += _store_gradient_quarter(
            quarter, gate, up, weight, h_RF, dpre_RG, rows, column + i * QUARTER,
            GATED, SIZE, QUARTER,
        )  # fmt: skip
    at = rows.to(tl.int64) * NUM_COLUMNS + tile_column
    tl.store(dweight_RJ + at, dweight, mask=real)
