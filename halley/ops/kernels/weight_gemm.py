# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
"""Gradients of stacked weights: for each expert, the product of its rows' two sides."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from halley.ops.kernels.gemm_config import GemmTile
from halley.ops.kernels.launch import Launcher
from halley.ops.kernels.launch_pair import end_with_first
from halley.ops.kernels.tiles import describe, describe_rows, halves, tile_of


_BEHIND = tl.constexpr(1 << 30)


@triton.jit
def weight_gemm_kernel(
    grad_desc, rows_desc, out_desc, expert_begin, expert_rows,
    NUM_EXPERTS: tl.constexpr, NUM_M: tl.constexpr, NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HALVES: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program p makes runs p, p + programs, and so on, of all experts' gradients.

    A run is some tiles side by side, made in one loop: an expert may have so few rows that loads
    would be waited for as long as products take, if each tile had to begin anew. Every element is
    one sum in one order by one program: no atomics, equal from run to run.
    """
    num_runs: tl.constexpr = (NUM_N + RUN - 1) // RUN
    runs_an_expert: tl.constexpr = NUM_M * num_runs
    for ticket in range(tl.program_id(0), NUM_EXPERTS * runs_an_expert, tl.num_programs(0)):
        expert = ticket // runs_an_expert
        m, run = tile_of(ticket % runs_an_expert, NUM_M, num_runs, GROUP)
        begin = tl.load(expert_begin + expert)
        steps = tl.cdiv(tl.load(expert_rows + expert), BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if RUN == 1:
            for step in range(0, steps):
                acc = _multiply_step(
                    acc, grad_desc, rows_desc, begin + step * BLOCK_K, m * BLOCK_M, run * BLOCK_N
                )
            _store(
                acc, out_desc, expert, m * BLOCK_M, run * BLOCK_N,
                BLOCK_M, BLOCK_N, HALVES, ACCUMULATE,
            )  # fmt: skip
        else:
            # An expert without rows takes a step behind all rows, where zeros are read.
            begin = tl.where(steps > 0, begin, _BEHIND)
            steps = tl.maximum(steps, 1)
            first = run * RUN
            for step in range(0, tl.minimum(NUM_N - first, RUN) * steps):
                row = begin + (step % steps) * BLOCK_K
                column = (first + step // steps) * BLOCK_N
                acc = _multiply_step(acc, grad_desc, rows_desc, row, m * BLOCK_M, column)
                if step % steps == steps - 1:
                    _store(
                        acc, out_desc, expert, m * BLOCK_M, column,
                        BLOCK_M, BLOCK_N, HALVES, ACCUMULATE,
                    )  # fmt: skip
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if OVERLAPS:
        end_with_first()


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
    overlaps: bool = False,
) -> None:
    """Write, or add, ``grad[rows of e].T @ rows[rows of e]`` to ``out[e]``, summed in float32.

    Args:
        out_LMN: written: gradients of stacked weights, float32 or the dtype of the rows.
        grad_RM: gradient of what the weights made of each row.
        rows_RN: the rows that they made it of.
        expert_begin: each expert's first row, a multiple of ``tile.block_k``, int32 ``(L,)``.
        expert_rows: how many it has, int32 ``(L,)``. Up to the next multiple of ``block_k`` both
            sides must be zero behind them.
        tile: ``block_n`` columns of the rows, ``block_k`` rows a step, ``run`` tiles in a loop; 0
            lets a tile and its loop be chosen for experts that all have as many rows.
        block_m: columns of the gradients of one tile.
        accumulate: add to what is there, as gradients that are kept over microbatches want it.
        overlaps: begin while the launch before this one runs, if that lets it: only behind
            ``dgrad_combine``, which neither writes what is read here nor reads what is written.
    """
    num_experts, num_m, num_n = out_LMN.shape
    is_wide = out_LMN.dtype == torch.float32
    is_plain = not (is_wide or accumulate or overlaps)
    tile = _suited(tile, rows_an_expert=len(rows_RN) // num_experts, is_plain=is_plain)
    # A whole tile of float32 leaves no room for the steps in flight, or for another's programs.
    in_halves = (is_wide or overlaps or tile.run > 1) and tile.block_n > 1
    out_block = [1, block_m, tile.block_n // (2 if in_halves else 1)]
    _launch(
        num_programs * tile.per_sm,
        (
            describe_rows(grad_RM, block_rows=tile.block_k, block_columns=block_m),
            describe_rows(rows_RN, block_rows=tile.block_k, block_columns=tile.block_n),
            describe(out_LMN, list(out_LMN.shape), list(out_LMN.stride()), out_block),
            expert_begin,
            expert_rows,
        ),
        (
            num_experts,
            triton.cdiv(num_m, block_m),
            triton.cdiv(num_n, tile.block_n),
            block_m,
            tile.block_n,
            tile.block_k,
            tile.group,
            tile.run,
            in_halves,
            accumulate,
            overlaps,
        ),
        dtypes=(rows_RN.dtype, out_LMN.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        shares=overlaps,
        overlaps=overlaps,
    )


def _suited(tile: GemmTile, *, rows_an_expert: int, is_plain: bool) -> GemmTile:
    """Return the tile with its loop, and its size, chosen by the rows if ``run`` is 0.

    The fewer rows, the shorter is each tile, and the more of them are made in one loop. Two
    programs on a multiprocessor, of half the columns each, take turns to store and to multiply.
    What is added to, or stands beside other programs, leaves no room for that, nor for a loop over
    tiles, which holds the blocks to be stored beside all that are loaded.

    Measured on an H200, experts of four models, over one tile of 256 columns at a time: 256 rows
    take 14 to 20 % less, 512 rows 4 to 11 %, 1024 rows up to 8 %; of 2048 rows and more a tile at a
    time is as fast.
    """
    if tile.run:
        return tile
    # The limits leave room for what pads the rows.
    run = next((n for n, limit in ((8, 400), (4, 800), (2, 1600)) if rows_an_expert <= limit), 1)
    if run == 1 or not is_plain:
        return replace(tile, run=1)
    half = {"block_n": tile.block_n // 2, "num_warps": tile.num_warps // 2}
    return replace(tile, run=run, per_sm=2 * tile.per_sm, **half)
