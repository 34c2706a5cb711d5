"""Measure the times of operators and collectives, and keep them in a file of JSON lines.

Several runs may append to the file at the same time. Each line is valid for one environment
(device, versions, topology), and a table ignores the lines of other environments.
"""

import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol, cast, final

import torch

from halley.core.timeline import delay_gpu
from halley.core.validation import build_record, check_fields, read_json_lines, show
from halley.cost.hardware import Environment
from halley.cost.simulate import Contention


_MAX_FILE_BYTES = 64 * 2**20  # of a file of profiles, whose lines have about 300 bytes
_WARMUP = 10
_COUNT = 10
_FLUSH_BYTES = 64 * 2**20  # larger than the L2 cache of an A100, H100 or H200
_HEAD_START_US = 500.0  # in which the GPU waits and the host launches the run
_TRIALS = 5
# Among the numbers of reserved SMs whose slowdown is within 2 % of the best, choose the smallest
# number: with more reserved SMs, some GEMMs would need one more wave of CTAs.
_AS_GOOD = 1.02
_GEMMS_PER_COLLECTIVE = 2  # total GEMM time over collective time: GEMMs should end last


@dataclass(frozen=True)
class Curve:
    """The time of a collective as a function of its bytes, interpolated between measured points.

    The points are pairs (bytes, microseconds), at least one, all above 0, in ascending order.
    Example with the points (1000, 10) and (4000, 20): 2000 bytes take 14.1 us, halfway between the
    points on logarithmic scales. Fewer than 1000 bytes take 10 us, the latency. Above 4000 bytes,
    the straight line through the last two points continues: 7000 bytes take 30 us.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = [num_bytes for num_bytes, _ in self.points]
        if not sizes or sizes[0] <= 0 or sizes != sorted(set(sizes)):
            rule = "must be positive, distinct and ascending"
            raise ValueError(f"points' bytes ({show(sizes)}) {rule}")
        if (least_us := min(duration_us for _, duration_us in self.points)) <= 0:
            raise ValueError(f"points' microseconds ({least_us}) must be above 0")

    def at(self, num_bytes: float) -> float:
        """Return the time of ``num_bytes`` in us: constant below all points, linear above all."""
        sizes = [size for size, _ in self.points]
        if num_bytes <= sizes[0]:
            return self.points[0][1]
        index = bisect_left(sizes, num_bytes)
        if index < len(sizes):
            (left, left_us), (right, right_us) = self.points[index - 1 : index + 1]
            share = math.log(num_bytes / left) / math.log(right / left)
            return left_us * (right_us / left_us) ** share
        last, last_us = self.points[-1]
        if len(self.points) == 1:
            return last_us * num_bytes / last
        before, before_us = self.points[-2]
        return last_us + max(0.0, last_us - before_us) / (last - before) * (num_bytes - last)


class Work(Protocol):  # the methods of torch.distributed.Work that are used here
    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def measure_us(run: Callable[[], object], *, device: torch.device) -> float:
    """Return the mean time of 10 runs without the fastest and the slowest, in microseconds.

    10 warm-up runs come first, as in Lancet's code (arXiv:2404.19429). On a GPU, CUDA events
    measure the time, and each run starts with an overwritten L2 cache. The GPU is kept busy until
    the host has launched the run, so host time does not count.
    """
    for _ in range(_WARMUP):
        run()
    samples: list[float] = []
    for _ in range(_COUNT):
        if device.type == "cuda":
            torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
            delay_gpu(_HEAD_START_US)
        samples.append(run_us(run, device))
    return sum(sorted(samples)[1:-1]) / (_COUNT - 2)


def measure_curve(
    run: Callable[[int], object], sizes: Sequence[int], *, device: torch.device
) -> Curve:
    """Measure the ``Curve`` of a collective at ascending ``sizes`` in bytes; call on all ranks.

    ``run`` runs the collective, given the number of bytes that each rank sends.
    """
    return Curve(tuple((size, measure_us(partial(run, size), device=device)) for size in sizes))


def measure_contention(
    gemm: Callable[[int], object],
    exchange: Callable[[], Work],
    *,
    device: torch.device,
    reserved_sms: Sequence[int] = (0,),
) -> Contention:
    """Measure the factors by which GEMMs and a collective slow each other down; call on all ranks.

    GEMMs run one after another while the collective is in flight. A factor is the time of one GEMM,
    or of the collective, divided by the time that it takes alone: medians of five trials.

    Args:
        gemm: runs one GEMM that leaves the given number of SMs free; shorter than ``exchange``.
        reserved_sms: numbers of SMs to try, ascending. The result has the chosen ``sm_margin``.
    """
    gemm_us = measure_us(lambda: gemm(0), device=device)
    alone_us = measure_us(lambda: exchange().wait(), device=device)
    num_gemms = max(2, round(_GEMMS_PER_COLLECTIVE * alone_us / gemm_us))
    found: list[Contention] = []
    for num_sms in reserved_sms:
        run, trials = partial(gemm, num_sms), list[tuple[float, float]]()
        for _ in range(_TRIALS):
            exchange().wait()  # synchronises the ranks: a late rank would slow the timed exchange
            if device.type == "cuda":
                trials.append(_overlap_on_gpu(run, exchange, num_gemms))
            else:
                trials.append(_overlap_on_cpu(run, exchange))
        count, both_us = map(median, zip(*trials, strict=True))
        compute = max(1.0, both_us / max(1.0, count) / gemm_us)
        comm = max(1.0, both_us / alone_us)
        found.append(Contention(compute=compute, comm=comm, sm_margin=num_sms))
    best = min(each.compute * each.comm for each in found)
    return next(each for each in found if each.compute * each.comm <= _AS_GOOD * best)


def _overlap_on_cpu(
    gemm: Callable[[], object], exchange: Callable[[], Work]
) -> tuple[float, float]:
    """Run GEMMs until a new collective ends; return their number and the elapsed time in us."""
    begin = time.perf_counter_ns()
    work, count = exchange(), 0
    while not work.is_completed():
        gemm()
        count += 1
    duration_us = (time.perf_counter_ns() - begin) / 1e3
    work.wait()
    return count, duration_us


def _overlap_on_gpu(
    gemm: Callable[[], object], exchange: Callable[[], Work], num_gemms: int
) -> tuple[float, float]:
    """Return how many GEMMs (a float) run during a collective, and the collective's time in us."""
    side = torch.cuda.Stream()
    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(num_gemms)]
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
    if count == len(ends_us):  # the collective took longer than all GEMMs, so extrapolate
        return duration_us * count / ends_us[-1], duration_us
    before_us = ends_us[count - 1] if count else 0.0
    return count + (duration_us - before_us) / (ends_us[count] - before_us), duration_us


