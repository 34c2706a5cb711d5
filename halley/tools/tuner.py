"""Find the knobs with which a fused layer is fastest on the machine at hand.

One knob after another, each with all its values beside the best so far in one run: a machine that
slows down slows all of them. What does not fit the device is not tried; what gives other values
does not win.

Source: COMET (arXiv:2502.19811), section 3.2, which measures division points by shape; here the
division adapts by itself, and what is measured is what bounds it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.fused.buffer_cache import Workspaces, default_knobs
from halley.fused.tuned import Tuned, TunedShape
from halley.ops.kernels.gemm_config import Knobs
from halley.ops.kernels.launch import OutOfResources, compile_only
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import (
    LayerCase,
    LayerTensors,
    make_tensors,
    outputs_of,
    reference_outputs,
)
from halley.tools.timer import time_interleaved
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error


Progress = Callable[[str, int, int], None]
Space = dict[str, tuple[str, ...]]


def _paired(tile: str) -> str:
    """Return the settings for two programs on a multiprocessor, of half a tile each."""
    fields = ("block_n=128", "num_warps=4", "num_stages=3", "per_sm=2")
    return " ".join(f"{tile}.{field}" for field in fields)


def _in_one_loop(tile: str) -> str:
    """Return the settings for two tiles in one loop; what is stored takes the room of a stage."""
    return f"{tile}.run=2 {tile}.num_stages=3"


# Values of a knob are settings, several where they only make sense together.
SPACE: Space = {
    "fetch_elements": tuple(f"fetch_elements={n}" for n in (1024, 4096)),
    "chunk_columns": ("chunk_columns=256", "chunk_columns=1024 combine_rows=4"),
    "combine_rows": ("combine_rows=4", "combine_rows=4 home_rows=4"),
    "combine_stages": ("combine_stages=5",),
    "combiners_beside": ("combiners_beside=2 combine_rows=4",),
    "combiners_after": ("combiners_after=0", "combiners_after=5"),
    "down": (_in_one_loop("down"), "down.group=16", _paired("down")),
    "up": (_in_one_loop("up"), "up.group=16"),
    "down_grad": ("down_grad.group=16", _paired("down_grad")),
    "weight": ("weight.beside=1",),
    "up_grad": (_in_one_loop("up_grad"), "up_grad.group=16", _paired("up_grad")),
}
_MIN_GAIN = 0.01  # what a change must gain, which is more than two runs of the same differ by
_SHARED_BYTES = 233472  # of a multiprocessor of compute capability 9.0
_RESERVED_BYTES = 1024  # of these, for each program; and a little that it uses itself
_REGISTERS = 65536


def tune_layer(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    space: Space,
    num_samples: int = 7,
    on_progress: Progress | None = None,
) -> Tuned:
    """Return the fastest knobs for a layer, forward and backward; a collective of its ranks.

    Args:
        case: the layer and its load.
        space: what to try, as ``SPACE``.
        num_samples: counted runs of each candidate.

    Raises:
        RuntimeError: the default knobs give wrong values.
    """
    what = f"{case.model.name} {case.num_tokens}"
    report = on_progress or (lambda text, done, total: None)
    report(f"checking the default knobs of {what}", 0, len(space))
    tensors = make_tensors(case, groups, device=device)
    base = default_knobs(device)
    want = [value.float() for value in reference_outputs(tensors, groups)]
    if not _is_right(base, want, tensors, groups):
        raise RuntimeError(f"the default knobs give wrong values for {case}")
    tried = [base.changed(value.split()) for values in space.values() for value in values]
    report(f"compiling for {what}", 0, len(space))
    _compile([knobs for knobs in tried if fits(knobs, tensors)], base, tensors, groups)
    best: tuple[str, ...] = ()
    sweeps: dict[str, dict[str, float]] = {}
    default_us = best_us = 0.0
    for index, (name, values) in enumerate(space.items()):
        candidates: dict[str, tuple[str, ...]] = {"": best}
        for value in values:
            settings = (*best, *value.split())
            knobs = base.changed(settings)
            if knobs == base.changed(best):  # by another name
                continue
            report(f"tuning {what}: checking {value.strip()}", index, len(space))
            if fits(knobs, tensors) and _is_right(knobs, want, tensors, groups):
                candidates[value] = settings
        report(f"tuning {what}: timing {name}", index, len(space))
        times_us = _time(candidates, base, tensors, groups, num_samples=num_samples)
        sweeps[name] = times_us
        default_us, best_us = default_us or times_us[""], times_us[""]
        fastest = min(times_us, key=lambda value: times_us[value])
        if times_us[fastest] < (1 - _MIN_GAIN) * times_us[""]:
            best, best_us = candidates[fastest], times_us[fastest]
    best_us = default_us
    if best:
        best, default_us, best_us = _confirm(best, base, tensors, groups, num_samples=num_samples)
    return Tuned(
        shape=tuned_shape(case),
        settings=tuple(base.changed(best).settings(base)),
        median_us=best_us,
        default_us=default_us,
        sweeps=sweeps,
    )


def _confirm(
    best: tuple[str, ...],
    base: Knobs,
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    num_samples: int,
) -> tuple[tuple[str, ...], float, float]:
    """Time defaults and best again in turn; return the faster, the defaults' time and its own."""
    times_us = _time({"": (), "best": best}, base, tensors, groups, num_samples=num_samples)
    default_us, best_us = times_us[""], times_us["best"]
    if best_us > (1 - _MIN_GAIN) * default_us:
        return (), default_us, default_us
    return best, default_us, best_us


