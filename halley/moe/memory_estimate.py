"""Estimate the memory of a GPU in a training step: every term, and the code that allocates it.

Parameters have the states of ``train.optim``. Routing is balanced unless ``load`` says otherwise.
No term is fitted to a measurement. docs/predictions.md compares the estimate with measurements.
"""

from dataclasses import dataclass
from typing import Literal

from halley.core.config import ModelConfig
from halley.core.types import LayerShape, local_experts
from halley.fused.config import KernelConfig
from halley.fused.kernels.layout import make_layout
from halley.fused.replay import rows_with_margin
from halley.moe.head_loss import CHUNK_BYTES, needs_chunks
from halley.moe.memory_check import num_parameters, state_bytes
from halley.strategies.base import share_of_tokens


# Which states data-parallel copies divide: none (``halley train``), the optimizer's (ZeRO-1), or
# all (FSDP and ZeRO-3).
Shard = Literal["none", "optimizer", "all"]

_ITEMSIZE = 2  # of bfloat16
_WITH_BUFFERS = ("fused", "hierarchical", "deduplicated")  # strategies that run Halley's kernels


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one GPU: parts, and the most that are alive at one time of a step."""

    weights: float
    gradients: float
    optimizer: float
    saved: float  # activations that are alive at the end of forward
    buffers: float  # of fused layers, alive between steps
    peak: float

    @property
    def at_rest(self) -> float:
        """Bytes between two steps."""
        return self.weights + self.optimizer + self.buffers


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is spread over GPUs, as far as it matters for the memory of one GPU."""

    strategy: str
    ep_size: int
    num_ranks: int
    tp_size: int = 1
    num_nodes: int = 1  # of strategy hierarchical; of deduplicated, whose nodes are ranks
    shard: Shard = "none"
    recompute: bool = False  # activation checkpointing of each block
    can_fuse: bool = True  # False: strategies across nodes run all-to-alls inside a node

    @property
    def runs_kernels(self) -> bool:
        """Whether Halley's kernels run the experts, in shared buffers."""
        return self.can_fuse and self.strategy in _WITH_BUFFERS


def estimate_memory(
    model: ModelConfig,
    placement: Parallelism,
    *,
    num_tokens: int,
    num_microbatches: int = 1,
    load: float = 1.0,
) -> StepMemory:
    """Return the bytes of a GPU in a training step with bfloat16 weights and AdamW.

    Args:
        num_tokens: of a rank, in one microbatch.
        load: rows of this rank's experts, as a multiple of the balanced number.
    """
    where, matrix = placement, model.vocab_size * model.hidden_size  # of the embedding, of the head
    num_rows = num_tokens * model.moe.top_k * where.tp_size * load
    weights, gradients, optimizer = _states(model, where)
    buffers = 0.0
    if where.runs_kernels:
        buffers = _fused_buffers(model, where, num_tokens=num_tokens)
    routed = _saved_by_experts(model, where, num_tokens=num_tokens, num_rows=num_rows)
    blocks = [
        _saved_by_block(model, index, num_tokens=num_tokens, routed=routed)
        for index in range(model.num_layers)
    ]
    block = 0.0
    if where.recompute:  # blocks save their inputs, and backward computes one block at a time again
        block = max(blocks)
        blocks = [num_tokens * model.hidden_size * _ITEMSIZE] * model.num_layers
    head_saved, head_more = _head_bytes(model, num_tokens)
    saved = head_saved + sum(blocks)
    passing = block + _backward_bytes(
        model, where, num_tokens=num_tokens, num_rows=num_rows, routed=routed
    )
    # The sums of gradients: of the head, and of all but the first block and the embedding.
    number = num_parameters(model, ep_size=where.ep_size, tp_size=where.tp_size)
    head = gradients * matrix / number
    later = gradients * (1 - (sum(expert_weights(model, ep_size=where.ep_size)) + matrix) / number)
    before = 0.0
    if num_microbatches > 1:  # the sums of earlier microbatches are alive all the time
        before = head = later = gradients
    moments = (
        before + saved + head_more,  # end of forward
        head + saved - head_saved + passing,  # backward of the last block
        later + blocks[0] + passing,  # backward of the first block
        gradients + matrix * _ITEMSIZE,  # backward of the embedding, whose gradient is dense
    )
    peak = weights + optimizer + buffers + max(moments)
    return StepMemory(
        weights=weights, gradients=gradients, optimizer=optimizer, saved=saved, buffers=buffers,
        peak=peak,
    )  # fmt: skip


