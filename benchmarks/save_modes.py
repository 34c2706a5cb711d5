"""Compare memory and time of all ways to save activations of a fused layer for backward.

`told_mib` is the prediction of ``halley doctor --model``. `peak_mib` is the measured peak of
torch's allocator in forward and backward, without tokens, weights and shared buffers. The layer
of ``plain_layer.py`` runs for comparison.

    torchrun --nproc-per-node 4 -m benchmarks.save_modes benchmarks/results
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.plain_layer import MODELS, NUM_TOKENS, PlainStrategy
from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups, join_world
from halley.fused.buffers import Workspaces
from halley.tools.candidates import build_candidates, measure_link
from halley.tools.choice import choose_strategy
from halley.tools.layer_bench import bench_layer
from halley.tools.layer_case import LayerCase
from halley.tools.timer import Row, machine_keys, write_rows


SAVES = {"fused": "all", "fused:inputs": "inputs", "fused:recompute": "recompute"}


def main() -> None:
    folder, *commit = sys.argv[1:]
    with join_world("cuda") as world:
        groups = build_groups(0, device_type="cuda")
        machine = machine_keys(groups, device=world.device, commit=commit[0] if commit else None)
        link = measure_link(groups, device=world.device)
        rows: list[Row] = []
        for model in MODELS:
            for num_tokens in NUM_TOKENS:
                case = LayerCase(model=find_model(model), num_tokens=num_tokens)
                found = compare(case, groups, world.device, link_bytes_per_s=link)
                rows += [row | machine | {"case": "save_modes"} for row in found]
                if world.is_first:
                    for row in found:
                        sys.stdout.write(json.dumps(row) + "\n")
                        sys.stdout.flush()
                torch.cuda.empty_cache()
        if world.is_first:
            write_rows(rows, Path(folder))


def compare(
    case: LayerCase, groups: ParallelGroups, device: torch.device, *, link_bytes_per_s: float
) -> list[Row]:
    """Return the result lines of forward with backward, each with its predicted memory."""
    told = choose_strategy(case, groups=groups, device=device).memory
    recorder, workspaces = Recorder(device, enabled=False), Workspaces(groups.ep, device)
    candidates = build_candidates(
        case,
        list(SAVES),
        groups=groups,
        recorder=recorder,
        device=device,
        workspaces=workspaces,
    )
    found = bench_layer(
        case,
        candidates | {"plain": PlainStrategy()},
        groups=groups,
        recorder=recorder,
        device=device,
        link_bytes_per_s=link_bytes_per_s,
    )
    workspaces.close()
    rows = [row for row in found if row["direction"] == "forward_backward"]
    for row in rows:
        save = SAVES.get(str(row["strategy"]))
        row["told_mib"] = round(told[save].peak / 2**20, 1) if save else None
    return rows


if __name__ == "__main__":
    main()
