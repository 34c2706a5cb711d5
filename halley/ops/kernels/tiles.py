# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""One tile of a grouped GEMM: its position, its main loop, and the TMA descriptors."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.ops.kernels.gemm_config import GemmTile


@triton.jit
def tile_of(ticket, num_tiles, num_columns, GROUP: tl.constexpr):
    """Return (row tile, column tile) of a ticket.

    Tickets go down ``GROUP`` row tiles before they step to the next column, so that the L2 cache
    still holds the weights of a column.
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
    """Add ``a[row tile, k block] @ b[expert, column tile, k block].T`` to a tile.

    ``b`` is (experts, projections, columns of a projection, depth). A tile holds the same columns
    of every projection side by side, so that one CTA has the gate and the up value of a column.
    Transposed, for gradients, ``b`` is (experts, 1, depth, columns).
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
    """Return the left and the right half of a tile; values stay in their threads."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


def describe(
    base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """Return a TMA descriptor without the checks of Triton's constructor, which are slow."""
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.shape, desc.strides, desc.block_shape = base, shape, strides, block
    desc.padding = "zero"
    return desc


def describe_rows(rows: torch.Tensor, *, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return the descriptor of a contiguous matrix of rows."""
    return describe(rows, list(rows.shape), list(rows.stride()), [block_rows, block_columns])


def describe_weights(
    weight: torch.Tensor, *, num_projections: int, tile: GemmTile, transposed: bool = False
) -> TensorDescriptor:
    """Return the descriptor of contiguous stacked weights.

    Args:
        weight: ``(L, num_projections * columns, depth)``; ``(L, depth, columns)`` if transposed.
        num_projections: projections that are stacked along the second dimension.
        tile: shape of a tile.
        transposed: whether the GEMM multiplies by the transposed weights.
    """
    experts, columns, depth = weight.shape[0], weight.shape[1] // num_projections, weight.shape[2]
    shape = [experts, num_projections, columns, depth]
    strides = [num_projections * columns * depth, columns * depth, depth, 1]
    block = [tile.block_n // num_projections, tile.block_k]
    if transposed:
        block = [tile.block_k, tile.block_n]
    return describe(weight, shape, strides, [1, num_projections, *block])