def _states(model: ModelConfig, where: Parallelism) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer on a rank, as copies divide them."""
    number = num_parameters(model, ep_size=where.ep_size, tp_size=where.tp_size)
    experts = model.num_moe_layers * sum(expert_weights(model, ep_size=where.ep_size))
    divided = (number - experts) / where.num_ranks + experts * where.ep_size / where.num_ranks
    state = state_bytes()
    shared = divided if where.shard == "all" else number
    others = divided if where.shard != "none" else number
    return state.weight * shared, state.gradient * shared, state.optimizer * others


def expert_weights(model: ModelConfig, *, ep_size: int) -> tuple[float, float]:
    """Return the numbers of weights of a rank's experts in one layer: first, second projection."""
    moe = model.moe
    down = moe.num_experts * model.hidden_size * moe.intermediate_size / ep_size
    return down * (2 if moe.activation == "swiglu" else 1), down


def _saved_by_block(model: ModelConfig, index: int, *, num_tokens: int, routed: float) -> float:
    saved = saved_by_attention(model, num_tokens)
    if not model.is_moe_layer(index):
        return saved + saved_by_feed_forward(model, model.dense_intermediate_size, num_tokens)
    moe = model.moe
    saved += saved_by_router(model, num_tokens) + routed
    is_gated = moe.activation == "swiglu"
    return saved + saved_by_feed_forward(
        model, moe.shared_intermediate_size, num_tokens, is_gated=is_gated
    )


def saved_by_attention(model: ModelConfig, num_tokens: int) -> float:
    """Return the bytes that a block saves up to, and with, its second norm.

    RMSNorm on a GPU is one kernel, which saves its input and a float32 value a row. The rotation
    saves nothing of its size.
    """
    hidden, head = model.hidden_size, model.head_dim
    query, key = model.num_heads * head, model.num_kv_heads * head
    columns = 3 * hidden  # inputs of both norms; the input of the projections of q, k and v
    columns += 2 * query + 2 * key  # attention saves q, k, v and its output
    num_floats = model.num_heads + 2  # attention's logsumexp, and the values of both norms
    if model.qk_norm != "none":
        columns += query + key  # inputs of the norms of q and k
        num_floats += 2 if model.qk_norm == "full" else model.num_heads + model.num_kv_heads
    if model.qk_norm == "head":
        # A norm per head makes q contiguous by head, and so is attention's output. The output
        # projection then gets, and saves, a copy.
        columns += query
    return num_tokens * (columns * _ITEMSIZE + num_floats * 4.0)


def saved_by_router(model: ModelConfig, num_tokens: int) -> float:
    """Return the bytes that a router saves: float32 tokens, scores, and chosen experts."""
    moe = model.moe
    scores = 2 if moe.router.kind == "sigmoid" else 1
    chosen = moe.top_k * (8 + 4 + 4) + 4  # ids, weights before and after the sum, the sum
    per_token = 4.0 * model.hidden_size + 4 * scores * moe.num_experts + chosen
    return num_tokens * per_token + 4.0 * moe.num_experts * model.hidden_size  # float32 weight


def saved_by_feed_forward(
    model: ModelConfig, width: int, num_tokens: int, *, is_gated: bool = True
) -> float:
    """Return the bytes that a dense feed-forward network of an intermediate size saves; 0 for 0."""
    num_tensors = 4 if is_gated else 2  # gate, silu(gate), up, the input of "down"
    return num_tokens * (num_tensors * width + model.hidden_size) * _ITEMSIZE if width else 0.0


def _saved_by_experts(
    model: ModelConfig, where: Parallelism, *, num_tokens: int, num_rows: float
) -> float:
    moe, hidden = model.moe, model.hidden_size
    inner = moe.intermediate_size // where.tp_size
    up_size = inner * (2 if moe.activation == "swiglu" else 1)
    if not where.runs_kernels:
        # Rows before and after the first GEMM, after the activation, and silu(gate); then rows that
        # return to their tokens, whose number does not depend on the load; orders of the rows.
        kept = hidden + up_size + (2 if moe.activation == "swiglu" else 1) * inner
        returned = num_tokens * moe.top_k * where.tp_size * (hidden * _ITEMSIZE + 16.0)
        return num_rows * (kept * _ITEMSIZE + 8.0) + returned
    block_m = KernelConfig().block_m
    num_local = local_experts(moe.num_experts, ep_size=where.ep_size, tp_size=where.tp_size)
    # The rows of each expert are padded to tiles; buffers are sized before the rows are counted.
    padded = rows_with_margin(int(num_rows + num_local * block_m / 2), multiple=block_m)
    return padded * (hidden + up_size) * _ITEMSIZE


