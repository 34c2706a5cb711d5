"""What a fused layer allocates on one rank, by what it keeps for backward: said before it runs."""

from dataclasses import dataclass

from halley.core.routing import local_experts
from halley.core.types import LayerShape, Save


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How much one rank has to do in one call.

    Attributes:
        room_rows: rows of its experts that forward makes room for, not knowing yet how many there
            are.
        num_rows: the same where it is known.
        num_sends: rows that it fetches, each once, as many as forward makes room for.
        plan_words: int32 words of the plan.
        num_parts: parts of the gradient of a routing weight.
    """

    room_rows: int
    num_rows: int
    num_sends: int
    plan_words: int
    num_parts: int


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, beside tokens, weights and the buffers that layers share.

    Attributes:
        kept: from forward to backward.
        peak: the most while forward and backward run, with the output and all gradients.
    """

    kept: int
    peak: int


def layer_memory(shape: LayerShape, counts: RowCounts, *, save: Save) -> LayerMemory:
    """Return what ``ops.fused_experts`` allocates, tensor by tensor.

    Args:
        shape: the layer; its tokens are those of this rank.
        counts: of the call.
        save: what is kept.
    """
    size, inner_size = shape.itemsize, shape.intermediate_size
    num_rows = counts.room_rows if save == "all" else counts.num_rows
    rows = num_rows * shape.hidden_size * size
    pre = num_rows * shape.up_size * size
    activations = num_rows * inner_size * size
    forward_activations = counts.room_rows * inner_size * size
    sends = counts.num_sends * shape.hidden_size * size
    tokens = shape.num_tokens * shape.hidden_size * size
    plan = 4 * counts.plan_words
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    down = num_local * shape.hidden_size * inner_size * size
    up = num_local * shape.hidden_size * shape.up_size * size

    kept = plan + {"all": rows + pre, "inputs": sends, "recompute": 0}[save]
    forward = kept + forward_activations + tokens
    again_rows, again_pre = (0, 0) if save == "all" else (rows, pre)
    parts = 4 * num_rows * counts.num_parts
    weights = 4 * num_rows  # routing weights by row
    begun = kept + tokens + again_rows
    held = begun - (sends if save == "inputs" else 0)  # until the end
    results = tokens + 4 * shape.num_tokens * shape.top_k
    dispatched = held + again_pre + pre + activations + rows + parts  # dpre, weighted, dy
    peak = max(
        forward,
        begun + again_pre + (0 if save == "all" else activations),
        dispatched + weights,
        dispatched - again_pre + results + down,
        held + pre + parts + results + down + up,
    )
    return LayerMemory(kept=kept, peak=peak)
