# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
"""Gradients of stacked weights: for each expert, the product of its rows' two sides."""

import torch
import triton
import triton.language as tl

from halley.kernels.knobs import GemmTile
from halley.kernels.launch import Launcher
from halley.kernels.parts import end_with_first
from halley.kernels.tiles import describe, describe_rows, halves, tile_of


@triton.jit
def weight_gemm_kernel(
    grad_desc, rows_desc, out_desc, expert_begin, expert_rows,
    NUM_EXPERTS: tl.constexpr, NUM_M: tl.constexpr, NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program p makes tiles p, p + programs, and so on, of all experts' gradients.

    Every element is one sum in one order by one program: no atomics, equal from run to run.
    """
    tiles_an_expert: tl.constexpr = NUM_M * NUM_N
    for ticket in range(tl.program_id(0), NUM_EXPERTS * tiles_an_expert, tl.num_programs(0)):
        expert = ticket // tiles_an_expert
        m, n = tile_of(ticket % tiles_an_expert, NUM_M, NUM_N, GROUP)
        begin = tl.load(expert_begin + expert)
        steps = tl.cdiv(tl.load(expert_rows + expert), BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            row = begin + step * BLOCK_K
            grad = grad_desc.load([row, m * BLOCK_M])
            rows = rows_desc.load([row, n * BLOCK_N])
            acc = tl.dot(grad.T, rows, acc)
        if HALVES:
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            half: tl.constexpr = BLOCK_N // 2
            column = n * BLOCK_N
            _store(left, out_desc, expert, m * BLOCK_M, column, BLOCK_M, half, ACCUMULATE)
            _store(right, out_desc, expert, m * BLOCK_M, column + half, BLOCK_M, half, ACCUMULATE)
        else:
            _store(acc, out_desc, expert, m * BLOCK_M, n * BLOCK_N, BLOCK_M, BLOCK_N, ACCUMULATE)
    if OVERLAPS:
        end_with_first()


@triton.jit
def _store(
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
        tile: ``block_n`` columns of the rows, ``block_k`` rows a step.
        block_m: columns of the gradients of one tile.
        accumulate: add to what is there, as gradients that are kept over microbatches want it.
        overlaps: begin while the launch before this one runs, if that lets it: only behind
            ``dgrad_combine``, which neither writes what is read here nor reads what is written.
    """
    num_experts, num_m, num_n = out_LMN.shape
    # A whole tile of float32 leaves no room for the steps in flight, or for another's programs.
    in_halves = (out_LMN.dtype == torch.float32 or overlaps) and tile.block_n > 1
    out_block = [1, block_m, tile.block_n // (2 if in_halves else 1)]
    _launch(
        num_programs,
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
