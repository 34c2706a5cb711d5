"""Time training steps of models of transformers: experts by Halley, or by its own all-to-all.

One model with random weights serves both: each experts module holds both implementations, which
alternate, so that weights, tokens and routing are the same. A step is a forward and a backward
pass. Transformers shards the dense weights over the ranks (FSDP2). Mean losses and the norms of the
gradients must agree within the rounding of bfloat16.

    torchrun --nproc-per-node 4 benchmarks/transformers_step.py benchmarks/results \\
        qwen3-30b-a3b,mixtral-8x7b 16384 0

Tokens of a rank are sequences of at most 4096.

The last number is the number of layers; 0 means all layers of the model. A further argument
``cpu`` runs the ranks on CPUs.
"""

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import halley.integrations.transformers as halley_transformers
from halley.core.config import ModelConfig, RunConfig
from halley.core.models import find_model
from halley.distributed.mesh import World, build_groups, join_world
from halley.integrations.transformers import find_extension_point
from halley.tools.layer_case import RELATIVE_TOLERANCE
from halley.tools.timer import Row, machine_keys, time_interleaved, write_rows
from halley.train.hf_export import hf_config


NAMES = ("all_to_all", "halley")
STRATEGY = "fused"
SEQ_LEN = 4096
NUM_SAMPLES = 11


def main() -> None:
    folder, names, num_tokens, num_layers, *rest = sys.argv[1:]
    device, *commit = rest or ["cuda"]
    with join_world(device) as world:
        groups = build_groups(0, device_type=world.device.type)
        machine = machine_keys(groups, device=world.device, commit=commit[0] if commit else None)
        rows: list[Row] = []
        for name in names.split(","):
            model = find_model(name)
            model = dataclasses.replace(model, num_layers=int(num_layers) or model.num_layers)
            rows += [{**row, **machine} for row in measure(model, int(num_tokens), world)]
            if world.is_first:
                for row in rows[-len(NAMES) :]:
                    sys.stdout.write(json.dumps(row) + "\n")
                write_rows(rows, Path(folder))


def measure(config: ModelConfig, num_tokens: int, world: World) -> list[Row]:
    """Return a line for each implementation.

    Raises:
        RuntimeError: losses or gradients differ.
    """
    switch = Switch()
    begin = time.perf_counter()
    model = build(config, switch, world)
    if world.is_first:
        sys.stderr.write(f"{config.name}: made in {time.perf_counter() - begin:.0f} s\n")
    generator = torch.Generator().manual_seed(world.rank)
    seq_len = min(num_tokens, SEQ_LEN)
    shape = (num_tokens // seq_len, seq_len)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(step, model, switch, name, tokens.to(world.device)) for name in NAMES
    }
    found, peaks = {}, {}
    for name, run in runs.items():
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = run().float()
        dist.all_reduce(loss)
        found[name] = (float(loss) / world.num_ranks, float(gradient_norm(model)))
        if world.device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated() / 2**20
    compare(found)
    times = time_interleaved(
        {name: partial(_call, run) for name, run in runs.items()},
        device=world.device,
        num_samples=NUM_SAMPLES,
    )
    del model, runs
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return [
        {
            "case": "transformers_step", "model": config.name, "num_layers": config.num_layers,
            "num_tokens": num_tokens, "ep_size": world.num_ranks, "tp_size": 1,
            "skew": "routers", "dtype": "bfloat16", "strategy": name, "direction": "step",
            "median_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us,
            "samples": NUM_SAMPLES, "floor_us": None, "peak_mib": peaks.get(name),
            "loss": found[name][0], "gradient_norm": found[name][1],
            "experts": STRATEGY if name == "halley" else "grouped_mm",
            "transformers": find_extension_point().version,
        }
        for name, timing in times.items()
    ]  # fmt: skip


class Switch:
    """Says which of the two implementations runs experts."""

    def __init__(self) -> None:
        self.name = NAMES[0]

    def register(self) -> str:
        """Make transformers build both for each experts module; return the name to ask for."""
        halley_transformers.enable(strategy=STRATEGY, strict=True)
        interface = find_extension_point().parallel.EPImplementationInterface
        built = {name: interface()[name] for name in NAMES}

        def build(*args: Any) -> Callable[..., Any]:
            both = {name: implementation(*args) for name, implementation in built.items()}
            return lambda *tensors, **named: both[self.name](*tensors, **named)

        interface.register("either", build)
        return "either"


def build(config: ModelConfig, switch: Switch, world: World) -> Any:
    """Return the model, its experts spread over all ranks, with the same weights on all runs."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.manual_seed(0)
    fields: dict[str, Any] = hf_config(RunConfig(model=config))
    (architecture,) = fields["architectures"]
    place = DistributedConfig(
        fsdp_size=world.num_ranks, ep_size=world.num_ranks, ep_implementation=switch.register()
    )
    model = getattr(transformers, architecture).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(**fields),
        state_dict={},
        distributed_config=place,
        dtype=torch.bfloat16,
    )
    model.train()
    return model


def step(model: Any, switch: Switch, name: str, tokens: torch.Tensor) -> torch.Tensor:
    """Run forward and backward by one implementation; return the loss."""
    switch.name = name
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradient_norm(model: Any) -> torch.Tensor:
    """Return the norm of all gradients, each counted on the ranks that hold a part of it."""
    squares = torch.zeros((), device=next(model.parameters()).device)
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            squares += local.float().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def compare(found: dict[str, tuple[float, float]]) -> None:
    """Compare loss and norm of each implementation.

    Raises:
        RuntimeError: they differ.
    """
    tolerance = RELATIVE_TOLERANCE[torch.bfloat16]
    for value, other in zip(*(found[name] for name in NAMES), strict=True):
        if abs(value - other) > tolerance * value:
            raise RuntimeError(f"losses and norms of gradients differ: {found}")


def _call(run: Callable[[], Any]) -> None:
    run()


if __name__ == "__main__":
    main()
