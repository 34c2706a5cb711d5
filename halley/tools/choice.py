"""Find the strategy that "auto" chooses for one layer, and the memory that ``fused`` needs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist

from halley.core.routing import local_experts
from halley.core.timeline import Recorder
from halley.core.types import LayerShape, Save
from halley.distributed.mesh import ParallelGroups
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.symm_mem.access import peer_access
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of
from halley.tools.timer import Progress


if TYPE_CHECKING:
    from halley.fused.buffers import Workspace


_RUNS = 4  # runs of each candidate by AutoStrategy: one that compiles, three that are timed


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, without tokens, weights and shared buffers.

    Attributes:
        saved: activations that forward saves for backward.
        peak: most bytes at one time of forward and backward, with the output and all gradients.
    """

    saved: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The choice of strategy "auto" for the forward pass of one layer.

    Attributes:
        model, num_tokens, num_ranks, dtype: the layer; tokens per rank.
        strategy: the chosen strategy.
        times_us: time of each candidate on the slowest rank; empty if nothing was measured.
        reason: why auto chose this strategy, and why other strategies are no candidates.
        access_problem: why the ranks cannot address each other's memory; "" if they can.
        buffers: the result of ``measure_buffers`` on this rank; None if fused did not run.
        no_buffers: why the fused kernels did not run; "" if they did.
        memory: memory of forward and backward with fused on the rank that needs most, without the
            buffers, for each value of ``save``.
    """

    model: str
    num_tokens: int
    num_ranks: int
    dtype: str
    strategy: str
    times_us: dict[str, float]
    reason: str
    access_problem: str
    buffers: dict[str, float] | None
    no_buffers: str
    memory: dict[str, LayerMemory]


def choose_strategy(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    on_progress: Progress | None = None,
) -> LayerChoice:
    """Run strategy "auto" on a layer without gradients, and return its choice; a collective.

    On a CPU, ``fused`` is no candidate: the interpreter would run its kernels for minutes.

    The expert-parallel group runs the layer. ``on_progress`` is called before each run of a
    candidate with a text, the runs done and the total.

    Raises:
        ValueError: the experts do not divide over the ranks.
        RuntimeError: a candidate failed.
        MemoryError: a rank has too little memory for the buffers.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffer_cache import Workspaces

    workspaces = None if device.type == "cpu" else Workspaces(groups.ep, device)
    recorder = Recorder(device, enabled=False)
    where = {"recorder": recorder, "device": device, "workspaces": workspaces}
    auto = build_strategy("auto", groups.ep, **where)
    assert isinstance(auto, AutoStrategy)
    if on_progress is not None:
        _announce_runs(auto.candidates, on_progress)
        total = _RUNS * len(auto.candidates) + 1
        on_progress(f"drawing the weights of {case.model.name}", 0, total)
    outputs_of(auto, make_tensors(case, groups, device=device), backward=False)
    (reason,) = auto.reasons
    access_problem = peer_access(groups.ep, device)
    no_buffers = access_problem
    if workspaces is None:
        no_buffers = access_problem or "its kernels are interpreted on a CPU"
    elif case.model.moe.expert_bias:
        reason += "; measured without the experts' biases, with which fused cannot run"
    shape = _shape(case, groups)
    decision = auto.decision(shape, gradients=False)
    used = [] if workspaces is None else workspaces.all()
    buffers = [measure_buffers(each) for each in used]
    memory = [_predict_memory(each, shape, groups) for each in used]
    if workspaces is not None:
        workspaces.close()
    return LayerChoice(
        model=case.model.name,
        num_tokens=case.num_tokens,
        num_ranks=groups.ep_size,
        dtype=str(case.dtype).removeprefix("torch."),
        strategy=decision.name,
        times_us=decision.times_us,
        reason=reason,
        access_problem=access_problem,
        buffers=buffers[0] if buffers else None,
        no_buffers="" if buffers else no_buffers,
        memory=memory[0] if memory else {},
    )


def measure_buffers(workspace: "Workspace") -> dict[str, float]:
    """Return the MiB of each buffer of the fused kernels on one rank; layers of a shape share them.

    The first four are symmetric memory, and "symm_mib" is their sum. The dispatch plan is allocated
    in each call.
    """
    buffers = workspace.context()
    num_bytes = {
        "routing_mib": buffers.routing_buffer.local.nbytes,
        "send_mib": buffers.send_buffer.local.nbytes,
        "combine_mib": buffers.combine_buffer.local.nbytes,
        "weight_grads_mib": buffers.dweight_buffer.local.nbytes,
        "symm_mib": workspace.symmetric_bytes,
        "rows_mib": workspace.rows_RD.nbytes,
        "plan_mib": workspace.layout.plan_words * torch.int32.itemsize,
    }
    return {name: number / 2**20 for name, number in num_bytes.items()}


