"""Sizes and options of the two launches that share each SM."""

import pytest

from halley.fused.launch_pair import LaunchPair, shape_launches
from halley.ops.kernels.tiles import GemmTile


def _shape(*, fused: bool, move_first: bool) -> LaunchPair:
    return shape_launches(
        tile=GemmTile(), num_sms=10, fused=fused,
        move_first=move_first, move_registers=80, ctas_beside=2,
    )  # fmt: skip


@pytest.mark.parametrize("move_first", [False, True])
def test_only_the_second_of_two_fused_launches_may_overlap(move_first: bool) -> None:
    pair = _shape(fused=True, move_first=move_first)
    assert pair.gemm_options.get("overlaps") == move_first
    assert pair.move_options.get("overlaps") == (not move_first)
    assert (pair.num_gemm_ctas, pair.num_move_ctas, pair.num_exits) == (10, 20, 30)
    # 65536 registers, less two CTAs of 128 threads with 80 each, for 256 threads.
    assert pair.move_options.get("max_registers") == 80
    assert pair.gemm_options.get("max_registers") == 176
    unfused = _shape(fused=False, move_first=move_first)
    assert not unfused.gemm_options.get("overlaps")
    assert not unfused.move_options.get("overlaps")
    assert (unfused.num_gemm_ctas, unfused.num_move_ctas) == (10, 20)
