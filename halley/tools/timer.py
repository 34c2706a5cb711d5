"""Times callables as the benchmarks do: ranks together, variants in turn, caches cold."""

import gc
import statistics
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


_CPU_FLUSH_BYTES = 64 * 2**20
_MARGIN_NS = 500_000  # from when the last rank comes to the barrier to when all have left it


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What the samples of one variant say.

    Attributes:
        median_us: the middle sample.
        p10_us: a tenth of the samples lies below.
        p90_us: a tenth of the samples lies above.
        samples_us: every counted sample, in the order taken.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples_us: tuple[float, ...]


def summarise(samples_us: Sequence[float]) -> Timing:
    """Return median and spread of the samples; percentiles between two samples are interpolated.

    Raises:
        ValueError: there is no sample.
    """
    if not samples_us:
        raise ValueError("samples_us (0 samples) must hold at least one")
    p10_us, p90_us = np.percentile(samples_us, [10, 90])
    return Timing(
        median_us=statistics.median(samples_us),
        p10_us=float(p10_us),
        p90_us=float(p90_us),
        samples_us=tuple(samples_us),
    )


def time_interleaved(
    variants: dict[str, Callable[[], None]],
    *,
    device: torch.device | str,
    num_samples: int = 11,
    num_warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time all variants against each other and return each one's timing, the same on every rank.

    Variants take turns (A B C A B C), so that a machine that slows down slows all of them. Before
    each run caches are overwritten and all ranks meet; a sample is the time of the slowest rank, by
    CUDA events on a GPU and by the wall clock on a CPU.

    Args:
        variants: what to time, by name; the same names in the same order on every rank.
        device: where the variants run.
        num_samples: counted runs of each variant.
        num_warmup: uncounted runs of each variant, before.
        group: ranks that run together; all of them if None. Without process groups, this one alone.
        on_progress: called after each run with the runs done and the runs to do, warm-up included.

    Raises:
        ValueError: there is nothing to time, or a count is too small.
    """
    if not variants:
        raise ValueError("variants (none) must hold at least one")
    if num_samples < 1:
        raise ValueError(f"num_samples ({num_samples}) must be at least 1")
    if num_warmup < 0:
        raise ValueError(f"num_warmup ({num_warmup}) must be at least 0")
    device = torch.device(device)
    flush = _flush_buffer(device)
    num_rounds = num_warmup + num_samples
    samples_us: list[list[float]] = [[] for _ in variants]
    with _no_garbage_collection():
        for round_index in range(num_rounds):
            for index, run in enumerate(variants.values()):
                flush.zero_()
                start_together(device, group=group)
                sample_us = _run_us(run, device)
                if round_index >= num_warmup:
                    samples_us[index].append(sample_us)
                if on_progress is not None:
                    on_progress(round_index * len(variants) + index + 1, num_rounds * len(variants))

    slowest_us = torch.tensor(samples_us, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest_us, op=dist.ReduceOp.MAX, group=group)
    return {name: summarise(row) for name, row in zip(variants, slowest_us.tolist(), strict=True)}


def start_together(device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
    """Return on all ranks of the group at about the same time, each with an idle device.

    Ranks leave a barrier up to 100 us one after another (4 H200), for which all would have to wait
    in what is timed. So those of one machine agree on a time by its clock.

    Args:
        device: the one that this rank works on.
        group: the ranks that meet; all of them if None. Without process groups, this one alone.
    """
    begin_ns = agree_on_begin(device, group=group) if dist.is_initialized() else 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    while time.monotonic_ns() < begin_ns:
        pass


def agree_on_begin(device: torch.device, *, group: dist.ProcessGroup | None = None) -> int:
    """Meet the other ranks; return when all of them begin, by the monotonic clock, in ns.

    0 if they have no clock in common.

    Args:
        device, group: as for ``start_together``.
    """
    clock = _clock_id()
    told = torch.tensor([time.monotonic_ns() + _MARGIN_NS, clock, -clock], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    begin_ns, largest, smallest = told.tolist()
    return begin_ns if largest == -smallest else 0


@cache
def _clock_id() -> int:
    """Return a number that processes have in common whose monotonic clock is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        boot = str(uuid.uuid4())
    return zlib.crc32(boot.encode())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from stopping one rank in a sample, which all others would wait for."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _flush_buffer(device: torch.device) -> torch.Tensor:
    num_bytes = _CPU_FLUSH_BYTES
    if device.type == "cuda":
        num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _run_us(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start_ns = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start_ns) / 1e3
    stream = torch.cuda.current_stream(device)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) * 1e3
