"""Training steps of GPT-2 with experts on one GPU that plays one rank of many, by pass.

The other ranks mirror this one: they have its tokens, so they send to its experts what it sends to
itself. A collective copies such rows and lasts as long as its bytes would travel over a link of so
many GB/s: a kernel on a stream of its own waits for that. Values mean nothing, as what comes home
from other ranks' experts was made by this one's; times are those of ranks that are all alike, on
which no rank waits for another. So this tells what a change does to a step before several GPUs do,
and no figure of it stands for theirs.

    python benchmarks/mirrored_graph.py gpt2-l-moe --layers 4 --ranks 4 --link 19

Variants are those of ``halley bench graph``, with a number behind them those in so many parts
("both2"), with "+cpp" those whose kernels Inductor calls from C++. One JSON object each, the last
lines.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
import torch.distributed as dist
import triton
import triton.language as tl

from halley.compiler import Backend, group_cost
from halley.compiler.graph_collectives import ALL_TO_ALL
from halley.core.timeline import Recorder, union_us
from halley.cost.profiles import ProfileTable, find_environment, measure_curve
from halley.distributed.mesh import ParallelGroups
from halley.ops.kernels.launch import Launcher
from halley.strategies.registry import build_strategy
from halley.tools.gpt2_moe import find_shape
from halley.tools.graph_case import GraphCase, GraphSubject, Loss
from halley.tools.results import machine_keys
from halley.tools.timer import time_interleaved
from halley.tools.tracing import exposed_comm_us, trace_step


LATENCY_US = 30.0  # of a collective of few bytes, about that of NCCL between GPUs of a host
NUM_PROGRAMS = 4  # of the kernel that waits
MARGIN = 0.5  # of memory, for parts that are asked for
NUM_HOST_SAMPLES = 7
DEVICE = torch.device("cuda", 0)


@triton.jit(do_not_specialize=["wait_ns"])
def nccl_mirror(wait_ns):  # traces know communication by "nccl"
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < wait_ns:
        pass


# What a collective costs the host is to be about what NCCL's does: few launches, and quick ones.
travel = Launcher(nccl_mirror)


class Mirrored(dist.Work):
    """A collective on its way, whose tensors live until it is waited for."""

    def __init__(self, end: torch.cuda.Event, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._end, self._tensors = end, tensors

    def wait(self, timeout=None) -> bool:
        torch.cuda.current_stream().wait_event(self._end)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._end.query()


class MirroredGroup(dist.ProcessGroup):
    """Rank 0 of ranks that all have its tensors, over a link of so many GB/s out of each."""

    def __init__(self, num_ranks: int, link: float) -> None:
        super().__init__(0, num_ranks)
        self._num_ranks, self._link = num_ranks, link
        self._stream = torch.cuda.Stream(DEVICE)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        even = [input.shape[0] // self._num_ranks] * self._num_ranks
        comes, goes = output_splits or even, input_splits or even
        others = max(sum(comes[1:]), sum(goes[1:]))

        def move() -> None:
            own = input[: goes[0]]
            if own.shape[0] and comes.count(goes[0]) == self._num_ranks:
                output.view(self._num_ranks, *own.shape).copy_(own)
                return
            for part in output.split(comes):
                source = own if part.shape == own.shape else input
                if not source.shape[0]:
                    part.zero_()
                    continue
                for some in part.split(source.shape[0]):
                    some.copy_(source[: some.shape[0]])

        num_bytes = others * input.nbytes // max(1, input.shape[0])
        return self._run(move, num_bytes, (output, input))

    def _allgather_base(self, output, input, opts=None):
        def move() -> None:
            output.view(self._num_ranks, -1).copy_(input.view(-1))

        return self._run(move, (self._num_ranks - 1) * input.nbytes, (output, input))

    def allreduce(self, tensors, opts=None):
        num_bytes = 2 * sum(tensor.nbytes for tensor in tensors) // self._num_ranks
        return self._run(lambda: None, (self._num_ranks - 1) * num_bytes, tuple(tensors))

    # As torch 2.13 calls them.
    all_to_all_single, all_gather_single = alltoall_base, _allgather_base

    def _run(self, move, num_bytes: int, tensors: tuple[torch.Tensor, ...]) -> Mirrored:
        """Move rows on the link's stream, and keep that for as long as they would travel."""
        end = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            move()
            wait_us = LATENCY_US + num_bytes / self._link / 1e3
            travel(NUM_PROGRAMS, (int(wait_us * 1e3),), ())
            end.record()
        return Mirrored(end, tensors)


@dataclass
class Ranks:
    """What measuring wants to know of a group."""

    group_name: str
    num_ranks: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", type=float, default=19.0)
    parser.add_argument("--variants", default="none,sequential,wgrad,both,both2")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--commit")
    return parser.parse_args()


def join(num_ranks: int, link: float) -> ParallelGroups:
    dist.Backend.register_backend(
        "mirrored", lambda *_: MirroredGroup(num_ranks, link), devices=["cuda", "cpu"]
    )
    store = dist.HashStore()
    dist.init_process_group("mirrored", rank=0, world_size=num_ranks, store=store)
    world = dist.group.WORLD
    return ParallelGroups(num_ranks=num_ranks, ep_size=num_ranks, world=world, ep=world, sums=world)


