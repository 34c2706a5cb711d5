"""Measure the two MoE layers of Megatron-Core's layer benchmark with Halley.

NVIDIA publishes forward and backward times of these layers on 8 H100 (``moe_perf`` in the tests of
Megatron-Core): 4096 tokens a rank, bfloat16, loads balanced by random logits. The times include the
router, with logits in float32, and here the shared expert of the second layer. With fewer than 8
ranks, the experts of a rank and the rows of a rank stay the same.

    python -m benchmarks.moe_perf --nproc 2 --output benchmarks/results
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
from rich.table import Table
from typer import Option, Typer

from halley.cli.bench import (
    CommitOption,
    DeviceOption,
    OutputOption,
    SamplesOption,
    check_output,
    print_rows,
)
from halley.cli.checks import check_known, check_samples, split_names
from halley.cli.main import main as run_command
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks
from halley.core.config import MoEConfig, RouterConfig
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import MoELayer, init_parameters
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.timer import (
    Row,
    machine_keys,
    time_interleaved,
    time_keys,
    to_float,
    write_rows,
)


_NUM_RANKS = 8  # of the published times
_NUM_TOKENS = 4096  # per rank
STRATEGIES = ("sequential", "fused")


@dataclass(frozen=True, kw_only=True)
class PublishedLayer:
    """A layer of Megatron-Core's benchmark and its published times on 8 H100."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int  # of 8 ranks
    top_k: int
    shared_size: int = 0  # intermediate size of the shared expert
    forward_ms: float
    backward_ms: float


# Source: NVIDIA, Megatron-LM, the baseline file of its benchmark ``moe_perf``.
LAYERS = (
    PublishedLayer(
        name="mixtral-8x7b", hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2,
        forward_ms=4.33, backward_ms=7.68,
    ),
    PublishedLayer(
        name="deepseek-v3-proxy", hidden_size=7168, intermediate_size=2048, num_experts=32, top_k=8,
        shared_size=2048, forward_ms=5.39, backward_ms=8.80,
    ),
    PublishedLayer(  # for tests
        name="tiny", hidden_size=32, intermediate_size=16, num_experts=16, top_k=4, shared_size=16,
        forward_ms=1.0, backward_ms=1.0,
    ),
)  # fmt: skip


def fit(layer: PublishedLayer, num_ranks: int) -> tuple[int, int, int]:
    """Return number of experts, top-k and tokens of a rank; experts and rows of a rank are kept.

    A token cannot have more experts than there are. If top-k is reduced, there are more tokens.
    """
    num_experts = layer.num_experts // _NUM_RANKS * num_ranks
    top_k = min(layer.top_k, num_experts)
    return num_experts, top_k, _NUM_TOKENS * layer.top_k // top_k


def _balance(logits_TE: torch.Tensor) -> torch.Tensor:
    """Return random values with the gradients of ``logits_TE``, as Megatron-Core does."""
    return logits_TE + (torch.randn_like(logits_TE) - logits_TE).detach()


class _Case:
    """One layer on this rank, with the same parameters for each strategy."""

    def __init__(
        self, layer: PublishedLayer, groups: ParallelGroups, device: torch.device, num_tokens: int
    ) -> None:
        num_experts, top_k, default_tokens = fit(layer, groups.num_ranks)
        config = MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=layer.intermediate_size,
            shared_intermediate_size=layer.shared_size,
            router=RouterConfig(balance_coefficient=0.0),
        )
        self.num_tokens, self.device, self.seed = num_tokens or default_tokens, device, 0
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        place = {"dtype": self.dtype, "device": device}
        where = {"recorder": Recorder(device, enabled=False), "device": device}
        self.strategies = {n: build_strategy(n, groups.ep, **where) for n in STRATEGIES}
        self.layer = MoELayer(
            config, layer.hidden_size, strategy=self.strategies[STRATEGIES[0]], groups=groups,
            **place,
        )  # fmt: skip
        init_parameters(self.layer, seed=0)
        router = self.layer.router
        choose = router.choose
        router.choose = lambda logits_TE: choose(_balance(logits_TE))
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        shape = (self.num_tokens, layer.hidden_size)
        self.x = torch.randn(shape, **place).requires_grad_()
        self.grad = torch.randn(shape, **place)
        # Each token goes through its experts, the shared expert and the router.
        columns = 3 * (top_k * layer.intermediate_size + layer.shared_size) + num_experts
        self.forward_flop = 2 * self.num_tokens * layer.hidden_size * columns

    def run(self, strategy: str, *, backward: bool) -> list[torch.Tensor]:
        """Run the layer; return its output and, with backward, the gradients."""
        self.layer.strategy = self.strategies[strategy]
        y = self.layer(self.x).y
        if not backward:
            return [y]
        parameters = list(self.layer.parameters())
        return [y.detach(), *torch.autograd.grad(y, [self.x, *parameters], self.grad)]

    def check(self) -> float:
        """Return the largest relative difference of output and gradients between strategies."""
        found: list[list[torch.Tensor]] = []
        for name in STRATEGIES:
            torch.manual_seed(1)  # the same random logits
            found.append(self.run(name, backward=True))
        return max(relative_error(b, a) for a, b in zip(*found, strict=True))


