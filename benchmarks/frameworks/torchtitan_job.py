"""Run one variant of torchtitan's trainer; see ``benchmarks.frameworks``."""

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from benchmarks.frameworks.job import Job, Measured, run_job


# Modules that torchtitan imports for data sets and TensorBoard, with the names that it takes.
_UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}


def add_stand_ins() -> None:
    """Stand in for packages and names that torchtitan imports and a benchmark does not use.

    torch 2.11 lacks names that torchtitan needs for its other values of ``spmd_backend``, and a
    test for a kind of tracing that nothing here does. It sets no time limits of groups.
    """
    missing = {package for package in ("datasets", "tensorboard") if find_spec(package) is None}
    for name, attributes in _UNUSED.items():
        if missing & set(name.split(".")):
            module = module_from_spec(ModuleSpec(name, loader=None))
            vars(module).update(dict.fromkeys(attributes, object))
            sys.modules[name] = module
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        vars(torch.distributed.fsdp)["DataParallelMeshDims"] = object
    if not hasattr(dist, "set_timeout"):
        vars(dist)["set_timeout"] = lambda timeout, group: None
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        vars(torch.compiler)["_is_non_strict_tracing"] = lambda: False


def run_on_cpu() -> None:
    """Make torchtitan, whose trainer needs a GPU, run on CPU ranks with gloo."""
    import torchtitan.trainer  # and with it the modules that the loop changes
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module)["device_type"] = "cpu"
        if name.startswith("torchtitan.") and hasattr(module, "device_module"):
            vars(module)["device_module"] = torch.cpu
    zeros = dict.fromkeys(metrics.DeviceMemStats._fields, 0.0)
    monitor = SimpleNamespace(
        device_name="cpu",
        get_peak_stats=lambda: metrics.DeviceMemStats(**zeros),
        reset_peak_stats=lambda: None,
    )
    vars(metrics)["build_device_memory_monitor"] = lambda: monitor
    vars(dist)["all_to_all"] = all_to_all_with_gloo
    vars(utils)["set_pg_timeouts"] = lambda **_: None  # its barrier needs the index of a GPU
    assert torchtitan.trainer


def all_to_all_with_gloo(outputs: list[Any], inputs: list[Any], group: Any = None) -> None:
    """Replace gloo's all-to-all, which needs equal numbers of rows."""
    send, receive = ([part.shape[0] for part in parts] for parts in (inputs, outputs))
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), receive, send, group=group)
    for output, part in zip(outputs, received.split(receive), strict=True):
        output.copy_(part)


def measure(job: Job) -> dict[str, Measured]:
    """Train with the variant of the job; return what the trainer logged."""
    add_stand_ins()
    if job.on_cpu:
        run_on_cpu()
    from torchtitan.tools.logging import init_logger

    from benchmarks.frameworks.torchtitan_setup import make_trainer
    from halley.integrations.torchtitan import describe

    init_logger()
    ((name, variant),) = job.variants.items()
    trainer = make_trainer(job, variant)
    trainer.train()
    ran = ", ".join(set(describe(trainer.model_parts[0]).values()))
    measured = trainer.metrics_processor.measured(ran)
    trainer.close()
    return {name: measured}


if __name__ == "__main__":
    run_job(measure, metadata.version("torchtitan"))