def _fused_buffers(model: ModelConfig, where: Parallelism, *, num_tokens: int) -> float:
    """Return the bytes of a ``Workspace``, the buffers that all fused layers share."""
    moe, hidden = model.moe, model.hidden_size
    num_ranks, config = where.ep_size // where.num_nodes, KernelConfig()
    most_tokens = num_tokens + round(_received(model, where, num_tokens=num_tokens))
    layout = make_layout(
        num_ranks=num_ranks, num_experts=moe.num_experts // where.num_nodes, top_k=moe.top_k,
        max_tokens=1 << (most_tokens - 1).bit_length(), block_m=config.block_m,
        tp_size=where.tp_size,
    )  # fmt: skip
    vectors = (2 + num_ranks) * most_tokens  # send and combine buffers
    words = layout.routing_words + num_ranks * most_tokens * moe.top_k
    return vectors * hidden * _ITEMSIZE + words * 4.0


def _received(model: ModelConfig, where: Parallelism, *, num_tokens: int) -> float:
    """Return how many tokens of other nodes a rank receives in a layer."""
    if where.num_nodes == 1:
        return 0.0
    shape = layer_shape(model, ep_size=where.ep_size, num_tokens=num_tokens)
    share = share_of_tokens(shape, num_experts=model.moe.num_experts // where.num_nodes)
    return num_tokens * (where.num_nodes - 1) * share


def layer_shape(model: ModelConfig, *, ep_size: int, num_tokens: int) -> LayerShape:
    """Return the sizes that determine the cost of a model's MoE layer."""
    moe, router = model.moe, model.moe.router
    return LayerShape(
        num_tokens=num_tokens, hidden_size=model.hidden_size,
        intermediate_size=moe.intermediate_size, num_experts=moe.num_experts, top_k=moe.top_k,
        ep_size=ep_size, activation=moe.activation, num_groups=router.num_groups,
        num_limited_groups=router.num_limited_groups,
    )  # fmt: skip


def _head_bytes(model: ModelConfig, num_tokens: int) -> tuple[float, float]:
    """Return bytes that the last norm, head and loss save, and more of them that are alive once."""
    sizes = {"vocab_size": model.vocab_size, "hidden_size": model.hidden_size}
    vector = num_tokens * model.hidden_size * _ITEMSIZE
    if not needs_chunks(num_tokens, itemsize=_ITEMSIZE, **sizes):
        logits = num_tokens * model.vocab_size * _ITEMSIZE
        return 2.0 * vector + logits, 1.0 * logits  # then the gradient of the logits
    # ``moe.head_loss`` saves the gradients of the head's input and of its matrix. It adds up the
    # latter in float32, while a chunk has logits and their gradient.
    matrix = model.vocab_size * model.hidden_size
    return 2.0 * vector + matrix * _ITEMSIZE, matrix * 4.0 + 2 * CHUNK_BYTES


def _backward_bytes(
    model: ModelConfig, where: Parallelism, *, num_tokens: int, num_rows: float, routed: float
) -> float:
    """Return the most bytes that the backward of an MoE layer has beside saved activations."""
    moe, hidden = model.moe, model.hidden_size
    up, down = expert_weights(model, ep_size=where.ep_size)
    inner = moe.intermediate_size // where.tp_size
    up_size = inner * (2 if moe.activation == "swiglu" else 1)
    dx = (num_tokens + 2 * _received(model, where, num_tokens=num_tokens)) * hidden * _ITEMSIZE
    whole, share = 0.0, 1.0
    if where.shard == "all":  # whole weights of a block and the next one, gradients of a block
        number = num_parameters(model, ep_size=where.ep_size, tp_size=where.tp_size)
        whole = 3 * (number - 2 * model.vocab_size * hidden) / model.num_layers * _ITEMSIZE
        share = where.ep_size / where.num_ranks
    # Gradients of the pre-activations, weighted activations and output rows. Then the gradient of
    # the second projection; then (the last two are free) those of both projections.
    pre = num_rows * up_size * _ITEMSIZE
    rows = pre + num_rows * (inner + hidden) * _ITEMSIZE
    later = max(rows + down * _ITEMSIZE, pre + (up + down) * _ITEMSIZE)
    if where.runs_kernels:
        # Fused layers have the rows of the combine after ``rows``. From then on, their saved
        # pre-activations, which have the size of ``pre``, are free.
        later = max(later, rows + num_rows * hidden * _ITEMSIZE) - pre
    # Then saved rows are free, and the float32 sums of both projections exist beside the last
    # gradient in bfloat16.
    third = (up + down) * 4 * share + up * _ITEMSIZE - routed
    return whole + dx + max(rows, later, third)
