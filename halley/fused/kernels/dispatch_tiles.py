# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""What a tile of dispatch_gemm is made for, how it is made, and what becomes of it."""

from dataclasses import dataclass

import triton
import triton.language as tl

from halley.fused.kernels.fetch import FROM_PEERS
from halley.ops.kernels.activation import prefetch_pre, store_activated, store_gradient
from halley.ops.kernels.gemm_config import GemmTile
from halley.ops.kernels.tiles import multiply_step, multiply_tile


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a launch is for; its kernel takes it whole, as a constant.

    Attributes:
        gated: the activation is made of two projections, gate and up.
        backward: the rows are gradients of the layer's output, on their way to what the activation
            was made of; else they are tokens on their way to the activation.
        keep: forward: whether what the activation is made of is stored.
        sends: where rows come from, see ``kernels.fetch``.
        clear: rows of experts are followed by zeros up to a multiple of that many; 0 is not at all.
    """

    gated: bool
    backward: bool = False
    keep: bool = False
    sends: int = FROM_PEERS.value
    clear: int = 0

    @property
    def num_parts(self) -> int:
        """Projections that the activation is made of."""
        return 2 if self.gated else 1

    def tile_columns(self, tile: GemmTile) -> int:
        """Columns of the activation that a tile yields."""
        return tile.block_n if self.backward else tile.block_n // self.num_parts


@triton.jit
def _store_tile(
    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RC, FORM: tl.constexpr,
    SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if FORM.backward:
        store_gradient(
            acc, num_rows, h, pre, dpre, weight_R, dweight_RC, row, column, index,
            FORM.gated, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        store_activated(acc, h, pre, row, column, FORM.gated, FORM.keep, BLOCK_M, BLOCK_N)


@triton.jit
def multiply_run(
    row, expert, first, columns, num_rows, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RC,
    FORM: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Make some tiles side by side; if more than one, in one loop, whose loads run on."""
    TURNED: tl.constexpr = FORM.backward
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    NUM_COLUMNS: tl.constexpr = (SIZE + BLOCK_F - 1) // BLOCK_F
    if RUN == 1:
        column = first * BLOCK_F
        if FORM.backward:
            prefetch_pre(pre, row, column, FORM.gated, SIZE, BLOCK_M, BLOCK_N)
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TURNED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _store_tile(
            acc, row, column, first, num_rows, h, pre, dpre, weight_R, dweight_RC,
            FORM, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            index = first + step // STEPS
            column = index * BLOCK_F
            k = (step % STEPS) * BLOCK_K
            if FORM.backward:
                if k == 0:
                    prefetch_pre(pre, row, column, FORM.gated, SIZE, BLOCK_M, BLOCK_N)
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TURNED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                _store_tile(
                    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RC,
                    FORM, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
