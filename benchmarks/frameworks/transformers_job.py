"""Measure all variants of a model of Transformers in one job; see ``benchmarks.frameworks``.

Each experts module of the model holds both implementations, and a switch says which one runs. So
all variants have the same weights, tokens and routing, and their timed steps alternate.
"""

import gc
import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import halley.integrations.transformers as halley_transformers
from benchmarks.frameworks.job import (
    CHECKED_STEP,
    EMBEDDING_STD,
    LEARNING_RATE,
    Job,
    Measured,
    Variant,
    expert_gradient_norm,
    run_job,
)
from benchmarks.gpu_memory import unused_pool_bytes, used_mib
from halley.core.config import RunConfig
from halley.fused.bounded import BoundedStep, CapturedStep
from halley.integrations.transformers import find_extension_point
from halley.tools.timer import max_over_ranks, time_interleaved
from halley.train.hf_export import hf_config


Step = Callable[[torch.Tensor], torch.Tensor]


class Switch:
    """The name of the implementation that runs experts."""

    name = "all_to_all"

    def register(self, job: Job) -> str:
        """Make Transformers build both for each experts module; return the name to ask for."""
        max_load = max(variant.max_load for variant in job.variants.values())
        halley_transformers.enable(strategy=job.strategy, strict=True, max_load=max_load)
        interface = find_extension_point().parallel.EPImplementationInterface
        built = {name: interface()[name] for name in ("all_to_all", "halley")}

        def build(*args: Any) -> Callable[..., Any]:
            both = {name: implementation(*args) for name, implementation in built.items()}
            return lambda *tensors, **named: both[self.name](*tensors, **named)

        interface.register("either", build)
        return "either"


def build_model(job: Job, switch: Switch) -> Any:
    """Return the model with random bfloat16 weights: FSDP2, experts over all ranks."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.manual_seed(0)
    fields: dict[str, Any] = hf_config(RunConfig(model=job.config()))
    (architecture,) = fields["architectures"]
    num_ranks = dist.get_world_size()
    model = getattr(transformers, architecture).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(**fields),
        state_dict={},
        distributed_config=DistributedConfig(
            fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=switch.register(job)
        ),
        dtype=torch.bfloat16,
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=EMBEDDING_STD)
    model.train()
    return model


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return fused AdamW, as Transformers' trainer; a group of parameters has one mesh."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    parameter_groups = [{"params": group} for group in groups.values()]
    return torch.optim.AdamW(parameter_groups, LEARNING_RATE, fused=True)


def make_step(variant: Variant, model: Any, compiled: Any, switch: Switch) -> Step:
    """Return forward and backward of a variant: a function of token ids that returns the loss."""
    run = compiled if variant.compiled else model

    def step(ids: torch.Tensor) -> torch.Tensor:
        switch.name = variant.experts
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    if not variant.cuda_graphs:
        return step
    captured = CapturedStep(step, model=model) if torch.cuda.is_available() else step
    return BoundedStep(captured, step, model=model)


def measure(job: Job) -> dict[str, Measured]:
    """Train with each variant from the same weights, then time their steps in alternation."""
    device = torch.device("cpu" if job.on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not job.on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if job.on_cpu else "nccl")
    switch = Switch()
    model = build_model(job, switch)
    # Each layer has its own functions for experts, and here two of each.
    torch._dynamo.config.recompile_limit = 4 * job.num_layers + 8
    compiled = torch.compile(model, backend="aot_eager" if job.on_cpu else "inductor")
    local = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    saved = [each.to("cpu", copy=True) for each in local]
    model_bytes = 0 if job.on_cpu else torch.cuda.memory_allocated()
    found = dict[str, tuple[list[float], float, float]]()
    steps = {
        name: make_step(variant, model, compiled, switch) for name, variant in job.variants.items()
    }
    for name, step in steps.items():
        for each, value in zip(local, saved, strict=True):
            each.copy_(value)
        found[name] = train(job, model, step, device, model_bytes)
    used = None
    if len(steps) == 1 and not job.on_cpu:
        (used,) = max_over_ranks([used_mib(device)], device=device, group=dist.group.WORLD)
    optimizer = make_optimizer(model.parameters())
    ids = job.tokens(dist.get_rank(), CHECKED_STEP)[:, :-1].to(device)
    runs = {name: partial(timed_step, step, ids, optimizer) for name, step in steps.items()}
    times = time_interleaved(runs, device=device, num_samples=job.num_samples, num_warmup=2)
    halley = ", ".join(set(halley_transformers.describe(model).values()))

    def describe(step: Step) -> str:
        repeated = f", {step.num_repeated} repeated" if isinstance(step, BoundedStep) else ""
        return halley + repeated

    return {
        name: Measured(
            samples_us=list(times[name].samples_us),
            losses=losses,
            gradient_norm=norm,
            peak_mib=peak_mib or None,
            used_mib=used,
            ran=describe(steps[name]) if job.variants[name].experts == "halley" else "",
        )
        for name, (losses, norm, peak_mib) in found.items()
    }


def train(
    job: Job, model: Any, forward_backward: Step, device: torch.device, model_bytes: int
) -> tuple[list[float], float, float]:
    """Return losses of the first steps, and of the last of them the experts' gradient norm and MiB.

    CUDA graphs replay the last step. Its memory is the peak of the rank with the largest one,
    without what earlier variants hold. Before it, unused memory is freed.
    """
    assert CHECKED_STEP > 2  # the second step captures, and has two kinds of memory
    earlier_bytes = peak_bytes = 0
    if not job.on_cpu:
        torch._C._cuda_clearCublasWorkspaces()
        earlier_bytes = torch.cuda.memory_allocated() + unused_pool_bytes(device) - model_bytes
    optimizer = make_optimizer(model.parameters())
    losses, norm = list[torch.Tensor](), 0.0
    for step in range(CHECKED_STEP):
        ids = job.tokens(dist.get_rank(), step)[:, :-1].to(device)
        if step + 1 == CHECKED_STEP and not job.on_cpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses.append(forward_backward(ids).to(torch.float32, copy=True))
        if step + 1 == CHECKED_STEP:
            norm = expert_gradient_norm(model, ".experts.")
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses)
    dist.all_reduce(total)
    if not job.on_cpu:
        own_bytes = torch.cuda.max_memory_allocated() + unused_pool_bytes(device)
        peak_bytes = own_bytes - earlier_bytes
    (peak_mib,) = max_over_ranks([peak_bytes / 2**20], device=device, group=dist.group.WORLD)
    return (total / dist.get_world_size()).tolist(), norm, peak_mib


def timed_step(forward_backward: Step, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Run forward, backward and optimizer."""
    forward_backward(ids)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    run_job(measure, metadata.version("transformers"))
