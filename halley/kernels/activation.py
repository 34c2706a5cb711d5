# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""What becomes of a tile between the two projections: the activation, or its gradient."""

import triton
import triton.language as tl

from halley.kernels.tiles import halves


GRADIENT_PARTS = 4  # in which a tile's gradient is stored, for want of registers
_GRADIENT_PARTS = tl.constexpr(GRADIENT_PARTS)


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
def _beside(value, other):
    """Return the value where ``other`` stands: else it is made twice, for a store and for a sum."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [value, other], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _store_weighted(h, grad, weight, h_desc, row, column):
    """Store the activation times the routing weights; return the sums of gradient times it."""
    dweight = tl.sum(grad * h, axis=1)
    h_desc.store([row, column], (weight[:, None] * h).to(h_desc.dtype))
    return dweight


@triton.jit
def _store_gradient_part(
    grad, weight, h_desc, pre_desc, dpre_desc, row, column,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Do what ``store_gradient`` does for some columns; return their sums of gradient times h."""
    pre = pre_desc.load([row, 0, column])
    if GATED:
        gate, up = pre.permute(0, 2, 1).split()
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        h = _beside(silu * up, grad)
        dweight = _store_weighted(h, grad, weight, h_desc, row, column)
        grad_h = weight[:, None] * grad
        grad_gate = (grad_h * up * (sigmoid + silu * (1.0 - sigmoid))).to(h_desc.dtype)
        grad_up = (grad_h * silu).to(h_desc.dtype)
        dpre_desc.store([row, 0, column], tl.join(grad_gate, grad_up).permute(0, 2, 1))
    else:
        pre = pre.reshape(BLOCK_M, PART).to(tl.float32)
        h = _beside(_gelu(pre), grad)
        dweight = _store_weighted(h, grad, weight, h_desc, row, column)
        grad_pre = (weight[:, None] * grad * _gelu_slope(pre)).to(h_desc.dtype)
        dpre_desc.store([row, 0, column], grad_pre.reshape(BLOCK_M, 1, PART))
    return dweight


@triton.jit
def store_gradient(
    grad, num_rows, h_desc, pre_desc, dpre_desc, weight_R, dweight_RC, row, column, tile_column,
    GATED: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    weight = tl.load(weight_R + row + within, mask=real, other=0.0)
    left, right = halves(grad, BLOCK_M, BLOCK_N)
    first, second = halves(left, BLOCK_M, BLOCK_N // 2)
    third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
    # One after the other, for want of registers.
    dweight = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(4):
        part = first if i == 0 else second if i == 1 else third if i == 2 else fourth
        dweight += _store_gradient_part(
            part, weight, h_desc, pre_desc, dpre_desc, row, column + i * PART,
            GATED, BLOCK_M, PART,
        )  # fmt: skip
    at = (row + within).to(tl.int64) * NUM_COLUMNS + tile_column
    tl.store(dweight_RC + at, dweight, mask=real)
