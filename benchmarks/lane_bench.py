"""Time a step of GPT-2 with experts in microbatch lanes, over an emulated link on a CPU.

    torchrun --nproc-per-node 2 -m benchmarks.lane_bench --mb-per-s 20

It prints one line for a step of one microbatch after another, and one for the planned order:
median milliseconds, exposed communication in forward and backward, and the predicted times.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.emulated_link import Link, emulate_link
from benchmarks.graph_bench.gpt2_moe import GPT2MoE, GPT2Shape, TrainingLoss, check_gate
from halley.distributed.mesh import build_groups
from halley.lanes import LaneStep, compile_step
from halley.lanes.capture import Inner
from halley.strategies.traceable import TraceableStrategy


NUM_BEFORE = 3  # steps before the plan; the first one compiles


def _time(
    step: LaneStep, batch: Sequence[torch.Tensor], link: Link, *, num_steps: int
) -> list[tuple[float, float, float]]:
    """Return milliseconds, exposed milliseconds and milliseconds of the wire of each step."""
    times: list[tuple[float, float, float]] = []
    for _ in range(num_steps):
        dist.barrier()
        link.clear()
        begin_s = time.perf_counter()
        step(*batch)
        step_s = time.perf_counter() - begin_s
        wire_s = link.num_bytes / link.bytes_per_s
        times.append((1e3 * step_s, 1e3 * link.exposed_s, 1e3 * wire_s))
    return times


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--gate", default="switch")
    parser.add_argument("--inner", default="inductor", choices=("eager", "inductor"))
    parser.add_argument("--mb-per-s", type=float, default=20.0, help="rate of the link")
    sizes = {"layers": 8, "hidden": 256, "batch": 8, "seq-len": 128, "vocab": 1024, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Run the benchmark on this rank."""
    args = _parse()
    link = emulate_link(bytes_per_s=1e6 * args.mb_per_s)
    dist.init_process_group(link.backend)
    torch.set_num_threads(1)
    groups = build_groups(0, device_type="cpu")
    shape = GPT2Shape(
        name="bench",
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=4,
        vocab_size=args.vocab,
        seq_len=args.seq_len,
    )
    strategy = TraceableStrategy(groups.ep)
    gate, stds = check_gate(args.gate), {"std": 0.05, "embedding_std": 0.05}
    model = TrainingLoss(GPT2MoE(shape, gate, groups, strategy=strategy, **stds))
    generator = torch.Generator().manual_seed(groups.rank)
    size = (args.batch * args.microbatches, args.seq_len + 1)
    text = torch.randint(args.vocab, size, generator=generator)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    inner = cast(Inner, args.inner)
    step = compile_step(model, args.microbatches, max_lanes=args.lanes, inner=inner)
    begin_s = time.perf_counter()
    before = _time(step, batch, link, num_steps=NUM_BEFORE)[1:]
    compile_s = time.perf_counter() - begin_s - sum(each[0] for each in before) / 1e3
    after = _time(step, batch, link, num_steps=args.steps)
    plan = step.plan
    if groups.rank == 0 and plan is not None:
        lines = [f"items of a microbatch, distinct: {step.num_items}; first step {compile_s:.1f} s"]
        for name, times, predicted in (
            ("one after another", before, plan.time_before),
            (f"{plan.num_lanes} lanes, units {plan.moves_units}", after, plan.time),
        ):
            step_ms, exposed_ms, wire_ms = (median(each) for each in zip(*times, strict=True))
            lines.append(
                f"{name:22} step {step_ms:6.0f} ms, exposed {exposed_ms:6.0f} of {wire_ms:6.0f} ms;"
                f" predicted step {predicted.makespan_us / 1e3:6.0f} ms,"
                f" exposed {predicted.exposed_us / 1e3:6.0f} ms"
            )
        sys.stdout.write("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
