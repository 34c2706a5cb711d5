"""Compare loss curves of `fused` with `sequential`, and of two equal runs, on a wide model.

All runs train the same model from the same seed on the bytes of Python's standard library. The
losses of `fused` must equal those of `sequential` within 1e-2 at every step. Two runs of `fused`
must have equal losses bit for bit. Writes and prints one result line per run.

    torchrun --nproc-per-node 4 -m benchmarks.loss_curves benchmarks/results mixtral-8x7b 8 8192 200
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.model_bench.case import cut_model
from halley.core.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from halley.distributed.mesh import World, build_groups, join_world
from halley.tools.timer import Row, machine_keys, results_path
from halley.train.step import build_run, train_step


SEQ_LEN = 512
TOLERANCE = 1e-2
# A higher rate amplifies rounding differences: with 1e-5 the loss of Mixtral falls from 11 to 3
# nats in 30 steps, and then the strategies differ by 0.17.
LEARNING_RATE = 1e-6
RUNS = (("sequential", 0), ("fused", 0), ("fused", 1))


def main() -> None:
    folder, model, num_layers, num_tokens, num_steps, *rest = sys.argv[1:]
    device, *commit = rest or ["cuda"]
    seq_len = min(SEQ_LEN, int(num_tokens))
    config = RunConfig(
        model=cut_model(model, num_layers=int(num_layers)),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(
            num_steps=int(num_steps),
            batch_size=int(num_tokens) // seq_len,
            dtype="bfloat16",
            deterministic=True,
        ),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
    )
    with join_world(device) as world:
        curves = {run: train(config, run[0], world) for run in RUNS}
        machine = machine_keys(
            build_groups(0, device_type=world.device.type),
            device=world.device,
            commit=commit[0] if commit else None,
        )
        if world.is_first:
            write(config, curves, machine, Path(folder))


def train(config: RunConfig, strategy: str, world: World) -> tuple[list[float], float]:
    """Return the loss of each step, and the total time in seconds."""
    run = build_run(dataclasses.replace(config, strategy=strategy), world)
    begin = time.perf_counter()
    losses = [train_step(run, step).loss for step in range(config.train.num_steps)]
    seconds = time.perf_counter() - begin
    del run
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return losses, seconds


def write(
    config: RunConfig,
    curves: dict[tuple[str, int], tuple[list[float], float]],
    machine: Row,
    folder: Path,
) -> None:
    """Write one result line per run; they replace earlier lines of the same model.

    Raises:
        RuntimeError: the curves differ by more than the tolerance.
    """
    right, first, second = (losses for losses, _ in curves.values())
    farthest = max(abs(a - b) for a, b in zip(first, right, strict=True))
    lines: list[Row] = [
        {
            "case": "loss_curves", "model": config.model.name,
            "num_layers": config.model.num_layers,
            "num_tokens": config.train.batch_size * config.data.seq_len,
            "ep_size": machine["num_gpus"], "tp_size": 1, "skew": "routers", "dtype": "bfloat16",
            "strategy": strategy, "run": run, "direction": "step", "samples": len(losses),
            "learning_rate": LEARNING_RATE,
            "median_us": seconds / len(losses) * 1e6, "floor_us": None, "losses": losses,
            "max_difference": farthest, "bit_equal": first == second, **machine,
        }
        for (strategy, run), (losses, seconds) in curves.items()
    ]  # fmt: skip
    path = results_path(folder, lines[0])
    kept = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in kept if json.loads(line)["model"] != config.model.name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in [*kept, *map(json.dumps, lines)]))
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    if farthest > TOLERANCE or first != second:
        raise RuntimeError(
            f"curves must differ by at most {TOLERANCE} ({farthest}) "
            f"and not from run to run ({first == second})"
        )


if __name__ == "__main__":
    main()