def fill_group(path: Path, num_ranks: int, *, largest: int) -> None:
    """Measure what ranks measure together, and write it to a file of profiles."""
    table = ProfileTable(path, find_environment(DEVICE, topology="ranks 1"))
    ranks: Any = Ranks(dist.group.WORLD.group_name, num_ranks)
    points = [4096]
    while points[-1] < largest:
        points.append(points[-1] * 4)
    exchanges = {size: group_cost._Exchange(ranks, size, DEVICE) for size in points}
    curve = measure_curve(lambda size: exchanges[size].start().wait(), points, device=DEVICE)
    table.add_curve(ALL_TO_ALL, curve)
    table.add_contention(group_cost._measure_contention(ranks, DEVICE))


def make(
    name: str, case: GraphCase, subject: GraphSubject, groups: ParallelGroups, profiles: Path
) -> tuple[Loss, Backend]:
    """Return a step's loss, not compiled yet, and what will know what was planned."""
    backend = Backend()
    words, *more = name.split("+")
    passes = words.rstrip("0123456789")
    torch._inductor.config.cpp_wrapper = more == ["cpp"]
    torch._dynamo.config.capture_scalar_outputs = True
    if passes == "sequential":
        recorder = Recorder(DEVICE, enabled=False)
        strategy = build_strategy(passes, groups.ep, recorder=recorder, device=DEVICE)

        def plain(tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
            subject.plain.model.use(strategy)
            return subject.plain(tokens_BS, targets_BS)

        return plain, backend
    options = case.options(passes) | {"unknown_size": subject.fullest_rows(), "agree": False}
    if passes != "none":
        options |= {"profiles": profiles, "measure": True}
    if parts := words.removeprefix(passes):
        options |= {"num_parts": int(parts), "memory_margin": MARGIN}
    call = torch.compile(subject.whole, backend=backend, fullgraph=True, options=options)
    return call, backend


def plan_of(backend: Backend) -> dict[str, object]:
    reports = backend.reports
    return {
        "predicted_us": round(sum(r.time_after.makespan_us for r in reports), 1),
        "plan_s": round(sum(r.planning_s for r in reports), 1),
        "parts": [found.num_parts for r in reports for found in r.ranges],
        "sm_margins": max((r.sm_margins for r in reports), default=(0, 0)),
    }


def time_host(subject: GraphSubject, loss: Loss) -> dict[str, float]:
    """Return how long forward takes, and how long the host is at it and at backward."""
    samples: list[tuple[float, float, float]] = []
    for _ in range(NUM_HOST_SAMPLES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        value = loss(subject.tokens_BS, subject.targets_BS)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        value.backward()
        backward = time.perf_counter()
        subject.whole.zero_grad()
        samples.append((done - begin, issued - begin, backward - done))
    names = ("forward_us", "forward_host_us", "backward_host_us")
    medians = map(statistics.median, zip(*samples, strict=True))
    return {name: round(1e6 * s, 1) for name, s in zip(names, medians, strict=True)}


def traced(step) -> dict[str, object]:
    spans = trace_step(step, rank=0, device=DEVICE, warmup=2)
    kernels = [span for span in spans if span.stream.startswith("compute")]
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "exposed_comm_us": round(exposed_comm_us(spans), 1),
        "comm_us": round(union_us(span for span in spans if span.stream == "comm"), 1),
        "kernels_us": round(union_us(kernels), 1),
        "num_kernels": len(kernels),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
    }


def main() -> None:
    args = parse()
    groups = join(args.ranks, args.link)
    shape = find_shape(args.model)
    shape = replace(shape, num_layers=args.layers or shape.num_layers)
    case = GraphCase(shape=shape, batch_size=args.batch or shape.batch_size, dtype=torch.bfloat16)
    subject = GraphSubject(case, groups, DEVICE)
    losses: dict[str, Loss] = {}
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it traces
        profiles = Path(folder) / "profiles.jsonl"
        fill_group(profiles, args.ranks, largest=case.num_slots * shape.hidden_size * 2)
        for name in args.variants.split(","):
            begin_s = time.perf_counter()
            loss, backend = make(name, case, subject, groups, profiles)
            subject.step(loss)
            torch.cuda.synchronize()
            first_s = round(time.perf_counter() - begin_s, 1)
            losses[name] = loss
            rows[name] = {"variant": name, "first_step_s": first_s, **plan_of(backend)}
    steps = {name: partial(subject.step, loss) for name, loss in losses.items()}
    timings = time_interleaved(steps, device=DEVICE, num_samples=args.samples)
    for name, timing in timings.items():
        row = {
            "case": "graph-mirrored",
            "model": args.model,
            "num_layers": shape.num_layers,
            "num_tokens": case.num_tokens,
            "ranks_played": args.ranks,
            "link_gb_per_s": args.link,
            **rows[name],
            "median_us": round(timing.median_us, 1),
            "p10_us": round(timing.p10_us, 1),
            "p90_us": round(timing.p90_us, 1),
            "samples": args.samples,
            **time_host(subject, losses[name]),
            **traced(steps[name]),
            **machine_keys(ParallelGroups(), device=DEVICE, commit=args.commit),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
