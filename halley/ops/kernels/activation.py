# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Epilogues of the first GEMM: the activation of a tile, or its gradient."""

import triton
import triton.language as tl

from halley.ops.kernels.tiles import halves


@triton.jit
def _gelu(x):
    """Return the exact GELU, with erf."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):
    """Return the derivative of GELU: the normal distribution plus x times its density."""
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def store_activated(
    acc, h_desc, pre_desc, row, column,
    GATED: tl.constexpr, SAVE_PRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the activation of a tile and, for backward, its inputs (``pre``)."""
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
    """Return some columns of the activation's inputs: gate and up, or twice the same tensor."""
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
    """Prefetch the inputs of a tile's ``store_gradient`` into the L2 cache."""
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
    grad, num_rows, h_RF, pre_RG, dpre_RG, weight_R, dweight_RC, row, column, tile_column,
    GATED: tl.constexpr, SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the results of a tile of backward, from the unweighted gradient of the activation h.

    Three results are stored. ``dpre`` is the gradient of the activation's inputs. ``h`` is the
    activation times the row's routing weight, an operand of the second projection's gradient:
    so neither h nor a weighted gradient must be saved. ``dweight`` is this tile's summand of the
    routing weight's gradient, the row sum of gradient times h.
    """
    QUARTER: tl.constexpr = BLOCK_N // 4
    within = tl.arange(0, BLOCK_M)
    real = within < num_rows
    rows = row + within
    weight = tl.load(weight_R + rows, mask=real, other=0.0)
    left, right = halves(grad, BLOCK_M, BLOCK_N)
    first, second = halves(left, BLOCK_M, BLOCK_N // 2)
    third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
    # One quarter after the other: a whole tile of inputs needs more registers than a CTA has.
    dweight = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(4):
        quarter = first if i == 0 else second if i == 1 else third if i == 2 else fourth
        gate, up = _load_pre(pre_RG, rows, column + i * QUARTER, GATED, SIZE, QUARTER)
        dweight += _store_gradient_quarter(
            quarter, gate, up, weight, h_RF, dpre_RG, rows, column + i * QUARTER,
            GATED, SIZE, QUARTER,
        )  # fmt: skip
    at = rows.to(tl.int64) * NUM_COLUMNS + tile_column
    tl.store(dweight_RC + at, dweight, mask=real)
