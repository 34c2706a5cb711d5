"""How much computation and communication of one device slow each other down, measured."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import torch

from halley.cost.profiles import measure_us
from halley.cost.simulate import Contention


_TRIALS = 5
_AS_GOOD = 1.02  # what is left free beyond need makes a second wave of some products
_PRODUCTS_BESIDE = 2  # times as long as the collective alone: enough to run beside all of it


class Work(Protocol):
    """The part of a started collective that is used here."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def measure_contention(
    product: Callable[[int], object],
    exchange: Callable[[], Work],
    *,
    device: torch.device,
    sm_margins: Sequence[int] = (0,),
) -> Contention:
    """Return the factors of one product and one collective; itself a collective of the same ranks.

    Products run one after another while a collective is on its way. By the time that it is done
    they would have been more alone, and it would have been done sooner alone.

    Args:
        product: a matrix product, much shorter than the collective, that leaves so many
            multiprocessors free.
        exchange: starts the collective and returns it.
        device: where both run.
        sm_margins: to be tried, ascending. The factors are those of the first that is about as
            good as the best, against products that leave none.
    """
    product_us = measure_us(lambda: product(0), device=device)
    alone_us = measure_us(lambda: exchange().wait(), device=device)
    most = _PRODUCTS_BESIDE * alone_us / product_us
    found: list[Contention] = []
    for sm_margin in sm_margins:
        count, took_us = _measure_beside(partial(product, sm_margin), exchange, most, device)
        each_us = took_us / max(1.0, count)
        compute, comm = max(1.0, each_us / product_us), max(1.0, took_us / alone_us)
        found.append(Contention(compute=compute, comm=comm, sm_margin=sm_margin))
    best = min(each.compute * each.comm for each in found)
    return next(each for each in found if each.compute * each.comm <= _AS_GOOD * best)


def _measure_beside(
    product: Callable[[], object], exchange: Callable[[], Work], most: float, device: torch.device
) -> tuple[float, float]:
    """Return how many products a collective lets pass, and how long it takes, in the median."""
    beside = _beside_on_gpu if device.type == "cuda" else _beside_on_cpu
    trials: list[tuple[float, float]] = []
    for _ in range(_TRIALS):
        exchange().wait()  # ranks meet: one still at its products would seem a slow collective
        trials.append(beside(product, exchange, most))
    return median(count for _, count in trials), median(us for us, _ in trials)


def _beside_on_cpu(
    product: Callable[[], object], exchange: Callable[[], Work], most: float
) -> tuple[float, float]:
    """Return how long a collective took, and how many products were done in that time."""
    begin = time.perf_counter_ns()
    work, count = exchange(), 0
    while not work.is_completed():
        product()
        count += 1
    took_us = (time.perf_counter_ns() - begin) / 1e3
    work.wait()
    return took_us, count


def _beside_on_gpu(
    product: Callable[[], object], exchange: Callable[[], Work], most: float
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
        product()
        end.record()
    torch.cuda.synchronize()
    took_us = begin.elapsed_time(done) * 1e3
    ends_us = [begin.elapsed_time(end) * 1e3 for end in ends]
    count = sum(end_us <= took_us for end_us in ends_us)
    if count == len(ends_us):  # the collective outlasted them all
        return took_us, took_us * count / ends_us[-1]
    before_us = ends_us[count - 1] if count else 0.0
    return took_us, count + (took_us - before_us) / (ends_us[count] - before_us)