def _predict_memory(
    workspace: "Workspace", shape: LayerShape, groups: ParallelGroups
) -> dict[str, LayerMemory]:
    """Return the memory for each value of ``save``, with the largest numbers of the last call."""
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import rows_with_margin
    from halley.fused.kernels.launches import num_dweight_columns
    from halley.fused.kernels.layout import TASK_ROWS

    size = workspace.read_plan()
    largest = torch.tensor([size.num_rows, size.num_copies], device=workspace.heap.device)
    if groups.ep is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.ep)
    num_rows, num_copies = largest.tolist()
    counts = {
        "capacity_rows": rows_with_margin(num_rows, multiple=workspace.config.block_m),
        "num_rows": num_rows,
        "num_copies": rows_with_margin(num_copies, multiple=TASK_ROWS),
        "plan_words": workspace.layout.plan_words,
        "num_parts": num_dweight_columns(shape.intermediate_size, workspace.config),
    }
    return {save: layer_memory(shape, save=save, **counts) for save in get_args(Save)}


def layer_memory(
    shape: LayerShape,
    *,
    save: Save,
    capacity_rows: int,
    num_rows: int,
    num_copies: int,
    plan_words: int,
    num_parts: int,
) -> LayerMemory:
    """Return the memory of ``fused_experts``: the peak over the moments at which it allocates.

    Args:
        shape: the layer with the tokens of this rank.
        save: the activations that are saved for backward.
        capacity_rows: rows that forward allocates for its experts before it knows the exact number.
        num_rows: rows that are allocated once the number is known.
        num_copies: token copies that are fetched, with the spare capacity of forward.
        plan_words: int32 words of the dispatch plan.
        num_parts: partial gradients per routing weight.
    """
    # Bytes of one row of tokens, of the output of the first GEMM ("pre"), and of the activations.
    row_bytes = shape.hidden_size * shape.itemsize
    pre_bytes = shape.up_size * shape.itemsize
    activation_bytes = shape.intermediate_size * shape.itemsize
    rows, pre, activations = (num_rows * n for n in (row_bytes, pre_bytes, activation_bytes))
    copies = num_copies * row_bytes
    tokens = shape.num_tokens * row_bytes
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    down_grad = num_local * shape.hidden_size * activation_bytes
    up_grad = num_local * shape.hidden_size * pre_bytes

    saved = 4 * plan_words
    if save == "all":
        saved += capacity_rows * (row_bytes + pre_bytes)
        recomputed_rows = recomputed_pre = recomputed_activations = 0
    else:
        saved += copies if save == "inputs" else 0
        recomputed_rows, recomputed_pre, recomputed_activations = rows, pre, activations
    forward = saved + capacity_rows * activation_bytes + tokens  # tokens: the output
    at_start = saved + tokens + recomputed_rows  # tokens: the gradient of the output
    # Backward frees the saved token copies as soon as their rows are recomputed.
    until_end = at_start - (copies if save == "inputs" else 0)
    results = tokens + 4 * shape.num_tokens * shape.top_k  # gradients of tokens, routing weights
    weights = 4 * num_rows  # routing weights by row
    weight_grads = 4 * num_rows * num_parts
    # The gradients of pre, the weighted activations and the gradients of the rows.
    dispatched = until_end + recomputed_pre + pre + activations + rows + weight_grads
    peak = max(
        forward,
        at_start + recomputed_pre + recomputed_activations,
        dispatched + weights,
        dispatched - recomputed_pre + results,
        dispatched - recomputed_pre - weight_grads + results + down_grad,
        until_end + pre + results + down_grad + up_grad,
    )
    return LayerMemory(saved=saved, peak=peak)


def _announce_runs(candidates: dict[str, AbstractStrategy], report: Progress) -> None:
    """Make each candidate call ``report`` before each run, with its name, runs done and total."""
    # After its measurements, "auto" runs the fastest candidate once more, for the result.
    total, num_runs = _RUNS * len(candidates) + 1, count()

    def announced(name: str, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            report(f"running strategy {name}", next(num_runs), total)
            return forward(*args)

        return run

    for name, strategy in candidates.items():
        strategy.forward = announced(name, strategy.forward)


def _shape(case: LayerCase, groups: ParallelGroups) -> LayerShape:
    moe = case.model.moe
    return LayerShape(
        num_tokens=case.num_tokens, hidden_size=case.model.hidden_size,
        intermediate_size=moe.intermediate_size, num_experts=moe.num_experts, top_k=moe.top_k,
        ep_size=groups.ep_size, itemsize=case.dtype.itemsize, activation=moe.activation,
    )  # fmt: skip