def measure(
    layers: Sequence[PublishedLayer],
    *,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    num_tokens: int,
    commit: str | None,
) -> list[Row]:
    """Measure each layer by each strategy; return result lines; a collective of all ranks.

    A ``RuntimeError`` means that strategies differ by more than the tolerance of the dtype.
    """
    rows: list[Row] = []
    common = machine_keys(groups, device=device, commit=commit) | {"case": "moe_perf"}
    for layer in layers:
        case = _Case(layer, groups, device, num_tokens)
        error = case.check()
        if error > RELATIVE_TOLERANCE[case.dtype]:
            raise RuntimeError(f"{layer.name}: strategies differ by {error:.2e}")
        runs: dict[str, Callable[[], object]] = {
            f"{name} {direction}": partial(case.run, name, backward=direction == "both")
            for name in STRATEGIES
            for direction in ("forward", "both")
        }
        times = time_interleaved(runs, device=device, num_samples=num_samples, group=groups.ep)
        for name in STRATEGIES:
            forward, both = times[f"{name} forward"], times[f"{name} both"]
            published_us = round(1e3 * (layer.forward_ms + layer.backward_ms), 1)
            row: Row = {
                "model": layer.name,
                "strategy": name,
                "num_tokens": case.num_tokens,
                "num_experts": case.layer.config.num_experts,
                "top_k": case.layer.config.top_k,
                "dtype": str(case.dtype).removeprefix("torch."),
                "direction": "forward_backward",
                **time_keys(both),
                "forward_us": round(forward.median_us, 1),
                "backward_us": round(both.median_us - forward.median_us, 1),
                "tflops": round(3 * case.forward_flop / both.median_us / 1e6, 1),
                "max_rel_err": error,
                "published_us": published_us,
                "over_published": round(both.median_us / published_us, 3),
            }
            rows.append(row | common)
        for strategy in case.strategies.values():
            strategy.release()
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def table(rows: list[Row]) -> Table:
    """Return the result lines as a table for people."""
    found = Table(title=f"{rows[0]['num_gpus']} x {rows[0]['gpu']}; published: 8 x H100")
    for name in ("layer", "strategy", "forward ms", "backward ms", "TFLOP/s", "over published"):
        found.add_column(name, justify="left" if name in ("layer", "strategy") else "right")
    for row in rows:
        times = [f"{to_float(row[key]) / 1e3:.2f}" for key in ("forward_us", "backward_us")]
        cells = [str(row[key]) for key in ("tflops", "over_published")]
        found.add_row(str(row["model"]), str(row["strategy"]), *times, *cells)
    return found


app = Typer(name="benchmarks.moe_perf", add_completion=False)


@app.command()
def moe_perf(
    models: Annotated[
        str, Option(help="Layers, comma-separated.")
    ] = "mixtral-8x7b,deepseek-v3-proxy",
    tokens: Annotated[int, Option(help="Tokens per rank; 0: as published.")] = 0,
    samples: SamplesOption = 21,
    output: OutputOption = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure the layers of Megatron-Core's benchmark; print a table and JSON lines."""
    known = {layer.name: layer for layer in LAYERS}
    names = split_names(models, option="models")
    check_known(names, list(known), option="models")
    check_samples(samples)
    if tokens < 0:
        raise ValueError(f"tokens ({tokens}) must be at least 0")
    where = {"device": device, "num_ranks": count_ranks(nproc, device=device)}
    check_output(output, case="moe_perf", has_chart=False, **where)
    launch_ranks(nproc, device=device)
    with joined(device) as (world, _):
        rows = measure(
            [known[name] for name in names],
            groups=build_groups(0, device_type=world.device.type),
            device=world.device,
            num_samples=samples,
            num_tokens=tokens,
            commit=commit,
        )
        if world.is_first:
            if output is not None:
                write_rows(rows, output)
            print_rows(table(rows), rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; arguments and exit code as for ``halley.cli.main``."""
    return run_command(argv, commands=app, module="benchmarks.moe_perf")


if __name__ == "__main__":
    sys.exit(main())
