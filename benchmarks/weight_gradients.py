"""Gradients of weights: Halley's kernel against torch's, and what they hide in backward.

Part one times the two weight-gradient GEMMs of a layer by both, on a rank's rows, of which all
experts have as many. Part two times backward in turn with all launches one after another and with
those that move rows beside those that multiply, without and with the first weight gradient beside
the combine of the tokens' gradients. ``comm_us`` is the time of the launches that move rows, alone;
``hidden`` is the part of it that is gained. Between samples the GPU rests: one that has multiplied
for long is slowed down by its power limit, by more than there is to gain.

    torchrun --nproc-per-node 4 benchmarks/weight_gradients.py benchmarks/results
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from fused_parts import BACKWARD_PARTS, PARTS, kernel_times

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.distributed.world import join_world
from halley.fused.buffer_cache import Workspaces
from halley.ops.kernels.gemm_config import Knobs
from halley.ops.kernels.weight_gemm import weight_gemm
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import LayerCase, LayerTensors, make_tensors, outputs_of
from halley.tools.results import Row, machine_keys, write_rows
from halley.tools.timer import time_interleaved
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error


MODELS = ("mixtral-8x7b", "phi-3.5-moe", "qwen2-moe", "qwen3-30b-a3b", "deepseek-v3")
NUM_TOKENS = 8192
MOVES = ("stage", "fetch", "combine")
REST_S = 0.03
NUM_SAMPLES = 15
NUM_CALLS = 8


def main() -> None:
    folder, *commit = sys.argv[1:]
    with join_world("cuda") as world:
        groups = build_groups(0, device_type="cuda")
        machine = machine_keys(groups, device=world.device, commit=commit[0] if commit else None)
        rows: list[Row] = []
        for name in MODELS:
            case = LayerCase(model=find_model(name), num_tokens=NUM_TOKENS)
            found = [*compare(case, groups, world.device), *hide(case, groups, world.device)]
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
    """Return a line for each projection and implementation.

    Raises:
        RuntimeError: the two differ.
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
                tile=Knobs().weight,
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


def hide(case: LayerCase, groups: ParallelGroups, device: torch.device) -> list[Row]:
    """Return a line for backward without and with a weight gradient beside the wire."""
    tensors = make_tensors(case, groups, device=device)
    recorder = Recorder(device, enabled=False)
    owners = [
        Workspaces(groups.ep, device, knobs=Knobs().changed([f"weight.beside={beside}"]))
        for beside in (0, 1)
    ]
    unfused, fused, beside = (
        FusedStrategy(workspaces, recorder=recorder, fused=is_fused)
        for workspaces, is_fused in ((owners[0], False), (owners[0], True), (owners[1], True))
    )
    alone = kernel_times(partial(outputs_of, unfused, tensors), (*PARTS, *BACKWARD_PARTS))
    parts = [part for part in alone[len(PARTS) :] if part[0] not in ("all", "backward")]
    comm_us = sum(us for name, us in parts if name in MOVES)
    runs = {"unfused": unfused, "fused": fused, "beside": beside}
    variants: dict[str, Callable[[], None]] = {}
    for name, strategy in runs.items():
        variants[name] = partial(_backward, tensors.run(strategy), tensors)
        variants[f"rest after {name}"] = partial(time.sleep, REST_S)
    timings = time_interleaved(variants, device=device, group=groups.ep, num_samples=NUM_SAMPLES)
    unfused_us = timings["unfused"].median_us
    lines: list[Row] = []
    for index, name in enumerate(("fused", "beside")):
        timing = timings[name]
        gained_us = unfused_us - timing.median_us
        lines.append(
            {
                "part": "backward", "strategy": "fused", "weight_beside": index,
                "median_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us,
                "samples": len(timing.samples_us), "floor_us": unfused_us - comm_us,
                "unfused_us": unfused_us, "comm_us": comm_us,
                "exposed_comm_us": comm_us - gained_us, "hidden": round(gained_us / comm_us, 3),
                "parts": parts,
            }
        )  # fmt: skip
    for workspaces in owners:
        workspaces.close()
    return lines


def _backward(y_TD: torch.Tensor, tensors: LayerTensors) -> None:
    torch.autograd.grad(y_TD, tensors.leaves(), tensors.grad_TD, retain_graph=True)


def _repeat(run: Callable[[], object]) -> None:
    """Call so often that the host is ahead, as it is in backward."""
    for _ in range(NUM_CALLS):
        run()


if __name__ == "__main__":
    main()
