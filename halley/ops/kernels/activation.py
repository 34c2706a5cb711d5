# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""What becomes of a tile between the two projections: the activation, or its gradient."""

import triton
import triton.language as tl

from halley.ops.kernels.tiles import halves


@triton.jit
def _gelu(x):
    """The exact form, with erf."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):
    """The derivative: the normal distribution and x times its density."""
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def store_activated(
    acc, h_desc, pre_desc, row, column,
    GATED: tl.constexpr, KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the activation of a tile and, for backward, what went into it."""
    if GATED:
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        h_desc.store([row, column], (gate * tl.sigmoid(gate) * up).to(h_desc.dtype))
        if KEEP:
            part: tl.constexpr = BLOCK_N // 2
            pre_desc.store([row, 0, column], gate.to(h_desc.dtype).reshape(BLOCK_M, 1, part))
            pre_desc.store([row, 1, column], up.to(h_desc.dtype).reshape(BLOCK_M, 1, part))
    else:
        h_desc.store([row, column], _gelu(acc).to(h_desc.dtype))
        if KEEP:
            pre_desc.store([row, 0, column], acc.to(h_desc.dtype).reshape(BLOCK_M, 1, BLOCK_N))


@triton.jit
def _load_pre(pre_RG, row, column, GATED: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return some columns of what the activation was made of: gate and up, or twice the same."""
    at, inside = _columns_at(row, column, 2 * SIZE if GATED else SIZE, SIZE, PART)
    gate = tl.load(pre_RG + at, mask=inside, other=0.0)
    if GATED:
        return gate, tl.load(pre_RG + at + SIZE, mask=inside, other=0.0)
    else:
        return gate, gate


@triton.jit
def _columns_at(row, column, STRIDE: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return where some columns of rows stand, and whether they are columns at all."""
    columns = column + tl.arange(0, PART)
    at = (row.to(tl.int64) * STRIDE)[:, None] + columns[None, :]
    return at, (columns < SIZE)[None, :]


@triton.jit
def _store_gradient_part(
    grad, gate, up, weight, h_RF, dpre_RG, row, column,
    GATED: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Do what ``store_gradient`` does for some columns; return their sums of gradient times h."""
    dtype: tl.constexpr = h_RF.dtype.element_ty
    at, inside = _columns_at(row, column, 2 * SIZE if GATED else SIZE, SIZE, PART)
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
    at, inside = _columns_at(row, column, SIZE, SIZE, PART)
    tl.store(h_RF + at, (weight[:, None] * h).to(dtype), mask=inside)
    return tl.sum(grad * h, axis=1)


@triton.jit
def prefetch_pre(
    pre_RG, row, column,
    GATED: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bring what ``store_gradient`` will load of a tile into the cache, and do not wait for it."""
    LINE: tl.constexpr = 128 // (pre_RG.dtype.element_ty.primitive_bitwidth // 8)
    NUM_LINES: tl.constexpr = (BLOCK_N + LINE - 1) // LINE
    columns = column + tl.arange(0, NUM_LINES) * LINE
    columns = tl.minimum(columns, SIZE - 1)[None, :]
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    for part in tl.static_range(2 if GATED else 1):
        at = rows * (2 * SIZE if GATED else SIZE) + columns + part * SIZE
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
    """Turn a tile of the gradient of h, but for routing weights, into what backward goes on with.

    Stored are the gradient of what the activation was made of (``dpre``); the activation times the
    row's routing weight, of which the down projection's gradient is made (``h``), so that neither h
    nor a weighted gradient need be kept; and the tile's part of the gradient of the routing weight,
    which is the sum of gradient times h.
    """
    PART: tl.constexpr = BLOCK_N // 4
    within = tl.arange(0, BLOCK_M)
    real = within < num_rows
    rows = row + within
    weight = tl.load(weight_R + rows, mask=real, other=0.0)
    left, right = halves(grad, BLOCK_M, BLOCK_N)
    first, second = halves(left, BLOCK_M, BLOCK_N // 2)
    third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
    # One after the other, for want of registers.
    dweight = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(4):
        part = first if i == 0 else second if i == 1 else third if i == 2 else fourth
        gate, up = _load_pre(pre_RG, rows, column + i * PART, GATED, SIZE, PART)
        dweight += _store_gradient_part(
            part, gate, up, weight, h_RF, dpre_RG, rows, column + i * PART, GATED, SIZE, PART
        )
    at = rows.to(tl.int64) * NUM_COLUMNS + tile_column
    tl.store(dweight_RC + at, dweight, mask=real)
