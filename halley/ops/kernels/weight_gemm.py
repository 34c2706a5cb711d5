# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
"""Grouped GEMMs of stacked experts: rows times weights, and the gradients of the weights.

The GEMMs inside the fused layer are in ``halley/fused/kernels``. In this file, M and N are the rows
and the columns of a weight, and P is the number of layer parts (``fused/weight_gradients.py``).
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from halley.ops.kernels.launch import Launcher
from halley.ops.kernels.tiles import (
    GemmTile,
    describe,
    describe_rows,
    describe_weights,
    halves,
    multiply_tile,
    tile_of,
)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_gemm_kernel(
    a_desc, b_desc, c_desc, tile_expert, num_tiles,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of each expert by its weights; CTA p of n computes tiles p, p + n, ...

    CTAs signal nothing and wait for nothing. Example: 3 row tiles, 2 column tiles, 4 CTAs: CTA 0
    computes tiles 0 and 4, CTA 3 only tile 3.
    """
    total = num_tiles * NUM_COLUMNS
    # Triton flattens both loops into one: loads of a tile start during the previous tile.
    for ticket in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        tile, column = tile_of(ticket, num_tiles, NUM_COLUMNS, GROUP)
        expert = tl.load(tile_expert + tile)
        acc = multiply_tile(
            a_desc, b_desc, tile * BLOCK_M, expert, column * BLOCK_N,
            DEPTH, False, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        c_desc.store([tile * BLOCK_M, column * BLOCK_N], acc.to(c_desc.dtype))


_launch_grouped = Launcher(grouped_gemm_kernel)


def grouped_gemm(
    out_RN: torch.Tensor,
    a_RK: torch.Tensor,
    weight_LNK: torch.Tensor,
    *,
    tile_expert: torch.Tensor,
    block_m: int,
    tile: GemmTile,
    num_programs: int,
) -> None:
    """Multiply the rows of each tile by the weights of its expert, to ``out_RN``.

    Each tile of ``block_m`` rows belongs to one expert, ``tile_expert``, int32. The launch has
    ``num_programs`` CTAs.
    """
    num_rows, depth = a_RK.shape
    num_columns = triton.cdiv(weight_LNK.shape[1], tile.block_n)
    _launch_grouped(
        num_programs,
        (describe_rows(a_RK, block_rows=block_m, block_columns=tile.block_k),
         describe_weights(weight_LNK, num_projections=1, tile=tile),
         describe_rows(out_RN, block_rows=block_m, block_columns=tile.block_n),
         tile_expert, num_rows // block_m),
        (num_columns, depth, block_m, tile.block_n, tile.block_k, tile.group),
        dtypes=(a_RK.dtype,), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


_PAST_ALL_ROWS = tl.constexpr(1 << 30)  # a row index at which TMA loads zeros


@triton.jit
def weight_gemm_kernel(
    grad_desc, rows_desc, out_desc, expert_begin, expert_rows,
    NUM_EXPERTS: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_M: tl.constexpr, NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HALVES: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradients of all experts; CTA p of n computes runs p, p + n, p + 2 n, ...

    A run is ``RUN`` adjacent output tiles in one loop. If an expert has few rows, a tile has few
    steps, and filling its pipeline would take as long as the steps. In a run, the loads of the next
    tile start during the current one.

    An expert's rows lie in up to 4 parts of the operands. Its steps go through them in order. One
    CTA sums each element in a fixed order, so results are equal from launch to launch. CTAs signal
    nothing and wait for nothing.

    Example: 2 experts, gradients of 256 x 512, tiles of 128 x 256, ``RUN`` 2: each expert has two
    runs of two tiles, and CTA 3 computes rows 128-255 of expert 1.
    """
    num_runs: tl.constexpr = (NUM_N + RUN - 1) // RUN
    expert_runs: tl.constexpr = NUM_M * num_runs
    for ticket in range(tl.program_id(0), NUM_EXPERTS * expert_runs, tl.num_programs(0)):
        expert = ticket // expert_runs
        m, run = tile_of(ticket % expert_runs, NUM_M, num_runs, GROUP)
        begin, steps = _find_part(expert_begin, expert_rows, expert, NUM_EXPERTS, 0, 1, BLOCK_K)
        begin1, steps1 = _find_part(
            expert_begin, expert_rows, expert, NUM_EXPERTS, 1, NUM_PARTS, BLOCK_K
        )
        begin2, steps2 = _find_part(
            expert_begin, expert_rows, expert, NUM_EXPERTS, 2, NUM_PARTS, BLOCK_K
        )
        begin3, steps3 = _find_part(
            expert_begin, expert_rows, expert, NUM_EXPERTS, 3, NUM_PARTS, BLOCK_K
        )
        # An expert's steps go through layer parts 0 to 3 in order. Parts 1 to 3 begin here.
        first1 = steps
        first2 = first1 + steps1
        first3 = first2 + steps2
        if NUM_PARTS > 1:
            steps = first3 + steps3
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if RUN == 1:
            for step in range(0, steps):
                row = _find_row(
                    step, begin, begin1, begin2, begin3, first1, first2, first3, NUM_PARTS, BLOCK_K
                )
                acc = _multiply_step(acc, grad_desc, rows_desc, row, m * BLOCK_M, run * BLOCK_N)
            _store(
                acc, out_desc, expert, m * BLOCK_M, run * BLOCK_N,
                BLOCK_M, BLOCK_N, HALVES, ACCUMULATE,
            )  # fmt: skip
        else:
            # An expert without rows needs one step of zeros, because the loop stores the tile.
            begin = tl.where(steps > 0, begin, _PAST_ALL_ROWS)
            begin1 = tl.where(steps > 0, begin1, _PAST_ALL_ROWS)
            begin2 = tl.where(steps > 0, begin2, _PAST_ALL_ROWS)
            begin3 = tl.where(steps > 0, begin3, _PAST_ALL_ROWS)
            steps = tl.maximum(steps, 1)
            first = run * RUN
            for step in range(0, tl.minimum(NUM_N - first, RUN) * steps):
                row = _find_row(
                    step % steps, begin, begin1, begin2, begin3, first1, first2, first3,
                    NUM_PARTS, BLOCK_K,
                )  # fmt: skip
                column = (first + step // steps) * BLOCK_N
                acc = _multiply_step(acc, grad_desc, rows_desc, row, m * BLOCK_M, column)
                if step % steps == steps - 1:
                    _store(
                        acc, out_desc, expert, m * BLOCK_M, column,
                        BLOCK_M, BLOCK_N, HALVES, ACCUMULATE,
                    )  # fmt: skip
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _find_part(
    expert_begin, expert_rows, expert,
    NUM_EXPERTS: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return first row and number of steps of an expert in layer part ``PART``; 0 without it."""
    begin = 0
    steps = 0
    if PART < NUM_PARTS:
        begin = tl.load(expert_begin + PART * NUM_EXPERTS + expert)
        steps = tl.cdiv(tl.load(expert_rows + PART * NUM_EXPERTS + expert), BLOCK_K)
    return begin, steps


@triton.jit
def _find_row(
    step, begin, begin1, begin2, begin3, first1, first2, first3,
    NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the first row of a step; part p begins at step ``first<p>`` and row ``begin<p>``."""
    row = begin + step * BLOCK_K
    if NUM_PARTS > 1:
        row = tl.where(step >= first1, begin1 + (step - first1) * BLOCK_K, row)
    if NUM_PARTS > 2:
        row = tl.where(step >= first2, begin2 + (step - first2) * BLOCK_K, row)
    if NUM_PARTS > 3:
        row = tl.where(step >= first3, begin3 + (step - first3) * BLOCK_K, row)
    return row


@triton.jit
def _multiply_step(acc, grad_desc, rows_desc, row, m, n):
    grad = grad_desc.load([row, m])
    return tl.dot(grad.T, rows_desc.load([row, n]), acc)


@triton.jit
def _store(
    acc, out_desc, expert, row, column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    if HALVES:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        half: tl.constexpr = BLOCK_N // 2
        _store_block(left, out_desc, expert, row, column, BLOCK_M, half, ACCUMULATE)
        _store_block(right, out_desc, expert, row, column + half, BLOCK_M, half, ACCUMULATE)
    else:
        _store_block(acc, out_desc, expert, row, column, BLOCK_M, BLOCK_N, ACCUMULATE)


@triton.jit
def _store_block(
    acc, out_desc, expert, row, column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    if ACCUMULATE:
        before = out_desc.load([expert, row, column]).reshape(BLOCK_M, BLOCK_N)
        acc += before.to(tl.float32)
    out_desc.store([expert, row, column], acc.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))


_launch = Launcher(weight_gemm_kernel)
_MOST_PARTS = 4  # that the kernel goes through


def weight_gemm(
    out_LMN: torch.Tensor,
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    *,
    expert_begin: torch.Tensor,
    expert_rows: torch.Tensor,
    tile: GemmTile,
    block_m: int = 128,
    num_programs: int,
    accumulate: bool = False,
) -> None:
    """Write ``grad[rows of e].T @ rows[rows of e]`` to ``out[e]`` or add it, summed in float32.

    Args:
        out_LMN: written: gradients of stacked weights, float32 or the dtype of the rows.
        grad_RM, rows_RN: gradients of the projection's outputs, and its inputs.
        expert_begin: first row of each expert in each of up to 4 parts, a multiple of
            ``tile.block_k``, int32 ``(P, L)``; ``(L,)`` for one part.
        expert_rows: number of rows of each expert in each part. After them, both operands must be
            zero up to the next multiple of ``block_k``.
        tile: a tile has ``block_n`` columns of ``rows_RN``, a step has ``block_k`` rows. ``run`` 0
            chooses the run from the average number of rows of an expert.
        block_m: columns of ``grad_RM`` in a tile.
        num_programs: CTAs of the launch for each CTA that an SM holds.
        accumulate: True adds to ``out_LMN``.
    """
    num_experts, num_m, num_n = out_LMN.shape
    num_parts = expert_begin.numel() // num_experts
    if num_parts > _MOST_PARTS:
        raise ValueError(f"expert_begin ({num_parts} parts) must have at most {_MOST_PARTS} parts")
    is_wide = out_LMN.dtype == torch.float32
    is_plain = not (is_wide or accumulate)
    tile = _choose_run(tile, rows_per_expert=len(rows_RN) // num_experts, is_plain=is_plain)
    # A whole float32 tile would need shared memory that the loads of the main loop use.
    in_halves = (is_wide or tile.run > 1) and tile.block_n > 1
    out_block = [1, block_m, tile.block_n // (2 if in_halves else 1)]
    _launch(
        num_programs * tile.per_sm,
        (describe_rows(grad_RM, block_rows=tile.block_k, block_columns=block_m),
         describe_rows(rows_RN, block_rows=tile.block_k, block_columns=tile.block_n),
         describe(out_LMN, out_block), expert_begin, expert_rows),
        (num_experts, num_parts, triton.cdiv(num_m, block_m),
         triton.cdiv(num_n, tile.block_n), block_m, tile.block_n, tile.block_k, tile.group,
         tile.run, in_halves, accumulate),
        dtypes=(rows_RN.dtype, out_LMN.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _choose_run(tile: GemmTile, *, rows_per_expert: int, is_plain: bool) -> GemmTile:
    """Return ``tile`` with a run and a tile size for the number of rows, if its ``run`` is 0.

    With fewer rows, a tile has fewer steps, and a run needs more tiles. Runs use two CTAs on each
    SM with half the columns: one CTA stores while the other multiplies. A GEMM that adds to its
    output, or stores float32, has no shared memory left for two CTAs or a run.

    Measured on an H200 with the experts of four models, against one tile of 256 columns at a time:
    256 rows take 14 to 20 % less time, 512 rows 4 to 11 %, 1024 rows up to 8 %. With 2048 rows and
    more, one tile at a time is as fast.
    """
    if tile.run:
        return tile
    # The limits are above powers of two, since rows include padding.
    run = next((n for n, limit in ((8, 400), (4, 800), (2, 1600)) if rows_per_expert <= limit), 1)
    if run == 1 or not is_plain:
        return replace(tile, run=1)
    half = {"block_n": tile.block_n // 2, "num_warps": tile.num_warps // 2}
    return replace(tile, run=run, per_sm=2 * tile.per_sm, **half)
