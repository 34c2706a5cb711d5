# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
"""A grouped GEMM with the fused layer's tiles, to measure a lower bound of that layer's time.

N and K are here the rows and the columns of a weight.
"""

import torch
import triton
import triton.language as tl

from halley.ops.kernels.launch import Launcher
from halley.ops.kernels.tiles import GemmTile, describe, describe_weights, multiply_tile, tile_of


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_gemm_kernel(
    a_desc, b_desc, c_desc, tile_expert, num_tiles,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply experts' rows by transposed weights; CTA p of n takes column tiles p, p + n, ...

    CTAs signal nothing and wait for nothing. Example: 3 tiles of rows with 2 column tiles
    each, and 4 CTAs: CTA 0 computes column tiles 0 and 4, CTA 3 only column tile 3.
    """
    total = num_tiles * NUM_COLUMNS
    # Triton flattens the loops over tiles and depth: a tile's loads start during the previous tile.
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
    """Multiply row tiles of ``a_RK`` by their expert's transposed weights into ``out_RN``.

    Each tile of ``block_m`` rows belongs to one expert, ``tile_expert``, int32. The launch has
    ``num_programs`` CTAs.
    """
    num_rows, depth = a_RK.shape
    num_columns = triton.cdiv(weight_LNK.shape[1], tile.block_n)
    _launch_grouped(
        num_programs,
        (describe(a_RK, [block_m, tile.block_k]),
         describe_weights(weight_LNK, num_projections=1, tile=tile),
         describe(out_RN, [block_m, tile.block_n]),
         tile_expert, num_rows // block_m),
        (num_columns, depth, block_m, tile.block_n, tile.block_k, tile.group),
        dtypes=(a_RK.dtype,), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
