"""Find the fastest kernel configuration of a fused layer on this machine.

The tuner varies one group of settings after another. It times all values of a group in alternation
with the best configuration so far, so that a slowdown of the machine affects all of them. It skips
configurations that do not fit the GPU, and rejects those with wrong values.

Source: COMET (arXiv:2502.19811), section 3.2, which measures the division of SMs between GEMM and
communication for each shape. In Halley that division adapts at run time within measured limits.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.fused.buffer_cache import Workspaces
from halley.fused.config import KernelConfig, TunedConfig, TunedShape, default_config
from halley.ops.kernels.launch import OutOfResources, compile_only
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import (
    RELATIVE_TOLERANCE,
    LayerCase,
    LayerTensors,
    make_tensors,
    outputs_of,
    reference_outputs,
    relative_error,
)
from halley.tools.timer import time_interleaved


Progress = Callable[[str, int, int], None]
Space = dict[str, tuple[str, ...]]


def _paired(tile: str) -> str:
    """Return the settings for two CTAs per SM, each with half a tile."""
    fields = ("block_n=128", "num_warps=4", "num_stages=3", "per_sm=2")
    return " ".join(f"{tile}.{field}" for field in fields)


def _in_one_loop(tile: str) -> str:
    """Return the settings for two tiles per loop; their store buffer replaces a pipeline stage."""
    return f"{tile}.run=2 {tile}.num_stages=3"


# Values to try by group. A value is one setting, or several that only make sense together.
SPACE: Space = {
    "fetch_elements": tuple(f"fetch_elements={n}" for n in (1024, 4096)),
    "chunk_columns": ("chunk_columns=256", "chunk_columns=1024 combine_rows=4"),
    "combine_rows": ("combine_rows=4", "combine_rows=4 sum_rows=4"),
    "combine_stages": ("combine_stages=5",),
    "combiners_beside": ("combiners_beside=2 combine_rows=4",),
    "combiners_after": ("combiners_after=0", "combiners_after=5"),
    "down": (_in_one_loop("down"), "down.group=16", _paired("down")),
    "up": (_in_one_loop("up"), "up.group=16"),
    "down_grad": ("down_grad.group=16", _paired("down_grad")),
    "up_grad": (_in_one_loop("up_grad"), "up_grad.group=16", _paired("up_grad")),
}
_MIN_GAIN = 0.01  # larger than the difference between two runs of one configuration
_SHARED_BYTES = 233472  # shared memory per SM, compute capability 9.0
_RESERVED_BYTES = 1024  # of these, reserved for each CTA
_REGISTERS = 65536


def tune_layer(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    space: Space,
    num_samples: int = 7,
    on_progress: Progress | None = None,
) -> TunedConfig:
    """Return the fastest configuration of a layer, forward with backward; a collective.

    Args:
        case, groups, device: the layer, its ranks and the device of this rank.
        space: settings to try, in the form of ``SPACE``.
        num_samples, on_progress: timed runs of each configuration; called with a text and steps.

    Raises:
        RuntimeError: the default kernel configuration gives wrong values.
    """
    what = f"{case.model.name} {case.num_tokens}"
    report = on_progress or (lambda text, done, total: None)
    report(f"checking the default kernel configuration of {what}", 0, len(space))
    tensors = make_tensors(case, groups, device=device)
    base = default_config(device)
    want = [value.float() for value in reference_outputs(tensors, groups)]
    if not _is_right(base, want, tensors, groups):
        raise RuntimeError(f"the default kernel configuration gives wrong values for {case}")
    tried = [base.changed(value.split()) for values in space.values() for value in values]
    report(f"compiling for {what}", 0, len(space))
    _compile([config for config in tried if fits(config, tensors)], base, tensors, groups)
    best: tuple[str, ...] = ()
    sweeps: dict[str, dict[str, float]] = {}
    default_us = 0.0
    for index, (name, values) in enumerate(space.items()):
        candidates: dict[str, tuple[str, ...]] = {"": best}
        for value in values:
            settings = (*best, *value.split())
            config = base.changed(settings)
            if config == base.changed(best):  # it is the same configuration
                continue
            report(f"tuning {what}: checking {value.strip()}", index, len(space))
            if fits(config, tensors) and _is_right(config, want, tensors, groups):
                candidates[value] = settings
        report(f"tuning {what}: timing {name}", index, len(space))
        times_us = _time(candidates, base, tensors, groups, num_samples=num_samples)
        sweeps[name] = times_us
        default_us = default_us or times_us[""]
        fastest = min(times_us, key=lambda value: times_us[value])
        if times_us[fastest] < (1 - _MIN_GAIN) * times_us[""]:
            best = candidates[fastest]
    best_us = default_us
    if best:
        best, default_us, best_us = _confirm(best, base, tensors, groups, num_samples=num_samples)
    return TunedConfig(
        shape=tuned_shape(case),
        settings=tuple(base.changed(best).settings(base)),
        median_us=best_us,
        default_us=default_us,
        sweeps=sweeps,
    )


def _confirm(
    best: tuple[str, ...],
    base: KernelConfig,
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    num_samples: int,
) -> tuple[tuple[str, ...], float, float]:
    """Time the best settings and the defaults again; return the faster, and both times."""
    times_us = _time({"": (), "best": best}, base, tensors, groups, num_samples=num_samples)
    default_us, best_us = times_us[""], times_us["best"]
    if best_us > (1 - _MIN_GAIN) * default_us:
        return (), default_us, default_us
    return best, default_us, best_us


def tuned_shape(case: LayerCase) -> TunedShape:
    """Return the shape by which later runs find the configuration of a layer."""
    moe = case.model.moe
    return TunedShape(
        hidden_size=case.model.hidden_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        dtype=str(case.dtype).removeprefix("torch."),
        num_tokens=case.num_tokens,
    )


def fits(config: KernelConfig, tensors: LayerTensors) -> bool:
    """Return whether the tiles of a configuration fit the shared memory and registers of an SM."""
    itemsize = tensors.x_TD.itemsize
    sums = config.combine_rows * config.chunk_columns * itemsize  # of one step
    for tile, combines in (
        (config.up, False), (config.down_grad, False), (config.down, True), (config.up_grad, True)
    ):  # fmt: skip
        steps = tile.num_stages * (config.block_m + tile.block_n) * tile.block_k * itemsize
        if tile.run > 1:  # the store of a tile overlaps the next loop, so it needs a buffer
            steps += config.block_m * tile.block_n * itemsize
        programs = [steps] * tile.per_sm
        programs += [(config.combine_stages - 1) * sums] * config.combiners_beside * combines
        if max(programs) > _SHARED_BYTES - _RESERVED_BYTES:
            return False
        if sum(size + _RESERVED_BYTES for size in programs) > _SHARED_BYTES:
            return False
        if tile.per_sm * config.block_m * tile.block_n > _REGISTERS * 3 // 4:
            return False
    return config.chunk_columns % max(config.down.block_n, config.up_grad.block_n) == 0


def _strategy(config: KernelConfig, tensors: LayerTensors, groups: ParallelGroups) -> FusedStrategy:
    device = tensors.x_TD.device
    workspaces = Workspaces(groups.ep, device, tp_size=groups.tp_size, config=config)
    return FusedStrategy(workspaces, recorder=Recorder(device, enabled=False))


def _compile(
    candidates: list[KernelConfig],
    base: KernelConfig,
    tensors: LayerTensors,
    groups: ParallelGroups,
) -> None:
    """Compile the kernels of these configurations in parallel, each rank a share of them.

    Ranks find the kernels of other ranks in the compiler's cache. Kernels that depend on settings
    chosen later are compiled when they are tried.
    """
    if not tensors.x_TD.is_cuda:
        return
    strategy, layer = _strategy(base, tensors, groups), tensors.layer()
    strategy.prepare(*layer)
    with compile_only(groups.num_ranks):
        for config in candidates[groups.ep_rank :: groups.ep_size]:
            for workspace in strategy.workspaces.all():
                workspace.config = config
            strategy.compile(*layer, backward=True)
    strategy.workspaces.close()
    if groups.ep is not None:
        dist.barrier(groups.ep)


def _is_right(
    config: KernelConfig, want: list[torch.Tensor], tensors: LayerTensors, groups: ParallelGroups
) -> bool:
    """Return whether all ranks compute correct values with a configuration; a collective."""
    strategy = _strategy(config, tensors, groups)
    tolerance = RELATIVE_TOLERANCE[tensors.x_TD.dtype]
    try:
        got = outputs_of(strategy, tensors)
    except OutOfResources:  # the compiler needs more than ``fits`` computes; same on all ranks
        wrong = True
    else:
        wrong = any(relative_error(a, b) > tolerance for a, b in zip(got, want, strict=True))
    any_wrong = torch.tensor(float(wrong), device=tensors.x_TD.device)
    if groups.ep is not None:
        dist.all_reduce(any_wrong, op=dist.ReduceOp.MAX, group=groups.ep)
    strategy.workspaces.close()
    return any_wrong.item() == 0.0


def _time(
    candidates: dict[str, tuple[str, ...]],
    base: KernelConfig,
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    num_samples: int,
) -> dict[str, float]:
    """Return the median time of forward with backward of each candidate, in microseconds."""
    strategies = {
        name: _strategy(base.changed(settings), tensors, groups)
        for name, settings in candidates.items()
    }
    timings = time_interleaved(
        {name: partial(_run, strategy, tensors) for name, strategy in strategies.items()},
        device=tensors.x_TD.device,
        num_samples=num_samples,
        num_warmup=1,  # the check of values has compiled all kernels
        group=groups.ep,
    )
    for strategy in strategies.values():
        strategy.workspaces.close()
    if tensors.x_TD.is_cuda:
        torch.cuda.empty_cache()  # buffers of the next group do not come from torch's pool
    return {name: timing.median_us for name, timing in timings.items()}


def _run(strategy: FusedStrategy, tensors: LayerTensors) -> None:
    outputs_of(strategy, tensors)
