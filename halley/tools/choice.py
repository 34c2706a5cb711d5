"""Find the strategy that "auto" chooses for one layer, and the memory that ``fused`` needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, get_args

import torch

from halley.core.timeline import Recorder
from halley.core.types import LayerShape, Save, local_experts
from halley.distributed.mesh import ParallelGroups
from halley.distributed.peers import peer_access
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of
from halley.tools.timer import Progress, max_over_ranks, no_progress


if TYPE_CHECKING:
    from halley.fused.buffers import Workspace


_RUNS = 4  # runs of each candidate by AutoStrategy: one that compiles, three that are timed


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Predicted bytes of a fused layer on one rank, without tokens, weights and shared buffers."""

    saved: int  # activations and dispatch plan, which forward saves for backward
    peak: int  # most bytes at one time of forward and backward, with the output and all gradients


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The strategy that "auto" chose for forward of one layer, and the memory that fused needs."""

    model: str
    num_tokens: int  # tokens per rank
    num_ranks: int
    dtype: str
    strategy: str  # the strategy that auto chose
    times_us: dict[str, float]  # by candidate, on the slowest rank; empty if not measured
    reason: str  # why auto chose this strategy, and why other strategies are no candidates
    access_problem: str  # why the ranks cannot address each other's memory; "" if they can
    buffers: dict[str, float] | None  # from ``measure_buffers``; None if fused did not run
    no_buffers: str  # why the fused kernels did not run; "" if they did
    # Predicted memory of a fused layer's forward and backward, by value of ``save``, without
    # buffers. Rows and token copies are maxima over the ranks. Empty if fused did not run.
    memory: dict[str, LayerMemory]


def choose_strategy(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    on_progress: Progress = no_progress,
) -> LayerChoice:
    """Run "auto" on a layer, forward only; return its choice, and the buffer sizes of ``fused``.

    A collective. On a CPU, ``fused`` is no candidate: its kernels would take minutes. A
    ``ValueError`` means that the experts do not divide over the ranks, a ``RuntimeError`` that a
    candidate failed, a ``MemoryError`` that a rank has too little memory for the buffers.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import Workspaces

    workspaces = None if device.type == "cpu" else Workspaces(groups.ep, device)
    recorder = Recorder(device, enabled=False)
    where = {"recorder": recorder, "device": device, "workspaces": workspaces}
    auto = build_strategy("auto", groups.ep, **where)
    assert isinstance(auto, AutoStrategy)
    total = _RUNS * len(auto.candidates) + 1  # auto runs its choice once more
    on_progress(f"drawing the weights of {case.model.name}", 0, total)
    _announce_runs(auto.candidates, on_progress, total)
    outputs_of(auto, make_tensors(case, groups, device=device), backward=False)
    (reason,) = auto.reasons
    access_problem = no_buffers = peer_access(groups.ep, device)
    moe = case.model.moe
    shape = LayerShape(
        num_tokens=case.num_tokens, hidden_size=case.model.hidden_size,
        intermediate_size=moe.intermediate_size, num_experts=moe.num_experts, top_k=moe.top_k,
        ep_size=groups.ep_size, itemsize=case.dtype.itemsize, activation=moe.activation,
    )  # fmt: skip
    buffers: dict[str, float] | None = None
    memory: dict[str, LayerMemory] = {}
    if workspaces is None:
        no_buffers = access_problem or "its kernels are interpreted on a CPU"
    else:
        if moe.expert_bias:
            reason += "; measured without the experts' biases, with which fused cannot run"
        for used in workspaces.all():  # one workspace, or none if fused did not run
            buffers, no_buffers = measure_buffers(used), ""
            memory = _predict_memory(used, shape, groups)
        workspaces.close()
    decision = auto.decision(shape, gradients=False)
    return LayerChoice(
        model=case.model.name, num_tokens=case.num_tokens, num_ranks=groups.ep_size,
        dtype=str(case.dtype).removeprefix("torch."), strategy=decision.name,
        times_us=decision.times_us, reason=reason, access_problem=access_problem,
        buffers=buffers, no_buffers=no_buffers, memory=memory,
    )  # fmt: skip


