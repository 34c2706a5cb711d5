# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""The tiles of gemm_combine, chunk by chunk of columns, and how they are counted."""

import triton
import triton.language as tl

from halley.kernels.peer import wait_bulk_stores
from halley.kernels.tiles import multiply_step, multiply_tile, tile_of


_MAX_RUN = tl.constexpr(1024)  # more tiles than a run has: chunk and tiles fit one word


@triton.jit
def multiply_tiles(
    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, TURNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a ticket, side by side, and count those of the ticket before.

    Returns what the caller must have counted in turn (``count_tiles``).
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    runs_a_chunk: tl.constexpr = (per_chunk + RUN - 1) // RUN
    chunk = ticket // (num_tiles * runs_a_chunk)
    first_column = chunk * per_chunk
    end = tl.minimum(first_column + per_chunk, num_columns)
    within = ticket - chunk * num_tiles * runs_a_chunk
    tile, run = tile_of(within, num_tiles, tl.cdiv(end - first_column, RUN), GROUP)
    first = first_column + run * RUN
    columns = tl.minimum(end - first, RUN)
    expert = tl.load(plan + LAYOUT.tile_expert + tile)
    row = tile * BLOCK_M
    if RUN == 1:
        column = first * BLOCK_N
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TURNED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        count_tiles(pending, plan, LAYOUT)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            column = (first + step // STEPS) * BLOCK_N
            k = (step % STEPS) * BLOCK_K
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TURNED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                z_desc.store([row, column], acc.to(z_desc.dtype))
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return chunk * _MAX_RUN + columns


@triton.jit
def count_tiles(pending, plan, LAYOUT: tl.constexpr):
    """Count the tiles that this program stored last for their chunk, if there are any."""
    if pending > 0:
        wait_bulk_stores()
        tl.debug_barrier()
        done = plan + LAYOUT.chunk_done + pending // _MAX_RUN
        tl.atomic_add(done, pending % _MAX_RUN, sem="release", scope="gpu")
