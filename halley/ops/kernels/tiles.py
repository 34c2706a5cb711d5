# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""One tile of a grouped GEMM: which it is, its product, the matrices it is made of."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.ops.kernels.gemm_config import GemmTile


@triton.jit
def tile_of(ticket, num_tiles, num_columns, GROUP: tl.constexpr):
    """Return (row tile, column tile) of a ticket.

    Tickets walk down ``GROUP`` row tiles before they step to the next column, so that the weights
    of a column are read while they stand in the cache.
    """
    width = GROUP * num_columns
    first = (ticket // width) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = ticket % width
    return first + within % size, within // size


@triton.jit
def multiply_step(
    acc, a_desc, b_desc, row, expert, column, k,
    TURNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of one block of columns of ``a`` and of ``b[expert]`` to a tile.

    ``b`` is (experts, parts, columns of a part, depth); a tile has the same columns of every part
    side by side, so that the gate and the up projection of a column meet in one program. Turned,
    as gradients need the weights, it is (experts, 1, depth, columns).
    """
    a = a_desc.load([row, k])
    if TURNED:
        return tl.dot(a, b_desc.load([expert, 0, k, column]).reshape(BLOCK_K, BLOCK_N), acc)
    else:
        b = b_desc.load([expert, 0, column, k]).reshape(BLOCK_N, BLOCK_K)
        return tl.dot(a, b.T, acc)


@triton.jit
def multiply_tile(
    a_desc, b_desc, row, expert, column, DEPTH: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``a[row : row + BLOCK_M] @ b[expert, :, column :].T`` in float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        acc = multiply_step(acc, a_desc, b_desc, row, expert, column, k, TURNED, BLOCK_N, BLOCK_K)
    return acc


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the left and the right half of a tile; no value leaves its thread."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


def describe(
    base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """Return a descriptor; Triton's own constructor checks it for longer than a launch takes."""
    desc = object.__new__(TensorDescriptor)
    desc.base, desc.shape, desc.strides, desc.block_shape = base, shape, strides, block
    desc.padding = "zero"
    return desc


def describe_rows(rows: torch.Tensor, *, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return the descriptor of a contiguous matrix that tiles are read from or written to."""
    return describe(rows, list(rows.shape), list(rows.stride()), [block_rows, block_columns])


def describe_weights(
    weight: torch.Tensor, *, parts: int, tile: GemmTile, turned: bool = False
) -> TensorDescriptor:
    """Return the descriptor of stacked weights, contiguous.

    Args:
        weight: ``(L, parts * columns, depth)``; ``(L, depth, columns)`` if turned.
    """
    experts, columns, depth = weight.shape[0], weight.shape[1] // parts, weight.shape[2]
    shape = [experts, parts, columns, depth]
    strides = [parts * columns * depth, columns * depth, depth, 1]
    block = [tile.block_k, tile.block_n] if turned else [tile.block_n // parts, tile.block_k]
    return describe(weight, shape, strides, [1, parts, *block])
