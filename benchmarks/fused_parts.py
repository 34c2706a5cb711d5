"""Where a fused layer's time goes, part by part, and what a knob does to it.

Parts are the launches of the unfused form, by the profiler: plan, fetch, multiply, multiply,
combine (with the sums at home), then those of backward. Beside them stand the launches of the fused
form and the time of whole calls with the host, all medians of the slowest rank. Sets of knobs are
separated by a slash; a set may be empty, which is the defaults.

    torchrun --nproc-per-node 4 benchmarks/fused_parts.py qwen3-30b-a3b 8192 / up.run=2 / block_m=64
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.distributed.world import join_world
from halley.fused.buffer_cache import Workspaces
from halley.ops.kernels.gemm_config import Knobs
from halley.strategies.fused import FusedStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import LayerCase, LayerTensors, make_tensors, outputs_of
from halley.tools.lower_bound import floor_gemms
from halley.tools.timer import time_interleaved
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error


PARTS = ("plan", "fetch", "up", "down", "combine")
FUSED_LAUNCHES = ("fetch", "multiply", "multiply", "combine")
BACKWARD_PARTS = ("stage", "fetch", "down", "up", "combine", "down.grad", "up.grad")
KERNELS = ("plan", "fetch", "multiply", "combine", "stage", "weight_gemm")
NUM_CALLS = 7


def main() -> None:
    model, num_tokens, *words = sys.argv[1:]
    case = LayerCase(model=find_model(model), num_tokens=int(num_tokens))
    with join_world("cuda") as world:
        groups = build_groups(0, device_type="cuda")
        tensors = make_tensors(case, groups, device=world.device)
        timings = time_interleaved(
            floor_gemms(tensors, groups), device=world.device, group=groups.ep
        )
        gemms = {name: round(timing.median_us) for name, timing in timings.items()}
        say(world.is_first, {"model": model, "num_tokens": case.num_tokens, **gemms})
        for settings in " ".join(words).split("/"):
            say(world.is_first, measure(settings.split(), tensors, groups))


def measure(
    settings: list[str], tensors: LayerTensors, groups: ParallelGroups
) -> dict[str, object]:
    """Return a line of figures for one set of knobs.

    Raises:
        RuntimeError: values are wrong.
    """
    device, dtype = tensors.x_TD.device, tensors.x_TD.dtype
    recorder = Recorder(device, enabled=False)
    workspaces = Workspaces(groups.ep, device, knobs=Knobs().changed(settings))
    sequential = build_strategy("sequential", groups.ep, recorder=recorder, device=device)
    wanted = outputs_of(sequential, tensors)
    runs = {}
    for name in ("unfused", "fused"):
        strategy = FusedStrategy(workspaces, recorder=recorder, fused=name == "fused")
        runs[name] = partial(outputs_of, strategy, tensors, backward=False)
        runs[f"{name}_training"] = partial(outputs_of, strategy, tensors)
        for value, right in zip(outputs_of(strategy, tensors), wanted, strict=True):
            error = relative_error(value, right)
            if error > RELATIVE_TOLERANCE[dtype]:
                raise RuntimeError(f"{name} with {settings}: off by {error:.1e}")
    line: dict[str, object] = {"knobs": " ".join(settings)}
    line["parts_us"] = kernel_times(runs["unfused"], PARTS)
    launches = ("plan", *FUSED_LAUNCHES)
    line["fused_us"] = kernel_times(runs["fused"], launches)
    launches += ("stage", *FUSED_LAUNCHES)
    launches += ("down.grad", "up.grad")
    parts = (*PARTS, *BACKWARD_PARTS)
    line["training_parts_us"] = kernel_times(runs["unfused_training"], parts)
    line["training_fused_us"] = kernel_times(runs["fused_training"], launches)
    whole = time_interleaved(runs, device=device, group=groups.ep)
    line |= {f"{name}_whole_us": round(timing.median_us) for name, timing in whole.items()}
    workspaces.close()
    return line


def kernel_times(run: Callable[[], object], names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the median time of each launch of ``run`` on the slowest rank, in us.

    And the time from the begin of the first to the end of the last, of backward alone as well.
    """
    run()
    dist.barrier()
    torch.cuda.synchronize()
    # acc_events only keeps torch 2.11 from warning of cycles, of which there is one here.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(NUM_CALLS):
            dist.barrier()
            run()
            torch.cuda.synchronize()
    ours = sorted(
        (e for e in profiled.events() or () if e.name.startswith(KERNELS)),
        key=lambda event: event.time_range.start,
    )
    each = [ours[i :: len(names)] for i in range(len(names))]
    medians = [
        statistics.median(event.time_range.elapsed_us() for event in launch) for launch in each
    ]
    begins = {"all": 0} | ({"backward": names.index("stage")} if "stage" in names else {})
    last = len(names) - 1
    for begin in begins.values():
        spans = [
            ours[i + last].time_range.end - ours[i + begin].time_range.start
            for i in range(0, len(ours), len(names))
        ]
        medians.append(statistics.median(spans))
    worst = torch.tensor(medians, device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    told = zip((*names, *begins), worst.tolist(), strict=True)
    return [(name, round(us)) for name, us in told]


def say(is_first: bool, line: dict[str, object]) -> None:
    if is_first:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
