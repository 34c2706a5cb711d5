"""Compare the weight-gradient GEMMs of Halley's kernel with torch's grouped GEMM.

Times both projections of a layer on the rows of one rank, with equally many rows per expert.

    torchrun --nproc-per-node 4 -m benchmarks.weight_gradients benchmarks/results
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from halley.core.models import find_model
from halley.distributed.mesh import ParallelGroups, build_groups, join_world
from halley.fused.config import KernelConfig
from halley.ops.kernels.tiles import weight_gemm
from halley.tools.layer_case import RELATIVE_TOLERANCE, LayerCase, relative_error
from halley.tools.timer import Row, machine_keys, time_interleaved, write_rows


MODELS = ("mixtral-8x7b", "phi-3.5-moe", "qwen2-moe", "qwen3-30b-a3b", "deepseek-v3")
NUM_TOKENS = 8192
NUM_CALLS = 8


def main() -> None:
    folder, *commit = sys.argv[1:]
    with join_world("cuda") as world:
        groups = build_groups(0, device_type="cuda")
        machine = machine_keys(groups, device=world.device, commit=commit[0] if commit else None)
        rows: list[Row] = []
        for name in MODELS:
            case = LayerCase(model=find_model(name), num_tokens=NUM_TOKENS)
            found = compare(case, groups, world.device)
            workload = {
                "case": "weight_gradients", "model": name, "num_tokens": NUM_TOKENS,
                "ep_size": groups.ep_size, "tp_size": 1, "skew": "balanced", "dtype": "bfloat16",
                "direction": "backward",
            }  # fmt: skip
            rows += [{**workload, **row, **machine} for row in found]
            if world.is_first:
                for row in rows[-len(found) :]:
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()
        if world.is_first:
            write_rows(rows, Path(folder))


def compare(case: LayerCase, groups: ParallelGroups, device: torch.device) -> list[Row]:
    """Return a result line for each projection and implementation.

    Raises:
        RuntimeError: the two implementations give different values.
    """
    moe, hidden = case.model.moe, case.model.hidden_size
    num_local = moe.num_experts // groups.ep_size
    rows_each = case.num_tokens * moe.top_k // num_local
    sizes = {"up": (2 * moe.intermediate_size, hidden), "down": (hidden, moe.intermediate_size)}
    lines: list[Row] = []
    for name, (num_out, num_in) in sizes.items():
        grad, rows = (
            torch.randn(num_local * rows_each, n, device=device, dtype=torch.bfloat16)
            for n in (num_out, num_in)
        )
        counts = torch.full((num_local,), rows_each, device=device, dtype=torch.int32)
        ends, ours = counts.cumsum(0, dtype=torch.int32), grad.new_empty(num_local, num_out, num_in)
        runs: dict[str, Callable[[], object]] = {
            "fused": partial(
                weight_gemm, ours, grad, rows, expert_begin=ends - counts, expert_rows=counts,
                tile=KernelConfig().weight,
                num_programs=torch.cuda.get_device_properties(device).multi_processor_count,
            ),
            "torch": partial(torch._grouped_mm, grad.T, rows, offs=ends),  # pyright: ignore[reportPrivateImportUsage]
        }  # fmt: skip
        runs["fused"]()
        error = relative_error(ours, runs["torch"]())  # pyright: ignore[reportArgumentType]
        if error > RELATIVE_TOLERANCE[torch.bfloat16]:
            raise RuntimeError(f"gradients of {name} of {case.model.name} differ by {error:.1e}")
        timings = time_interleaved(
            {key: partial(_repeat, run) for key, run in runs.items()}, device=device
        )
        fastest_us = min(timing.median_us for timing in timings.values())
        lines += [
            {
                "part": name, "strategy": key, "median_us": timing.median_us / NUM_CALLS,
                "p10_us": timing.p10_us / NUM_CALLS, "p90_us": timing.p90_us / NUM_CALLS,
                "samples": len(timing.samples_us), "floor_us": fastest_us / NUM_CALLS,
                "max_rel_err": error,
            }
            for key, timing in timings.items()
        ]  # fmt: skip
    return lines


def _repeat(run: Callable[[], object]) -> None:
    """Call several times, so that the host gets ahead of the GPU as it does in backward."""
    for _ in range(NUM_CALLS):
        run()


if __name__ == "__main__":
    main()
