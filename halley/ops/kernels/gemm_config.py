"""Shape of one tile of a grouped GEMM."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GemmTile:
    """Shape of one GEMM tile, and of the loop that computes it.

    Attributes:
        block_n: columns of the output before the activation.
        block_k: depth of one step of the loop.
        group: row tiles that use the same columns of the weights before the next columns.
        run: neighbouring tiles that one CTA computes in one loop. The loads of the next tile start
            during the last steps of the previous tile. 0, for weight gradients only, chooses the
            run and the tile size from the number of rows.
        num_warps: warps of a CTA.
        per_sm: CTAs on one SM; one of them can multiply while the other stores.
        num_stages: steps in flight.
    """

    block_n: int = 256
    block_k: int = 64
    group: int = 8
    run: int = 1
    num_warps: int = 8
    per_sm: int = 1
    num_stages: int = 4