def tuned_shape(case: LayerCase) -> TunedShape:
    """Return by what the knobs of a layer are found again."""
    moe = case.model.moe
    return TunedShape(
        hidden_size=case.model.hidden_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        dtype=str(case.dtype).removeprefix("torch."),
        num_tokens=case.num_tokens,
    )


def fits(knobs: Knobs, tensors: LayerTensors) -> bool:
    """Return whether a GPU has room for these knobs, by what their tiles keep there."""
    itemsize = tensors.x_TD.itemsize
    sums = knobs.combine_rows * knobs.chunk_columns * itemsize  # of a step
    for tile, combines in (
        (knobs.up, False), (knobs.down_grad, False), (knobs.down, True), (knobs.up_grad, True)
    ):  # fmt: skip
        steps = tile.num_stages * (knobs.block_m + tile.block_n) * tile.block_k * itemsize
        if tile.run > 1:  # a tile is stored while the loop goes on, from a buffer of its own
            steps += knobs.block_m * tile.block_n * itemsize
        programs = [steps] * tile.per_sm
        programs += [(knobs.combine_stages - 1) * sums] * knobs.combiners_beside * combines
        if max(programs) > _SHARED_BYTES - _RESERVED_BYTES:
            return False
        if sum(size + _RESERVED_BYTES for size in programs) > _SHARED_BYTES:
            return False
        if tile.per_sm * knobs.block_m * tile.block_n > _REGISTERS * 3 // 4:
            return False
    return knobs.chunk_columns % max(knobs.down.block_n, knobs.up_grad.block_n) == 0


def _strategy(knobs: Knobs, tensors: LayerTensors, groups: ParallelGroups) -> FusedStrategy:
    device = tensors.x_TD.device
    workspaces = Workspaces(groups.ep, device, tp_size=groups.tp_size, knobs=knobs)
    return FusedStrategy(workspaces, recorder=Recorder(device, enabled=False))


def _compile(
    candidates: list[Knobs], base: Knobs, tensors: LayerTensors, groups: ParallelGroups
) -> None:
    """Compile what layers with these knobs launch: each rank its share, many kernels at a time.

    Ranks find in the compiler's cache what others have compiled. What takes the knobs that win into
    account is compiled when it is tried.
    """
    if not tensors.x_TD.is_cuda:
        return
    strategy, layer = _strategy(base, tensors, groups), tensors.layer()
    strategy.prepare(*layer)
    with compile_only(groups.num_ranks):
        for knobs in candidates[groups.ep_rank :: groups.ep_size]:
            for workspace in strategy.workspaces.all():
                workspace.knobs = knobs
            strategy.compile(*layer, backward=True)
    strategy.workspaces.close()
    if groups.ep is not None:
        dist.barrier(groups.ep)


def _is_right(
    knobs: Knobs, want: list[torch.Tensor], tensors: LayerTensors, groups: ParallelGroups
) -> bool:
    """Return whether all ranks get right values with these knobs."""
    strategy = _strategy(knobs, tensors, groups)
    tolerance = RELATIVE_TOLERANCE[tensors.x_TD.dtype]
    try:
        got = outputs_of(strategy, tensors)
    except OutOfResources:  # by what a compiler takes beyond ``fits``: on all ranks alike
        wrong = True
    else:
        wrong = any(relative_error(a, b) > tolerance for a, b in zip(got, want, strict=True))
    told = torch.tensor(float(wrong), device=tensors.x_TD.device)
    if groups.ep is not None:
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=groups.ep)
    strategy.workspaces.close()
    return told.item() == 0.0


def _time(
    candidates: dict[str, tuple[str, ...]],
    base: Knobs,
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    num_samples: int,
) -> dict[str, float]:
    """Return the median of each candidate's forward and backward, in us, all in turn."""
    strategies = {
        name: _strategy(base.changed(settings), tensors, groups)
        for name, settings in candidates.items()
    }
    timings = time_interleaved(
        {name: partial(_run, strategy, tensors) for name, strategy in strategies.items()},
        device=tensors.x_TD.device,
        num_samples=num_samples,
        num_warmup=1,  # all is compiled since values were checked
        group=groups.ep,
    )
    for strategy in strategies.values():
        strategy.workspaces.close()
    if tensors.x_TD.is_cuda:
        torch.cuda.empty_cache()  # for the buffers of the next, which are no part of torch's pool
    return {name: timing.median_us for name, timing in timings.items()}


def _run(strategy: FusedStrategy, tensors: LayerTensors) -> None:
    outputs_of(strategy, tensors)
