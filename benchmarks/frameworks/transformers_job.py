"""Measure all variants of a model of Transformers in one job; see ``benchmarks.frameworks``.

Each experts module of the model holds both implementations, and a switch says which one runs. So
all variants have the same weights, tokens and routing, and their timed steps alternate.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import halley.integrations.transformers as halley_transformers
from benchmarks.frameworks.job import CHECKED_STEP, Job, Measured, expert_gradient_norm, run_job
from halley.core.config import RunConfig
from halley.integrations.transformers import find_extension_point
from halley.tools.timer import max_over_ranks, time_interleaved
from halley.train.hf_export import hf_config


class Switch:
    """The name of the implementation that runs experts."""

    name = "all_to_all"

    def register(self, strategy: str) -> str:
        """Make Transformers build both for each experts module; return the name to ask for."""
        halley_transformers.enable(strategy=strategy, strict=True)
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
            fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=switch.register(job.strategy)
        ),
        dtype=torch.bfloat16,
    )
    model.train()
    return model


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW; a group of parameters has one mesh, because its operators take one."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=3e-4)


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
    found, steps = dict[str, tuple[list[float], float, float]](), dict[str, Callable[[], Any]]()
    for name, variant in job.variants.items():
        for each, value in zip(local, saved, strict=True):
            each.copy_(value)
        switch.name = variant.experts
        found[name] = train(job, model, compiled if variant.compiled else model, device)
    optimizer = make_optimizer(model.parameters())
    ids = job.tokens(dist.get_rank(), CHECKED_STEP)[:, :-1].to(device)
    for name, variant in job.variants.items():
        run = compiled if variant.compiled else model
        steps[name] = partial(timed_step, switch, variant.experts, run, ids, optimizer)
    times = time_interleaved(steps, device=device, num_samples=job.num_samples, num_warmup=2)
    halley = ", ".join(set(halley_transformers.describe(model).values()))
    return {
        name: Measured(
            samples_us=list(times[name].samples_us),
            losses=losses,
            gradient_norm=norm,
            peak_mib=max_over_ranks([peak_mib], device=device, group=dist.group.WORLD)[0] or None,
            ran=halley if job.variants[name].experts == "halley" else "",
        )
        for name, (losses, norm, peak_mib) in found.items()
    }


def train(job: Job, model: Any, run: Any, device: torch.device) -> tuple[list[float], float, float]:
    """Return losses of the first steps, the experts' first gradient norm and the peak memory."""
    optimizer = make_optimizer(model.parameters())
    losses, norm = list[torch.Tensor](), 0.0
    if not job.on_cpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(CHECKED_STEP):
        ids = job.tokens(dist.get_rank(), step)[:, :-1].to(device)
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 0:
            norm = expert_gradient_norm(model, ".experts.")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    total = torch.stack(losses)
    dist.all_reduce(total)
    peak_mib = 0.0 if job.on_cpu else torch.cuda.max_memory_allocated() / 2**20
    return (total / dist.get_world_size()).tolist(), norm, peak_mib


def timed_step(
    switch: Switch, experts: str, run: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Run forward, backward and optimizer with one implementation of experts."""
    switch.name = experts
    run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    run_job(measure, metadata.version("transformers"))
