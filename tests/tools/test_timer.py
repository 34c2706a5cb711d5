"""The timer: variants alternate, ranks start together, and the slowest rank counts."""

import time
from functools import partial

import pytest
import torch

from halley.tools import timer
from halley.tools.timer import Timing, summarise, time_interleaved
from tests.rank_pool import RunRanks


def test_percentiles_are_interpolated_between_samples() -> None:
    samples_us = [float(n) for n in (11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6)]
    assert summarise(samples_us) == Timing(
        median_us=6.0, p10_us=2.0, p90_us=10.0, samples_us=tuple(samples_us)
    )
    timing = summarise([20.0, 10.0])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == pytest.approx((15.0, 11.0, 19.0))


def test_variants_alternate_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    progress: list[tuple[int, int]] = []

    def slow_at_first(name: str) -> None:
        time.sleep(0.1 if calls.count(name) < 2 else 0.01)
        calls.append(name)

    timings = time_interleaved(
        {name: partial(slow_at_first, name) for name in ("a", "b")}, device="cpu", num_samples=3,
        num_warmup=2, on_progress=lambda *numbers: progress.append(numbers),
    )  # fmt: skip
    assert calls == ["a", "b"] * 5
    assert progress == [(done, 10) for done in range(1, 11)]
    assert list(timings) == ["a", "b"]
    for timing in timings.values():
        assert len(timing.samples_us) == 3
        assert 10_000.0 <= timing.median_us < 100_000.0


def time_with_a_slow_rank(rank: int, num_ranks: int) -> dict[str, Timing]:
    variants = {"uneven": partial(time.sleep, 0.2 * rank), "even": partial(time.sleep, 0.0)}
    return time_interleaved(variants, device="cpu", num_samples=3, num_warmup=1)


def test_slowest_rank_counts_and_does_not_delay_the_next_variant(run_ranks: RunRanks) -> None:
    on_rank_0, on_rank_1 = run_ranks(time_with_a_slow_rank, 2)
    assert on_rank_0 == on_rank_1
    assert on_rank_0["uneven"].p10_us >= 200_000.0
    assert on_rank_0["even"].median_us < 100_000.0


def begin_together(rank: int, num_ranks: int, other_clock: bool) -> tuple[int, int, int, int]:
    """Return the times of arrival, of the agreed start, and of the start of this rank."""
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        if other_clock and rank == 1:
            patch.setattr(timer, "_clock_id", lambda: 7)
        time.sleep(0.05 * rank)
        came_ns = time.monotonic_ns()
        begin_ns = timer.agree_on_begin(device)
        timer.start_together(device)
        began_ns = time.monotonic_ns()
        return came_ns, begin_ns, began_ns, timer.agree_on_begin(device)


def test_ranks_start_at_one_time_after_the_last_arrival(run_ranks: RunRanks) -> None:
    told = run_ranks(begin_together, 3, False)
    last_ns = max(came_ns for came_ns, *_ in told)
    (begin_ns,) = {begin_ns for _, begin_ns, *_ in told}
    assert last_ns + timer._START_DELAY_NS <= begin_ns < last_ns + 1e9
    # No rank started before the agreed time.
    assert all(began_ns >= begin_ns + timer._START_DELAY_NS for _, begin_ns, began_ns, _ in told)


def test_ranks_of_other_machines_do_not_compare_clocks(run_ranks: RunRanks) -> None:
    told = run_ranks(begin_together, 2, True)
    assert [(begin_ns, later_ns) for _, begin_ns, _, later_ns in told] == [(0, 0)] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_samples_include_work_that_was_only_launched() -> None:
    x = torch.ones(4096, 4096, device="cuda")

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x)

    timings = time_interleaved({str(n): partial(multiply, n) for n in (4, 16)}, device="cuda")
    ratio = timings["16"].median_us / timings["4"].median_us
    assert 3.0 < ratio < 5.0
