"""Compute and measure the memory of a fused layer on one rank: buffers, saved tensors and peak."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
import torch.distributed as dist

from halley.core.routing import local_experts
from halley.core.types import LayerShape, Save
from halley.distributed.mesh import ParallelGroups


if TYPE_CHECKING:
    from halley.fused.buffers import Workspace


@dataclass(frozen=True, kw_only=True)
class FusedBuffers:
    """Buffers of the fused kernels on one rank, in MiB; all layers of a shape share them.

    Attributes:
        routing_mib: flags, counts and routing that ranks exchange in each call.
        send_mib: the tokens of this rank, which its peers fetch. There are two send buffers, used
            alternately.
        combine_mib: the partial sums that the peers send back.
        weight_grads_mib: the gradients of routing weights that the peers send back.
        symm_mib: the four above together, which are symmetric memory.
        rows_mib: the fetched rows, in local memory.
        plan_mib: the dispatch plan, allocated anew in each call.
    """

    routing_mib: float
    send_mib: float
    combine_mib: float
    weight_grads_mib: float
    symm_mib: float
    rows_mib: float
    plan_mib: float


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Sizes of one call on one rank.

    Attributes:
        capacity_rows: rows that forward allocates for its experts before it knows the exact number.
        num_rows: rows that are allocated once the number is known.
        num_copies: token copies to fetch, each once; includes the spare capacity of forward.
        plan_words: int32 words of the dispatch plan.
        num_parts: partial gradients per routing weight.
    """

    capacity_rows: int
    num_rows: int
    num_copies: int
    plan_words: int
    num_parts: int


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, without tokens, weights and shared buffers.

    Attributes:
        saved: tensors saved from forward to backward.
        peak: the largest total during forward and backward, with the output and all gradients.
    """

    saved: int
    peak: int


def measure_buffers(workspace: "Workspace") -> FusedBuffers:
    """Return the sizes of the buffers of a workspace."""
    buffers = workspace.context()
    return FusedBuffers(
        routing_mib=buffers.routing_buffer.local.nbytes / 2**20,
        send_mib=buffers.send_buffer.local.nbytes / 2**20,
        combine_mib=buffers.combine_buffer.local.nbytes / 2**20,
        weight_grads_mib=buffers.dweight_buffer.local.nbytes / 2**20,
        symm_mib=workspace.symmetric_bytes / 2**20,
        rows_mib=workspace.rows_RD.nbytes / 2**20,
        plan_mib=workspace.layout.plan_words * torch.int32.itemsize / 2**20,
    )


def predict_memory(
    workspace: "Workspace", shape: LayerShape, groups: ParallelGroups
) -> dict[str, LayerMemory]:
    """Return the memory of a layer for each way to save activations; a collective.

    The numbers of rows are those of the last call, on the rank that has the most.

    Args:
        workspace: has run the layer forward.
        shape: of the layer.
        groups: the ranks of the layer.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import rows_with_margin
    from halley.fused.kernels.dispatch import num_dweight_columns
    from halley.fused.kernels.layout import TASK_ROWS

    size = workspace.read_plan()
    most = torch.tensor([size.num_rows, size.num_copies], device=workspace.heap.device)
    if groups.ep is not None:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep)
    num_rows, num_copies = most.tolist()
    counts = RowCounts(
        capacity_rows=rows_with_margin(num_rows, multiple=workspace.config.block_m),
        num_rows=num_rows,
        num_copies=rows_with_margin(num_copies, multiple=TASK_ROWS),
        plan_words=workspace.layout.plan_words,
        num_parts=num_dweight_columns(shape.intermediate_size, workspace.config),
    )
    return {save: layer_memory(shape, counts, save=save) for save in get_args(Save)}


def layer_memory(shape: LayerShape, counts: RowCounts, *, save: Save) -> LayerMemory:
    """Return the memory of ``fused_experts``, computed tensor by tensor in allocation order.

    Args:
        shape: the layer with the tokens of this rank.
        counts: the sizes of the call.
        save: the activations that are saved for backward.
    """
    size, inner_size = shape.itemsize, shape.intermediate_size
    num_rows = counts.num_rows
    rows = num_rows * shape.hidden_size * size
    pre = num_rows * shape.up_size * size
    activations = num_rows * inner_size * size
    forward_rows = counts.capacity_rows * shape.hidden_size * size
    forward_pre = counts.capacity_rows * shape.up_size * size
    forward_activations = counts.capacity_rows * inner_size * size
    copies = counts.num_copies * shape.hidden_size * size
    tokens = shape.num_tokens * shape.hidden_size * size
    plan = 4 * counts.plan_words
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    down = num_local * shape.hidden_size * inner_size * size
    up = num_local * shape.hidden_size * shape.up_size * size

    saved = plan + {"all": forward_rows + forward_pre, "inputs": copies, "recompute": 0}[save]
    forward = saved + forward_activations + tokens
    recomputed_rows, recomputed_pre = (0, 0) if save == "all" else (rows, pre)
    parts = 4 * num_rows * counts.num_parts
    weights = 4 * num_rows  # routing weights by row
    begun = saved + tokens + recomputed_rows
    held = begun - (copies if save == "inputs" else 0)  # until backward ends
    results = tokens + 4 * shape.num_tokens * shape.top_k
    # The gradients of pre, the weighted activations and the gradients of the rows.
    dispatched = held + recomputed_pre + pre + activations + rows + parts
    peak = max(
        forward,
        begun + recomputed_pre + (0 if save == "all" else activations),
        dispatched + weights,
        dispatched - recomputed_pre + results,
        dispatched - recomputed_pre - parts + results + down,
        held + pre + results + down + up,
    )
    return LayerMemory(saved=saved, peak=peak)
