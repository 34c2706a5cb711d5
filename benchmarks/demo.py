"""Train a small MoE model by several strategies, and measure the exposed communication of each.

    python -m benchmarks.demo

On CPUs, two ranks exchange tokens over an emulated link (``emulated_link.py``). At its rate, the
all-to-alls of a step take as long as forward and backward: half of the time, as on slow links
between GPUs. On GPUs, the ranks use the real link and the fused layer, one rank for each GPU. All
variants train from the same weights on the same text, in alternation, one step each:

    sequential    all-to-all, experts, all-to-all, without overlap
    chunked       one chunk's all-to-all under the GEMMs of another
    wgrad         a torch.compile pass moves weight-gradient GEMMs under all-to-alls of backward
    lanes         two microbatches side by side, and weight-gradient GEMMs in the gaps
    fused         Halley's kernels (on GPUs)

The output folder gets ``results.jsonl``, a Chrome trace for each variant, and ``report.html``.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.emulated_link import Link, emulate_link
from halley.compiler import compile_function
from halley.core.config import (
    DataConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from halley.core.timeline import Recorder, Span, subtract, union, write_chrome_trace
from halley.cost.hardware import link_kind
from halley.distributed.launcher import launch
from halley.distributed.mesh import ParallelGroups, build_groups, is_launched, sync_gradients
from halley.lanes import compile_step
from halley.moe.dense import next_token_loss
from halley.moe.layer import grouped_experts
from halley.moe.router import SigmoidRouter
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy
from halley.tools.report import write_report
from halley.tools.timer import machine_keys, summarise, time_keys
from halley.tools.tracing import exposed_comm_us, gather_spans, trace_step
from halley.train.data import BatchLoader, open_corpus


NUM_MICROBATCHES = 2
NUM_BALANCING = 40  # batches from which the routers' selection biases are found
NUM_RATE_STEPS = 2
NUM_WARMUP = 4  # steps of each variant before the timed ones; lanes measure in the first three
CPU_VARIANTS = {
    "sequential": "sequential",
    "chunked": "chunked:4",
    "wgrad": "functional",
    "lanes": "functional",
}
GPU_VARIANTS = {"sequential": "sequential", "chunked": "chunked", "fused": "fused"}
CPU_MODEL = ModelConfig(
    name="demo", vocab_size=256, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32,
    moe=MoEConfig(
        num_experts=8, top_k=2, intermediate_size=1536,
        router=RouterConfig(kind="sigmoid", bias_update_rate=0.01),
    ),
)  # fmt: skip
GPU_MODEL = replace(
    CPU_MODEL, hidden_size=2048, num_heads=16, num_kv_heads=4, head_dim=128,
    moe=replace(CPU_MODEL.moe, num_experts=16, top_k=4, intermediate_size=4096),
)  # fmt: skip
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


@final
class Variant:
    """A model that is trained in one of the ways, on this rank."""

    def __init__(
        self, name: str, strategy: str, groups: ParallelGroups, *, model: ModelConfig, device: str
    ) -> None:
        recorder = Recorder(device, enabled=False)
        built = build_strategy(strategy, groups.ep, recorder=recorder, device=device)
        self.model = MoETransformer(
            model,
            strategy=built,
            groups=groups,
            recorder=recorder,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            device=device,
        )
        self.model.init_weights(seed=0)
        self._groups, self._experts = groups, grouped_experts(self.model)
        learning_rate = 1e-3 if device == "cpu" else 1e-4  # the model on GPUs is wider
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, fused=True)
        self._backward = self._build(name)

    def run_backward(self, batches: Batches) -> None:
        """Run forward and backward of a step; change no weight."""
        self._backward(batches)
        self._optimizer.zero_grad()

    def step(self, batches: Batches) -> torch.Tensor:
        """Train on the microbatches of a step; return the mean loss of this rank."""
        loss = self._backward(batches)
        dense: list[torch.Tensor] = []
        expert: list[torch.Tensor] = []
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            (expert if name in self._experts else dense).append(parameter.grad)
        sync_gradients(dense, expert, groups=self._groups)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _build(self, name: str) -> Callable[[Batches], torch.Tensor]:
        """Return the function that runs forward and backward of all microbatches."""

        def loss_of(output: Any, targets_BS: torch.Tensor) -> torch.Tensor:
            loss = next_token_loss(output.logits_BSV, targets_BS) + output.router_loss
            return loss / NUM_MICROBATCHES

        if name == "lanes":
            lanes = compile_step(
                lambda tokens, targets: loss_of(self.model(tokens), targets),
                NUM_MICROBATCHES,
                inner="eager",
            )
            return lambda batches: lanes(*map(torch.cat, zip(*batches, strict=True))).sum()
        forward: Any = self.model
        if name == "wgrad":
            forward = compile_function(self.model, passes="wgrad", inner="eager")

        def run(batches: Batches) -> torch.Tensor:
            losses: list[torch.Tensor] = []
            for tokens_BS, targets_BS in batches:
                losses.append(loss_of(forward(tokens_BS), targets_BS))
                losses[-1].backward()
            return torch.stack(losses).detach().sum()

        return run


def link_spans(link: Link, *, start_s: float, end_s: float) -> list[Span]:
    """Return spans of a step: computation, transfers and waits of this rank."""
    place: dict[str, Any] = {"rank": dist.get_rank()}

    def list_spans(name: str, stream: str, times: Sequence[tuple[float, float]]) -> list[Span]:
        return [
            Span(
                name=name,
                stream=stream,
                start_us=1e6 * (begin - start_s),
                duration_us=1e6 * (end - begin),
                **place,
            )
            for begin, end in times
        ]

    waits = list_spans("wait for the link", "exposed", link.waits)
    waits += list_spans("wait for the other rank", "other", link.peer_waits)
    busy = [
        Span(name="computation", stream="compute", start_us=start, duration_us=end - start, **place)
        for start, end in subtract([(0.0, 1e6 * (end_s - start_s))], union(waits))
    ]
    return [*busy, *list_spans("all-to-all", "comm", link.transfers), *waits]


@torch.no_grad()
def balance_routers(models: Sequence[MoETransformer], loader: BatchLoader, *, device: str) -> None:
    """Choose selection biases for which all experts get about as many tokens; same for all models.

    Routers that are not trained would send most tokens to few experts, and one rank would wait for
    the other. Collective.
    """
    first, *others = models
    routers = [each for each in first.modules() if isinstance(each, SigmoidRouter)]
    for number in range(NUM_BALANCING):
        counts_ME = first(loader.batch(number, 0)[0].to(device)).counts_ME
        dist.all_reduce(counts_ME)
        for router, counts_E in zip(routers, counts_ME, strict=True):
            router.update_bias(counts_E)
    for model in others:
        model.load_state_dict(first.state_dict())


def load(loader: BatchLoader, number: int, *, device: str) -> Batches:
    """Return the microbatches of a step."""
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for microbatch in range(NUM_MICROBATCHES):
        tokens_BS, targets_BS = loader.batch(number, microbatch)
        batches.append((tokens_BS.to(device), targets_BS.to(device)))
    return batches


def choose_rate(variant: Variant, batches: Batches, link: Link) -> float:
    """Return the MB/s at which all-to-alls take as long as forward and backward. Collective."""
    times_s: list[float] = []
    for _ in range(NUM_RATE_STEPS):
        dist.barrier()
        link.clear()
        times_s.append(-time.perf_counter())
        variant.run_backward(batches)
        times_s[-1] += time.perf_counter()
    mb_per_s = _slowest(link.num_bytes / median(times_s) / 1e6, device="cpu")
    return float(f"{mb_per_s:.2g}")


@dataclass(kw_only=True)
class Measured:
    """Measurements of a variant; times are those of the slowest rank, without the warm-up."""

    steps_us: list[float] = field(default_factory=list)
    exposed_us: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of all steps, nats per byte
    spans: list[Span] = field(default_factory=list)  # of one step, of all ranks


def train(
    variants: dict[str, Variant],
    loader: BatchLoader,
    link: Link | None,
    *,
    num_steps: int,
    device: str,
    progress: Progress,
) -> dict[str, Measured]:
    """Train all variants in alternation; return the measurements by name. Collective."""
    measured = {name: Measured() for name in variants}
    batches: Batches = []
    task = progress.add_task("", total=(NUM_WARMUP + num_steps) * len(variants))
    for number in range(NUM_WARMUP + num_steps):
        batches = load(loader, number, device=device)
        for name, variant in variants.items():
            progress.update(task, advance=1, description=name)
            dist.barrier()
            if link is not None:
                link.clear()
            start_s = time.perf_counter()
            loss = variant.step(batches)
            if device != "cpu":
                torch.cuda.synchronize()
            end_s = time.perf_counter()
            each = measured[name]
            if link is not None:
                each.spans = link_spans(link, start_s=start_s, end_s=end_s)
            dist.all_reduce(loss)
            each.losses.append(loss.item() / dist.get_world_size())
            if number >= NUM_WARMUP:
                each.steps_us.append(_slowest(1e6 * (end_s - start_s), device=device))
                if link is not None:
                    each.exposed_us.append(_slowest(exposed_comm_us(each.spans), device=device))
    for name, variant in variants.items():
        each = measured[name]
        if link is None:
            step = partial(variant.step, batches)
            each.spans = trace_step(step, rank=dist.get_rank(), device=device)
            each.exposed_us.append(_slowest(exposed_comm_us(each.spans), device=device))
        each.spans = gather_spans(each.spans)
    return measured


def _slowest(value: float, *, device: str) -> float:
    most = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def show(
    measured: dict[str, Measured],
    folder: Path,
    *,
    groups: ParallelGroups,
    model: ModelConfig,
    tokens: int,
    mb_per_s: float,
) -> None:
    """Print a table and one JSON line for each variant; write the results and the report.

    ``mb_per_s`` is the rate of the emulated link, or 0 for GPUs.
    """
    num_ranks, on_gpu = groups.num_ranks, not mb_per_s
    where = f"emulated link of {mb_per_s:g} MB/s" if mb_per_s else "real link"
    device = torch.device("cuda" if on_gpu else "cpu")
    machine = machine_keys(groups, device=device, commit=None)
    if not on_gpu:
        machine |= {"gpu": f"{num_ranks} ranks on CPU", "num_gpus": None}
    table = Table(title=f"A training step on {machine['gpu']}, {where}: medians, ms")
    table.add_column("variant")
    for column in ("step", "exposed communication", "speed", "loss, first to last"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    first_us = median(next(iter(measured.values())).steps_us)
    for name, each in measured.items():
        timing, exposed_us = summarise(each.steps_us), median(each.exposed_us)
        table.add_row(
            name,
            f"{timing.median_us / 1e3:.1f}",
            f"{exposed_us / 1e3:.1f}",
            f"{first_us / timing.median_us:.2f}x",
            f"{each.losses[0]:.3f} to {each.losses[-1]:.3f}",
        )
        rows.append(
            {
                "case": "demo", "model": model.name, "num_tokens": tokens, "ep_size": num_ranks,
                "strategy": (GPU_VARIANTS if on_gpu else CPU_VARIANTS)[name], "variant": name,
                "direction": "step", **time_keys(timing), "floor_us": None,
                "exposed_comm_us": exposed_us, "losses": each.losses,
                "num_microbatches": NUM_MICROBATCHES,
                "link": link_kind(device).lower() if on_gpu else "emulated",
                "link_gb_per_s": mb_per_s / 1e3 or None, **machine,
            }
        )  # fmt: skip
    Console().print(table)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results.jsonl").write_text(lines, encoding="ascii")
    for name, each in measured.items():
        write_chrome_trace(each.spans, folder / f"trace-{name}.json.gz")
    write_report(
        rows, {name: each.spans for name, each in measured.items()}, folder / "report.html"
    )
    sys.stdout.write(f"{lines}report: {folder}/report.html (open it in a browser)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    text = "rate of the emulated link; 0: all-to-alls take as long as computation"
    parser.add_argument("--mb-per-s", type=float, default=0.0, help=text)
    parser.add_argument("--steps", type=int, default=9, help="timed training steps")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    if args.steps < 1 or not 0 <= args.mb_per_s < float("inf"):
        parser.error("--steps must be at least 1, and --mb-per-s finite and at least 0")
    num_gpus = torch.cuda.device_count()
    if not is_launched():
        command = [sys.executable, "-m", "benchmarks.demo", *sys.argv[1:]]
        sys.exit(launch(command, num_processes=num_gpus or 2))
    device, link, model, seq_len = "cuda", None, GPU_MODEL, 1024
    if num_gpus:
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu)
    else:
        torch.set_num_threads(1)
        link = emulate_link()
        device, model, seq_len = "cpu", CPU_MODEL, 128
        dist.init_process_group(link.backend)
    groups = build_groups(0, device_type=device)
    train_config = TrainConfig(batch_size=4, num_microbatches=NUM_MICROBATCHES)
    config = RunConfig(model=model, train=train_config, data=DataConfig(seq_len=seq_len))
    corpus = open_corpus(config)
    loader = BatchLoader(corpus, train_config, rank=groups.rank, num_ranks=groups.num_ranks)
    variants = {
        name: Variant(name, strategy, groups, model=model, device=device)
        for name, strategy in (CPU_VARIANTS if link else GPU_VARIANTS).items()
    }
    models = [each.model for each in variants.values()]
    balance_routers(models, loader, device=device)
    mb_per_s = args.mb_per_s if link else 0.0
    if link:
        first = variants["sequential"]
        mb_per_s = mb_per_s or choose_rate(first, load(loader, 0, device=device), link)
        link.bytes_per_s = 1e6 * mb_per_s
    with Progress(disable=groups.rank > 0, transient=True) as progress:
        measured = train(
            variants, loader, link, num_steps=args.steps, device=device, progress=progress
        )
    if groups.rank == 0:
        tokens = NUM_MICROBATCHES * train_config.batch_size * config.data.seq_len
        place = {"groups": groups, "model": model}
        show(measured, args.output, tokens=tokens, mb_per_s=mb_per_s, **place)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
