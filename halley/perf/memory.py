"""What a fused layer allocates on one rank, by what it keeps for backward: said before it runs."""

from dataclasses import dataclass

from halley.core.routing import local_experts
from halley.core.types import LayerShape, Save


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How much one rank has to do in one call.

    Attributes:
        num_rows: rows of its experts, padded to whole tiles.
        room_rows: rows that forward makes room for, not knowing yet how many there are.
        num_sends: rows that it fetches, each once, padded to whole tasks.
        plan_words: int32 words of the plan.
        num_parts: parts of the gradient of a routing weight.
    """

    num_rows: int
    room_rows: int
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
    rows = counts.num_rows * shape.hidden_size * size
    pre = counts.num_rows * shape.up_size * size
    activations = counts.num_rows * inner_size * size
    kept_rows = counts.room_rows * (shape.hidden_size + shape.up_size) * size
    sends = counts.num_sends * shape.hidden_size * size
    tokens = shape.num_tokens * shape.hidden_size * size
    plan = 4 * counts.plan_words
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    weights = num_local * shape.hidden_size * (shape.up_size + inner_size) * size

    kept = plan + {"all": kept_rows, "inputs": sends, "recompute": 0}[save]
    room_rows = counts.num_rows if save == "inputs" else counts.room_rows
    forward = kept + room_rows * inner_size * size + tokens
    again = 0 if save == "all" else rows + pre
    parts = 4 * counts.num_rows * counts.num_parts
    passing = 4 * counts.num_rows  # routing weights by row; later memory comes in their place
    gradients = pre + activations + rows + parts  # dpre, weighted activations, dy
    results = tokens + 4 * shape.num_tokens * shape.top_k
    backward = kept + tokens + again + gradients
    peak = max(
        forward,
        kept + tokens + again + (activations if again else 0),
        backward + passing,
        backward + results + weights,
    )
    return LayerMemory(kept=kept, peak=peak)
