"""Find the fastest kernel configuration of a fused layer on this machine, for ``halley tune``.

The tuner varies one group of settings after another. It times all values of a group in alternation
with the best configuration so far, so that a slowdown of the machine affects all of them. It skips
configurations that do not fit the GPU, and rejects those with wrong values.

Source: COMET (arXiv:2502.19811), section 3.2, which measures for each shape how many SMs should run
the GEMM. In Halley, kernels divide the SMs at run time, within limits that the tuner measures.
"""

from functools import partial

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.fused.buffers import Workspaces
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
from halley.tools.timer import Progress, max_over_ranks, no_progress, time_interleaved


Space = dict[str, tuple[str, ...]]


# Settings for two GEMM CTAs per SM, each with tiles of half the default width.
_TWO_PER_SM = "{0}.block_n=128 {0}.num_warps=4 {0}.num_stages=3 {0}.per_sm=2"
# Two tiles per loop: a store overlaps the next tile. Its buffer takes the memory of one stage.
_TWO_PER_LOOP = "{0}.run=2 {0}.num_stages=3"
# Values to try, by group of settings. A value is one setting, or several to set together.
SPACE: Space = {
    "fetch_elements": ("fetch_elements=1024", "fetch_elements=4096"),
    "chunk_columns": ("chunk_columns=256", "chunk_columns=1024 combine_rows=4"),
    "combine_rows": ("combine_rows=4", "combine_rows=4 sum_rows=4"),
    "combine_stages": ("combine_stages=5",),
    "combiners_beside": ("combiners_beside=2 combine_rows=4",),
    "combiners_after": ("combiners_after=0", "combiners_after=5"),
    "down": (_TWO_PER_LOOP.format("down"), "down.group=16", _TWO_PER_SM.format("down")),
    "up": (_TWO_PER_LOOP.format("up"), "up.group=16"),
    "down_grad": ("down_grad.group=16", _TWO_PER_SM.format("down_grad")),
    "up_grad": (_TWO_PER_LOOP.format("up_grad"), "up_grad.group=16", _TWO_PER_SM.format("up_grad")),
}
_MIN_GAIN = 0.01  # relative; larger than the difference between two runs of one configuration
_SHARED_BYTES = 233472  # shared memory of an SM of compute capability 9.0
_RESERVED_BYTES = 1024  # shared memory of the SM that CUDA reserves for each CTA
_REGISTERS = 65536  # 32-bit registers of an SM


def tune_layer(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    space: Space,
    num_samples: int = 7,
    on_progress: Progress = no_progress,
) -> TunedConfig:
    """Return a fast kernel configuration, found by timing forward plus backward. Collective.

    ``space`` has the form of ``SPACE``; each setting is timed ``num_samples`` times. A
    ``RuntimeError`` means that the default kernel configuration gives wrong values.
    """
    layer = f"{case.model.name} {case.num_tokens}"
    on_progress(f"checking the default kernel configuration of {layer}", 0, len(space))
    tensors = make_tensors(case, groups, device=device)
    base = default_config(device)
    expected = [value.float() for value in reference_outputs(tensors)]
    if not _is_correct(base, expected, tensors):
        raise RuntimeError(f"the default kernel configuration gives wrong values for {case}")
    tried = [base.changed(value.split()) for values in space.values() for value in values]
    on_progress(f"compiling for {layer}", 0, len(space))
    _compile([config for config in tried if fits(config, tensors)], base, tensors)
    time = partial(_time, base=base, tensors=tensors, num_samples=num_samples)
    best: tuple[str, ...] = ()
    sweeps: dict[str, dict[str, float]] = {}
    default_us = best_us = 0.0
    for index, (name, values) in enumerate(space.items()):
        candidates: dict[str, tuple[str, ...]] = {"": best}
        for value in values:
            settings = (*best, *value.split())
            config = base.changed(settings)
            if config == base.changed(best):
                continue
            on_progress(f"tuning {layer}: checking {value.strip()}", index, len(space))
            if fits(config, tensors) and _is_correct(config, expected, tensors):
                candidates[value] = settings
        on_progress(f"tuning {layer}: timing {name}", index, len(space))
        times_us = sweeps[name] = time(candidates)
        default_us = best_us = default_us or times_us[""]
        fastest = min(times_us, key=lambda value: times_us[value])
        if times_us[fastest] < (1 - _MIN_GAIN) * times_us[""]:
            best = candidates[fastest]
    if best:
        # The groups were timed at different moments, so the best and the default configuration are
        # timed again, in alternation.
        times_us = time({"": (), "best": best})
        default_us, best_us = times_us[""], times_us["best"]
        if best_us > (1 - _MIN_GAIN) * default_us:
            best, best_us = (), default_us
    moe = case.model.moe
    return TunedConfig(
        shape=TunedShape(
            hidden_size=case.model.hidden_size, num_experts=moe.num_experts, top_k=moe.top_k,
            dtype=str(case.dtype).removeprefix("torch."), num_tokens=case.num_tokens,
        ),
        settings=tuple(base.changed(best).settings(base)), median_us=best_us,
        default_us=default_us, sweeps=sweeps,
    )  # fmt: skip