def measure_buffers(workspace: "Workspace") -> dict[str, float]:
    """Return the MiB of each fused-kernel buffer on this rank; layers of one shape share buffers.

    The first four are symmetric memory, and "symm_mib" is their sum. Each pass has its own plan.
    """
    buffers = workspace.context()
    num_bytes = {
        "routing_mib": buffers.routing_buffer.local.nbytes,
        "send_mib": buffers.send_buffer.local.nbytes,
        "combine_mib": buffers.combine_buffer.local.nbytes,
        "weight_grads_mib": buffers.dweight_buffer.local.nbytes,
        "symm_mib": workspace.symmetric_bytes,
        "plan_mib": workspace.layout.plan_words * torch.int32.itemsize,
    }
    return {name: number / 2**20 for name, number in num_bytes.items()}


def _predict_memory(
    workspace: "Workspace", shape: LayerShape, groups: ParallelGroups
) -> dict[str, LayerMemory]:
    """Return the predicted memory of a fused layer by value of ``save``; a collective."""
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.kernels.launches import num_dweight_columns
    from halley.fused.kernels.layout import TASK_ROWS
    from halley.fused.replay import rows_with_margin

    size, device = workspace.read_plan(), workspace.heap.device
    largest = max_over_ranks([size.num_rows, size.num_copies], device=device, group=groups.ep)
    num_rows, num_copies = map(int, largest)
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
    """Predict the bytes that the operator ``fused_experts`` saves, and the peak with backward.

    Args:
        shape: the layer with the tokens of this rank.
        capacity_rows: rows that forward allocates for its experts before it knows the exact number.
        num_rows: rows that are allocated once the number is known.
        num_copies: token copies that are fetched, with the spare capacity of forward.
        plan_words: int32 words of the dispatch plan.
        num_parts: partial gradients per routing weight.
    """
    # Bytes of one row of tokens, of the output of the first GEMM ("pre"), and of activations.
    row_bytes = shape.hidden_size * shape.itemsize
    pre_bytes = shape.up_size * shape.itemsize
    activation_bytes = shape.intermediate_size * shape.itemsize
    rows, pre, activations = (num_rows * n for n in (row_bytes, pre_bytes, activation_bytes))
    copies = num_copies * row_bytes
    tokens = shape.num_tokens * row_bytes
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    down_grad = num_local * shape.hidden_size * activation_bytes
    up_grad = num_local * shape.hidden_size * pre_bytes

    saved, saved_pre = 4 * plan_words, 0
    if save == "all":
        saved_pre = capacity_rows * pre_bytes
        saved += capacity_rows * row_bytes + saved_pre
        recomputed_rows = recomputed_pre = recomputed_activations = 0
    else:
        saved += copies if save == "inputs" else 0
        recomputed_rows, recomputed_pre, recomputed_activations = rows, pre, activations
    # The second GEMM reads activations and writes rows; the output has the size of the tokens.
    forward = saved + capacity_rows * (activation_bytes + row_bytes) + tokens
    at_start = saved + tokens + recomputed_rows  # the output's gradient is as large as ``tokens``
    # With save="inputs", backward frees the token copies when it has recomputed the rows.
    until_end = at_start - (copies if save == "inputs" else 0)
    results = tokens + 4 * shape.num_tokens * shape.top_k  # gradients of tokens, routing weights
    weights = 4 * num_rows  # routing weights by row
    weight_grads = 4 * num_rows * num_parts
    # The gradient of ``pre`` has the size ``pre``, activations times routing weights have the size
    # ``activations``, output gradients with a row per expert of a token have ``rows``.
    dispatched = until_end + recomputed_pre + pre + activations + rows + weight_grads
    combined = dispatched - recomputed_pre - saved_pre  # nothing reads "pre" after the dispatch
    peak = max(
        forward,
        at_start + recomputed_pre + recomputed_activations,
        dispatched + weights,
        combined + rows + results,
        combined - weight_grads + results + down_grad,
        until_end - saved_pre + pre + results + down_grad + up_grad,
    )
    return LayerMemory(saved=saved, peak=peak)


def _announce_runs(candidates: dict[str, AbstractStrategy], report: Progress, total: int) -> None:
    """Wrap each candidate's ``forward``, in place, to report its name and run number first."""
    num_runs = count()

    def run(name: str, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        report(f"running strategy {name}", next(num_runs), total)
        return forward(*args)

    for name, strategy in candidates.items():
        announced: Any = partial(run, name, strategy.forward)
        strategy.forward = announced
