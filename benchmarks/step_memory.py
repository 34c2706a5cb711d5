"""Compare the memory of a training step, measured on GPUs, with its estimate.

    python -m benchmarks.step_memory --model qwen3-30b-a3b --layers 4 --tokens 8192 --strategy fused

Run it in the root of the repository, on two GPUs. The model has its own width and a few layers. Its
experts are spread over all ranks. Prints one JSON line with gigabytes (1e9 bytes) of rank 0: at
rest between two steps, saved by forward, and the peak. The estimate is for bfloat16, once with a
balanced load and once with the load of the measured step. On CPUs, there are no measured figures.
"""

import json
import sys
from collections.abc import Mapping
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.model_bench.case import cut_model
from halley.cli.bench import DeviceOption, NprocOption
from halley.cli.checks import check_range, read_dtype
from halley.cli.main import main as run_command
from halley.cli.ranks import count_ranks, joined, launch_ranks
from halley.core.config import ModelConfig, OptimizerConfig
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups, pick_device
from halley.moe.dense import next_token_loss
from halley.moe.head_loss import needs_chunks
from halley.moe.memory_estimate import Parallelism, StepMemory, estimate_memory
from halley.moe.transformer import LossOutput, MoETransformer
from halley.strategies.registry import build_strategy
from halley.train.optim import ModelOptimizer


app = typer.Typer(name="benchmarks.step_memory", add_completion=False)

_MOST_SEQUENCE = 4096  # tokens of a sequence
_WARMUP = 3  # steps in which buffers grow and kernels are compiled


@app.command()
def step_memory(
    model: Annotated[str, typer.Option(help="Name of the model.")] = "qwen3-30b-a3b",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank.")] = 8192,
    strategy: Annotated[str, typer.Option(help="Strategy of all layers.")] = "fused",
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure the memory of a training step, and print it beside its estimate as a JSON line."""
    config = cut_model(model, num_layers=layers)
    seq_len = min(tokens, _MOST_SEQUENCE)
    check_range(tokens, 1, 2**24, option="tokens")
    if tokens % seq_len:
        raise ValueError(f"tokens ({tokens}) must be a multiple of {seq_len}")
    count_ranks(nproc, device=device)
    dtype = read_dtype("default", on_gpu=pick_device(device).type == "cuda")
    launch_ranks(nproc, device=device)
    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        recorder = Recorder(world.device, enabled=False)
        place = {"recorder": recorder, "device": world.device}
        runs = build_strategy(strategy, groups.ep, **place)
        built = MoETransformer(config, strategy=runs, groups=groups, dtype=dtype, **place)
        built.init_weights(seed=0)
        optimizer = ModelOptimizer(built, OptimizerConfig(), groups=groups)
        generator = torch.Generator().manual_seed(groups.rank)
        shape = (tokens // seq_len, seq_len + 1)
        text = torch.randint(config.vocab_size, shape, generator=generator).to(world.device)
        for _ in range(_WARMUP):
            measured, counts_ME = _step(built, optimizer, text=text)
        load = _load(counts_ME, groups)
        where = Parallelism(strategy=strategy, ep_size=groups.ep_size, num_ranks=groups.num_ranks)
        estimates = {
            "estimated": estimate_memory(config, where, num_tokens=tokens),
            "estimated_at_load": estimate_memory(config, where, num_tokens=tokens, load=load),
        }
        if world.is_first:
            row = _describe(config, tokens=tokens, strategy=strategy, load=load)
            row |= {"gpu": _gpu(world.device), "measured": measured}
            typer.echo(json.dumps(row | {name: _figures(e) for name, e in estimates.items()}))
    return 0


def _step(
    model: MoETransformer, optimizer: ModelOptimizer, *, text: torch.Tensor
) -> tuple[dict[str, float] | None, torch.Tensor]:
    """Run one step as the trainer does; return its memory (None on a CPU) and counts per expert."""
    tokens_BS, targets_BS = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    on_gpu = text.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    at_rest = torch.cuda.memory_allocated() if on_gpu else 0
    output = _forward(model, tokens_BS, targets_BS)
    after_forward = torch.cuda.memory_allocated() if on_gpu else 0
    optimizer.backward(output.loss + output.router_loss)
    optimizer.sync()
    optimizer.clip()
    optimizer.step(1e-4)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    figures = {"at_rest": at_rest, "saved": after_forward - at_rest, "peak": peak}
    return _gigabytes(figures) if on_gpu else None, output.counts_ME


def _forward(
    model: MoETransformer, tokens_BS: torch.Tensor, targets_BS: torch.Tensor
) -> LossOutput:
    config, itemsize = model.config, model.lm_head.weight.itemsize
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    if needs_chunks(tokens_BS.numel(), itemsize=itemsize, **sizes):
        return model.losses(tokens_BS, targets_BS)
    output = model(tokens_BS)
    loss = next_token_loss(output.logits_BSV, targets_BS)
    return LossOutput(loss, output.router_loss, output.counts_ME)


def _load(counts_ME: torch.Tensor, groups: ParallelGroups) -> float:
    """Return the rows of this rank's experts over the balanced number, the mean of all layers."""
    counts_ME = counts_ME.clone()
    if groups.ep is not None:
        dist.all_reduce(counts_ME, group=groups.ep)
    own_ME = counts_ME.chunk(groups.ep_size, dim=1)[groups.ep_rank]
    return groups.ep_size * float(own_ME.sum()) / float(counts_ME.sum())


def _describe(config: ModelConfig, *, tokens: int, strategy: str, load: float) -> dict[str, object]:
    sizes = {"model": config.name, "num_layers": config.num_layers, "num_tokens": tokens}
    return sizes | {"strategy": strategy, "load": round(load, 4)}


def _figures(estimate: StepMemory) -> dict[str, float]:
    figures = {"at_rest": estimate.at_rest, "saved": estimate.saved, "peak": estimate.peak}
    return _gigabytes(figures)


def _gigabytes(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(num_bytes / 1e9, 4) for name, num_bytes in figures.items()}


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main(argv: list[str] | None = None) -> int:
    """Run the command; arguments and exit code as for ``halley.cli.main``."""
    return run_command(argv, commands=app, module="benchmarks.step_memory")


if __name__ == "__main__":
    sys.exit(main())