def fits(config: KernelConfig, tensors: LayerTensors) -> bool:
    """Return whether CTAs fit an SM (registers, shared memory), and tiles divide column chunks."""
    itemsize = tensors.x_TD.itemsize
    step_bytes = config.combine_rows * config.chunk_columns * itemsize  # one load of a combine CTA
    for tile, combines in (
        (config.up, False), (config.down_grad, False), (config.down, True), (config.up_grad, True)
    ):  # fmt: skip
        gemm_bytes = tile.num_stages * (config.block_m + tile.block_n) * tile.block_k * itemsize
        if tile.run > 1:  # the store of a tile overlaps the next tile, so it needs a buffer
            gemm_bytes += config.block_m * tile.block_n * itemsize
        # Shared memory, in bytes, of each CTA on an SM: first CTAs of the GEMM, then combine CTAs.
        ctas = [gemm_bytes] * tile.per_sm
        ctas += [(config.combine_stages - 1) * step_bytes] * config.combiners_beside * combines
        if sum(num_bytes + _RESERVED_BYTES for num_bytes in ctas) > _SHARED_BYTES:
            return False
        # Float32 accumulators of GEMM CTAs may take 3/4 of an SM's registers; the rest needs 1/4.
        if tile.per_sm * config.block_m * tile.block_n > _REGISTERS * 3 // 4:
            return False
    return config.chunk_columns % max(config.down.block_n, config.up_grad.block_n) == 0


def _strategy(config: KernelConfig, tensors: LayerTensors) -> FusedStrategy:
    groups, device = tensors.groups, tensors.x_TD.device
    workspaces = Workspaces(groups.ep, device, tp_size=groups.tp_size, config=config)
    return FusedStrategy(workspaces, recorder=Recorder(device, enabled=False))


def _compile(candidates: list[KernelConfig], base: KernelConfig, tensors: LayerTensors) -> None:
    """On GPUs, compile the candidates' kernels into Triton's cache, divided over ranks. Collective.

    A configuration that also has the best settings of earlier groups is compiled when it is tried.
    """
    if not tensors.x_TD.is_cuda:
        return
    strategy, layer, groups = _strategy(base, tensors), tensors.layer(), tensors.groups
    strategy.prepare(*layer)
    with compile_only(groups.num_ranks):
        for config in candidates[groups.ep_rank :: groups.ep_size]:
            for workspace in strategy.workspaces.all():
                workspace.config = config
            strategy.compile(*layer, backward=True)
    strategy.workspaces.close()
    if groups.ep is not None:
        dist.barrier(groups.ep)


def _is_correct(config: KernelConfig, expected: list[torch.Tensor], tensors: LayerTensors) -> bool:
    """Return whether a configuration fits an SM and is correct on all ranks; a collective."""
    strategy, device = _strategy(config, tensors), tensors.x_TD.device
    tolerance = RELATIVE_TOLERANCE[tensors.x_TD.dtype]
    try:
        pairs = zip(outputs_of(strategy, tensors), expected, strict=True)
        is_wrong = any(relative_error(value, reference) > tolerance for value, reference in pairs)
    except OutOfResources:  # on all ranks, a kernel needs more than ``fits`` computes
        is_wrong = True
    (is_wrong,) = max_over_ranks([is_wrong], device=device, group=tensors.groups.ep)
    strategy.workspaces.close()
    return not is_wrong


def _time(
    candidates: dict[str, tuple[str, ...]],
    *,
    base: KernelConfig,
    tensors: LayerTensors,
    num_samples: int,
) -> dict[str, float]:
    """Return each candidate's median microseconds of forward plus backward. Collective."""
    strategies = {n: _strategy(base.changed(s), tensors) for n, s in candidates.items()}
    runs = {name: partial(outputs_of, each, tensors) for name, each in strategies.items()}
    where = {"device": tensors.x_TD.device, "group": tensors.groups.ep}
    # One warm-up run is enough: ``_is_correct`` has compiled all kernels.
    timings = time_interleaved(runs, num_samples=num_samples, num_warmup=1, **where)
    for strategy in strategies.values():
        strategy.workspaces.close()
    torch.cuda.empty_cache()  # symmetric memory cannot use memory that torch caches
    return {name: timing.median_us for name, timing in timings.items()}
