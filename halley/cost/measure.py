"""Measure operations, collectives of several sizes, and how both slow each other down."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import torch

from halley.core.field_types import check_fields, show
from halley.cost.simulate import Contention


_WARMUP = 10
_COUNT = 10
_FLUSH_BYTES = 64 * 2**20  # larger than the L2 cache of any GPU
_BUSY_CYCLES = 1_000_000  # keeps the GPU busy for 0.5 ms, so that the host gets ahead
_TRIALS = 5
_AS_GOOD = 1.02  # accept 2 % more: reserving SMs beyond need can add a wave to some GEMMs
_GEMMS_PER_COLLECTIVE = 2  # GEMM time over collective time: enough to overlap all of it


@dataclass(frozen=True)
class Curve:
    """The time of a collective by its bytes, interpolated between measured points.

    Example with the points (1000, 10) and (4000, 20): 2000 bytes take 14.1 us, because they are in
    the middle on logarithmic scales of bytes and time. Fewer than 1000 bytes take 10 us, the
    latency. Above 4000 bytes the straight line through both points continues: 7000 take 30 us.

    Attributes:
        points: (bytes, microseconds), at least one, both above 0; bytes ascending and distinct.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = [num_bytes for num_bytes, _ in self.points]
        if not sizes or sizes[0] <= 0 or sizes != sorted(set(sizes)):
            rule = "positive, distinct and ascending"
            raise ValueError(f"points' bytes ({show(sizes)}) must be {rule}")
        if (least_us := min(duration_us for _, duration_us in self.points)) <= 0:
            raise ValueError(f"points' microseconds ({least_us}) must be above 0")

    def at(self, num_bytes: float) -> float:
        """Return the microseconds of ``num_bytes``, interpolated between the points."""
        sizes = [size for size, _ in self.points]
        if num_bytes <= sizes[0]:
            return self.points[0][1]
        index = bisect_left(sizes, num_bytes)
        if index == len(sizes):
            return self._beyond(num_bytes)
        (left, left_us), (right, right_us) = self.points[index - 1 : index + 1]
        share = math.log(num_bytes / left) / math.log(right / left)
        return left_us * (right_us / left_us) ** share

    def _beyond(self, num_bytes: float) -> float:
        last, last_us = self.points[-1]
        if len(self.points) == 1:
            return last_us * num_bytes / last
        before, before_us = self.points[-2]
        return last_us + max(0.0, last_us - before_us) / (last - before) * (num_bytes - last)


class Work(Protocol):
    """The methods of a started collective (``torch.distributed.Work``) that are used here."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def measure_us(run: Callable[[], object], *, device: torch.device) -> float:
    """Return the trimmed mean of 10 runs after 10 runs of warm-up, in microseconds.

    The fastest and the slowest run do not count. On a GPU, each run starts with an overwritten L2
    cache, and CUDA events measure its time. The GPU is kept busy until the host has launched
    everything, so host time does not count.

    Source: Lancet (arXiv:2404.19429), whose code profiles an operation by 10 runs after 10.
    """
    for _ in range(_WARMUP):
        run()
    timed = _event_us if device.type == "cuda" else _wall_us
    samples = sorted(timed(run, device) for _ in range(_COUNT))
    return sum(samples[1:-1]) / (_COUNT - 2)


def measure_curve(
    run: Callable[[int], object], sizes: Sequence[int], *, device: torch.device
) -> Curve:
    """Return the time of a collective by its bytes; a collective of the same ranks.

    Args:
        run: runs the collective with that many bytes sent by each rank.
        sizes: bytes, in ascending order.
        device: the device of the collective.
    """
    times_us = [measure_us(partial(run, size), device=device) for size in sizes]
    return Curve(tuple(zip(sizes, times_us, strict=True)))


def measure_contention(
    gemm: Callable[[int], object],
    exchange: Callable[[], Work],
    *,
    device: torch.device,
    reserved_sms: Sequence[int] = (0,),
) -> Contention:
    """Return by what factors a GEMM and a collective slow each other down; a collective.

    GEMMs run one after another while the collective is in flight. The factors compare the time of
    one GEMM, and the time of the collective, with the times that each takes alone.

    Args:
        gemm: runs one GEMM that leaves the given number of SMs free; much shorter than the
            collective.
        exchange: starts the collective and returns it.
        device: the device of both.
        reserved_sms: numbers of SMs to try, in ascending order. The first number that is about as
            good as the best one is chosen; the factors are those measured with it.
    """
    gemm_us = measure_us(lambda: gemm(0), device=device)
    alone_us = measure_us(lambda: exchange().wait(), device=device)
    most = _GEMMS_PER_COLLECTIVE * alone_us / gemm_us
    found: list[Contention] = []
    for num_sms in reserved_sms:
        count, both_us = _measure_overlap(partial(gemm, num_sms), exchange, most, device)
        each_us = both_us / max(1.0, count)
        compute, comm = max(1.0, each_us / gemm_us), max(1.0, both_us / alone_us)
        found.append(Contention(compute=compute, comm=comm, sm_margin=num_sms))
    best = min(each.compute * each.comm for each in found)
    return next(each for each in found if each.compute * each.comm <= _AS_GOOD * best)


def _measure_overlap(
    gemm: Callable[[], object], exchange: Callable[[], Work], most: float, device: torch.device
) -> tuple[float, float]:
    """Return the GEMMs that end during a collective, and the time of the collective (medians)."""
    overlap = _overlap_on_gpu if device.type == "cuda" else _overlap_on_cpu
    trials: list[tuple[float, float]] = []
    for _ in range(_TRIALS):
        exchange().wait()  # synchronises the ranks: a late rank would look like a slow collective
        trials.append(overlap(gemm, exchange, most))
    return median(count for count, _ in trials), median(us for _, us in trials)


def _overlap_on_cpu(
    gemm: Callable[[], object], exchange: Callable[[], Work], most: float
) -> tuple[float, float]:
    begin = time.perf_counter_ns()
    work, count = exchange(), 0
    while not work.is_completed():
        gemm()
        count += 1
    duration_us = (time.perf_counter_ns() - begin) / 1e3
    work.wait()
    return count, duration_us


def _overlap_on_gpu(
    gemm: Callable[[], object], exchange: Callable[[], Work], most: float
) -> tuple[float, float]:
    side = torch.cuda.Stream()
    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(max(2, round(most)))]
    torch.cuda.synchronize()
    begin.record()
    side.wait_event(begin)
    with torch.cuda.stream(side):
        exchange().wait()
        done.record()
    for end in ends:
        gemm()
        end.record()
    torch.cuda.synchronize()
    duration_us = begin.elapsed_time(done) * 1e3
    ends_us = [begin.elapsed_time(end) * 1e3 for end in ends]
    count = sum(end_us <= duration_us for end_us in ends_us)
    if count == len(ends_us):  # the collective took longer than all GEMMs
        return duration_us * count / ends_us[-1], duration_us
    before_us = ends_us[count - 1] if count else 0.0
    return count + (duration_us - before_us) / (ends_us[count] - before_us), duration_us


def _wall_us(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e3


def _event_us(run: Callable[[], object], device: torch.device) -> float:
    torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
    torch.cuda._sleep(_BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
