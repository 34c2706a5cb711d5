"""Predictions by hand on round figures, and that more work never takes less time."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from halley.cost.hardware import H200, Hardware
from halley.cost.predict import Predictor


ROUND = Hardware(
    name="round",
    gemm_flops_per_s=1e12,
    peak_flops_per_s=None,
    memory_bytes_per_s=1e9,
    fused_bytes_per_s=1e9,
    link_bytes_per_s=1e8,
    link_latency_us=20.0,
    launch_us=5.0,
    graph_us=0.0,
    call_us=0.0,
    collective_us=0.0,
    kernel_us=1.0,
    split_sum_us=0.0,
    read_us=2.0,
)


def test_large_grouped_gemm_is_bound_by_arithmetic() -> None:
    # 2 * 4000 * 1000 * 2000 = 16e9 operations at 1e12 a second. The bytes, 28e6, take 280 us.
    fast = Predictor(dataclasses.replace(ROUND, memory_bytes_per_s=1e11))
    assert fast.grouped_gemm_us(4000, 1, inner=1000, outer=2000, itemsize=2) == 16005.0


def test_small_grouped_gemm_is_bound_by_its_weights() -> None:
    # 3 groups of 100 x 200 and 10 rows of 100 + 200, 4 bytes each: 252000 bytes at 1e9 a second.
    us = Predictor(ROUND).grouped_gemm_us(10, 3, inner=100, outer=200, itemsize=4)
    assert us == 252.0 + 5.0


def test_all_to_all() -> None:
    assert Predictor(ROUND).all_to_all_us(0) == 20.0
    assert Predictor(ROUND).all_to_all_us(1_000_000) == 20.0 + 10_000.0


def test_memory() -> None:
    predictor = Predictor(ROUND)
    assert predictor.memory_us(1_000_000) == 1000.0
    assert predictor.memory_us(1000) == 5.0  # no less than a launch
    assert predictor.memory_us(1000, num_ops=12) == 60.0
    assert predictor.memory_us(1_000_000, num_ops=12) == 1000.0


_SIZES = st.integers(0, 1 << 20)


@given(_SIZES, _SIZES, st.integers(1, 4096), st.integers(1, 4096), st.sampled_from((2, 4)))
def test_more_takes_no_less(rows: int, more: int, inner: int, outer: int, itemsize: int) -> None:
    predictor = Predictor(H200)
    size = {"inner": inner, "outer": outer, "itemsize": itemsize}
    base_us = predictor.grouped_gemm_us(rows, 4, **size)
    assert predictor.grouped_gemm_us(rows + more, 4, **size) >= base_us
    assert predictor.grouped_gemm_us(rows, 4 + more, **size) >= base_us
    for name in ("inner", "outer", "itemsize"):
        assert predictor.grouped_gemm_us(rows, 4, **size | {name: size[name] + 1}) >= base_us
    assert predictor.all_to_all_us(rows + more) >= predictor.all_to_all_us(rows)
    assert predictor.memory_us(rows + more) >= predictor.memory_us(rows)