def run_us(run: Callable[[], object], device: torch.device) -> float:
    """Call ``run`` once; return its time in us, by CUDA events on a GPU, else by wall clock."""
    if device.type != "cuda":
        begin_ns = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - begin_ns) / 1e3
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def shipped_path(device_name: str) -> Path | None:
    """Return the path of the packaged file of measured times for a device; None without one."""
    path = Path(__file__).parent / "tables" / f"{device_name.lower().replace(' ', '-')}.jsonl"
    return path if path.exists() else None


def operation_key(
    name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, rest: str = ""
) -> str:
    """Return an operator's key in a table of times, such as "aten.relu.default(float32[2,3])".

    Equal keys mean equal times. ``rest`` describes the arguments that are no tensors.
    """
    operands = [
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return f"{name}({', '.join(operands)}) {rest}".rstrip()


@dataclass(frozen=True, kw_only=True)
class _OperationLine:
    op: str
    us: float
    environment: Environment

    def __post_init__(self) -> None:
        if self.us < 0:
            raise ValueError(f"us ({self.us}) must be at least 0")


@dataclass(frozen=True, kw_only=True)
class _CurveLine:
    collective: str
    points: tuple[tuple[int, float], ...]
    environment: Environment

    def __post_init__(self) -> None:
        Curve(self.points)  # raises ``ValueError`` for wrong points


@dataclass(frozen=True, kw_only=True)
class _ContentionLine:
    contention: Contention
    environment: Environment


@final
class ProfileTable:
    """Holds measured operator times, curves of collectives and contention for one environment.

    ``contention``, and the times and curves of missing keys, are None. Added values replace earlier
    ones, and are appended to the file.

    Args:
        path: the file, created at the first measurement; None keeps the times in memory only.
        offline: never measure an operator that is missing in the file.
    """

    def __init__(
        self, path: Path | None, environment: Environment, *, offline: bool = False
    ) -> None:
        if offline and (path is None or not os.path.exists(path)):
            raise ValueError(f"path ({path}) must be a file when offline")
        self.environment, self.offline, self._path = environment, offline, path
        self._times_us: dict[str, float] = {}
        self._curves: dict[str, Curve] = {}
        self.contention: Contention | None = None
        if path is not None:
            for line in read_json_lines(path, what="profiles", max_bytes=_MAX_FILE_BYTES):
                self._read(*line)

    def time_us(self, key: str) -> float | None:
        return self._times_us.get(key)

    def curve(self, key: str) -> Curve | None:
        return self._curves.get(key)

    def measure(self, key: str, run: Callable[[], object], *, device: torch.device) -> float | None:
        """Return an operator's time in us; measure it if missing, or return None if ``offline``."""
        if key not in self._times_us and not self.offline:
            self.add_time(key, measure_us(run, device=device))
        return self._times_us.get(key)

    def add_time(self, key: str, duration_us: float) -> None:
        self._times_us[key] = duration_us
        self._write({"op": key, "us": duration_us})

    def add_curve(self, key: str, curve: Curve) -> None:
        self._curves[key] = curve
        self._write({"collective": key, "points": curve.points})

    def add_contention(self, contention: Contention) -> None:
        self.contention = contention
        self._write({"contention": asdict(contention)})

    def _write(self, entry: dict[str, object]) -> None:
        if self._path is None:
            return
        line = json.dumps({**entry, "environment": asdict(self.environment)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")  # one write, so that lines of several runs do not mix
        except OSError as error:
            where = f"profiles ({self._path})"
            raise ValueError(f"{where} must be a file to write: {error.strerror}") from error

    def _read(self, where: str, value: object) -> None:
        table = cast(dict[str, object], value) if isinstance(value, dict) else {}
        kinds = {"op": _OperationLine, "contention": _ContentionLine}
        kind = next((kinds[key] for key in kinds if key in table), _CurveLine)
        line = build_record(kind, cast(object, value), where=where)
        is_valid = self.environment.accepts(line.environment)
        same_topology = line.environment.topology == self.environment.topology
        if is_valid and isinstance(line, _OperationLine):
            self._times_us[line.op] = line.us
        elif is_valid and same_topology and isinstance(line, _ContentionLine):
            self.contention = line.contention
        elif is_valid and same_topology and isinstance(line, _CurveLine):
            self._curves[line.collective] = Curve(line.points)
