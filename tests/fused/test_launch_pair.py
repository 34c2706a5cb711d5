"""How the two kernels of a fused layer are launched, and which may begin before its turn."""

import pytest

from halley.fused.launch_pair import LaunchPair, shape_launches
from halley.ops.kernels.tiles import GemmTile


def _shape(*, fused: bool, moves_first: bool) -> LaunchPair:
    return shape_launches(
        tile=GemmTile(), num_programs=10, fused=fused,
        moves_first=moves_first, movers=2, move_registers=80,
    )  # fmt: skip


@pytest.mark.parametrize("moves_first", [False, True])
def test_the_kernel_that_waits_begins_beside_the_other(moves_first: bool) -> None:
    pair = _shape(fused=True, moves_first=moves_first)
    assert pair.multiply.options.get("overlaps") == moves_first
    assert pair.move.options.get("overlaps") == (not moves_first)
    assert (pair.multiply.num_programs, pair.move.num_programs) == (10, 20)
    assert (pair.multiply.num_leaving, pair.move.num_leaving) == (30, 30)
    # 65536 registers, less two programs of 128 threads with 80 each, for 256 threads.
    assert pair.move.options.get("max_registers") == 80
    assert pair.multiply.options.get("max_registers") == 176


@pytest.mark.parametrize("moves_first", [False, True])
def test_unfused_kernels_run_one_after_the_other(moves_first: bool) -> None:
    pair = _shape(fused=False, moves_first=moves_first)
    assert not pair.multiply.options.get("overlaps")
    assert not pair.move.options.get("overlaps")
    assert (pair.multiply.num_programs, pair.move.num_programs) == (10, 20)
