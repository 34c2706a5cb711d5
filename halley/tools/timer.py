"""Time callables on all ranks, and write result lines of benchmarks as JSON, a file per case."""

import datetime
import gc
import json
import platform
import statistics
import subprocess
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.cuda import nccl

from halley.core.timeline import Recorder, waited_us
from halley.cost.profiles import run_us
from halley.distributed.mesh import ParallelGroups


Progress = Callable[[str, int, int], None]  # text, steps done, steps in total
Row = dict[str, object]  # the keys and values of a result line

_NUM_GRAPH_WARMUPS = 3
_CPU_FLUSH_BYTES = 64 * 2**20  # larger than the last-level cache of most desktop CPUs
_START_DELAY_NS = 500_000  # from the last rank's call of ``start_together`` to the common start
_NUM_WAIT_SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one measured callable in us: median, 10th and 90th percentile, all samples."""

    median_us: float
    p10_us: float
    p90_us: float
    samples_us: tuple[float, ...]


def summarise(samples_us: Sequence[float]) -> Timing:
    """Return a ``Timing``: the samples, their median, and interpolated 10th, 90th percentiles."""
    p10_us, p90_us = np.percentile(samples_us, [10, 90]).tolist()
    median_us = statistics.median(samples_us)
    return Timing(median_us=median_us, p10_us=p10_us, p90_us=p90_us, samples_us=tuple(samples_us))


def time_interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    num_samples: int = 11,
    num_warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time callables in alternation; return the same timings, by name, on all ranks; a collective.

    Variants alternate (A B C A B C), so that a slowdown of the machine affects all of them. Before
    each run, the caches are overwritten and all ranks synchronise. A sample is the time of the
    slowest rank, by CUDA events on a GPU and by the wall clock on a CPU.

    Args:
        variants: callables by name; the same names in the same order on every rank.
        num_samples, num_warmup: counted runs of each variant, and uncounted ones before them.
        group: as for ``start_together``.
        on_progress: called after each run with the runs done and the total, warm-up included.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples ({num_samples}) must be at least 1")
    device, runs = torch.device(device), list(variants.values())
    num_bytes = _CPU_FLUSH_BYTES
    if device.type == "cuda":  # twice the L2 size, because its replacement policy is unknown
        num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    total = (num_warmup + num_samples) * len(variants)
    samples_us: list[list[float]] = [[] for _ in variants]
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a garbage collection on one rank would delay the sample of all
    try:
        for done in range(total):
            round_index, index = divmod(done, len(variants))
            flush.zero_()  # overwrites the L2 cache, or on a CPU the last-level cache
            start_together(device, group=group)
            sample_us = run_us(runs[index], device)
            if round_index >= num_warmup:
                samples_us[index].append(sample_us)
            if on_progress is not None:
                on_progress(done + 1, total)
    finally:
        if was_enabled:
            gc.enable()

    slowest_us = torch.tensor(samples_us, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest_us, op=dist.ReduceOp.MAX, group=group)
    return {name: summarise(row) for name, row in zip(variants, slowest_us.tolist(), strict=True)}


def measure_waits(
    run: Callable[[], object],
    recorder: Recorder,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> float | None:
    """Return the microseconds that the slowest rank waits for communication in ``run``. Collective.

    Each rank takes the median of three calls. The result is None if the layers record no waits.
    ``recorder`` is the recorder of the layers; it is enabled only during this function.
    """
    samples: list[float | None] = []
    recorder.enabled = True
    try:
        for _ in range(_NUM_WAIT_SAMPLES):
            recorder.collect()
            run()
            samples.append(waited_us(recorder.collect()))
    finally:
        recorder.enabled = False
    known = [sample for sample in samples if sample is not None]
    typical_us = statistics.median(known) if known else -1.0
    (slowest_us,) = max_over_ranks([typical_us], device=device, group=group)
    return round(slowest_us, 1) if slowest_us >= 0.0 else None


def max_over_ranks(
    values: Sequence[float], *, device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """Return each value's maximum over the ranks, or the values for group None; a collective."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def no_progress(text: str, done: int, total: int) -> None:
    """Do nothing: the default ``Progress`` callback of measurements, which shows no progress."""


def start_together(device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
    """Wait for this rank's device; return at about the same time on all ranks. Collective.

    Ranks leave a barrier up to 100 us apart (measured on 4 H200), and that difference would count
    in a sample. Therefore ranks of one machine agree on a start time of its monotonic clock. The
    group None means all ranks, or this process alone without process groups.
    """
    begin_ns = agree_on_begin(device, group=group) if dist.is_initialized() else 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    while time.monotonic_ns() < begin_ns:
        pass


def agree_on_begin(device: torch.device, *, group: dist.ProcessGroup | None = None) -> int:
    """Return the same future clock time (ns) on all ranks, 0 if they share no clock. Collective.

    The result is 0 if the ranks are on several machines, which share no clock.
    """
    clock = _clock_id()
    times = torch.tensor([time.monotonic_ns() + _START_DELAY_NS, clock, -clock], device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    begin_ns, largest, smallest = times.tolist()
    return begin_ns if largest == -smallest else 0


@cache
def _clock_id() -> int:
    """Return a number that is equal in two processes only if they share a monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # the system is not Linux
        boot = str(uuid.uuid4())
    return zlib.crc32(boot.encode())


def machine_keys(groups: ParallelGroups, *, device: torch.device, commit: str | None) -> Row:
    """Return the keys and values of a result line that name the machine, versions, commit and date.

    If ``commit`` is None, it is the commit of this package's working tree, or "unknown".
    """
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    if commit is None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            commit = done.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    return {
        "gpu": machine_name(device),
        "num_gpus": groups.num_ranks,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "nccl": ".".join(map(str, nccl.version())) if device.type == "cuda" else None,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def time_keys(timing: Timing) -> Row:
    """Return keys and values of a result line for the times of one measured callable."""
    times = {key: round(getattr(timing, key), 1) for key in ("median_us", "p10_us", "p90_us")}
    return {**times, "samples": len(timing.samples_us)}


def to_float(value: object) -> float:
    """Return a value of a result line as a float; assert that it is a number."""
    assert isinstance(value, int | float)
    return float(value)


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or "cpu" with the processor architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def results_path(folder: Path, row: Row) -> Path:
    """Return the path of the file for a result line: ``<folder>/<gpu>x<count>/<case>.jsonl``."""
    gpu = str(row["gpu"]).lower().removeprefix("nvidia ").replace(" ", "-")
    return folder / f"{gpu}x{row['num_gpus']}" / f"{row['case']}.jsonl"


def write_rows(rows: list[Row], folder: Path) -> Path:
    """Replace the result file of one case and machine by the lines ``rows``; return its path."""
    path = results_path(folder, rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    draft.replace(path)
    return path


def installed_version(package: str) -> str | None:
    """Return the version of a Python package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def captured(
    run: Callable[[], object], *, device: torch.device, pool: Any = None
) -> Callable[[], None]:
    """Capture a function as a CUDA graph; return a function that replays it on the same tensors.

    ``run`` works on the current stream of the device and does not synchronise with the host. It
    runs a few times first, because it must not allocate or compile during the capture. Graphs
    of one ``torch.cuda.graph_pool_handle()`` overwrite each other's results.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_NUM_GRAPH_WARMUPS):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # "thread_local" allows the watchdog thread of NCCL to query events during the capture.
    # No argument ``stream``: graphs that share a memory pool must be captured on one stream.
    # Without the argument, PyTorch captures all graphs on the same stream.
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        run()
    return graph.replay
