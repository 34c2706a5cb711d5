"""Predict the times of a training step outside routed experts: attention, dense layers, update.

The code of ``moe.dense``, ``moe.router`` and ``train.optim`` determines the operations. Each term
is arithmetic at a rate of GEMMs or bytes at a rate of memory, without time of the host.
"""

from typing import NamedTuple

from halley.core.config import ModelConfig
from halley.cost.hardware import Hardware


# Rates relative to a large GEMM. FlashAttention-2 reaches half of it on Hopper (arXiv:2407.08608,
# section 1), float32 GEMMs of a router a fifteenth (data sheet: 67 and 989 TFLOP/s).
_ATTENTION_RATE, _FLOAT32_RATE = 1 / 2, 1 / 15
_ATTENTION_BACKWARD = 2.5  # FlashAttention computes the scores again: five GEMMs after two
_ITEMSIZE = 2  # of bfloat16
# Bytes that the update moves for each parameter. Each gradient is copied to its float32 sum (6),
# its norm read (4), scaled (8). AdamW reads four values and writes three (28), and the weight is
# converted (6).
_GRADIENT_BYTES, _CLIP_BYTES, _STATE_BYTES = 6.0, 12.0, 34.0


class DenseTimes(NamedTuple):
    """Predicted us of one microbatch outside routed experts, in all layers and the head."""

    forward_us: float
    backward_us: float
    again_us: float  # forward without the head, which activation checkpointing repeats
    weights_us: float  # weight gradients of blocks with experts, a part of ``backward_us``


def dense_times(
    model: ModelConfig, hardware: Hardware, *, num_tokens: int, seq_len: int
) -> DenseTimes:
    """Return the times of ``num_tokens`` tokens of a rank, in sequences of ``seq_len``."""
    moe, hidden, vocab = model.moe, model.hidden_size, model.vocab_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    num_moe, num_layers = model.num_moe_layers, model.num_layers
    attention = 2 * hidden * (query + key)  # weights of four projections
    shared = (3 if moe.activation == "swiglu" else 2) * moe.shared_intermediate_size
    wide = num_moe * shared + (num_layers - num_moe) * 3 * model.dense_intermediate_size
    weights = num_layers * attention + wide * hidden + vocab * hidden
    # Two operations for each weight, and for each pair of positions that causal attention has.
    gemm_us = _us(2.0 * num_tokens * weights, hardware.gemm_flops_per_s)
    scores = num_layers * 2.0 * num_tokens * seq_len * query  # two GEMMs, half of the pairs
    scores_us = _us(scores, _ATTENTION_RATE * hardware.gemm_flops_per_s)
    router_us = _us(
        2.0 * num_moe * num_tokens * hidden * moe.num_experts,
        _FLOAT32_RATE * hardware.gemm_flops_per_s,
    )
    # Columns that element-wise kernels read and write. Norms and residuals, two each: 10 D, in
    # backward 20 D with sums of gradients. A router's float32 copy: 3 D, in backward 8 D. Rotation:
    # 2 (Q + K). A norm of q and k: 2 (Q + K), in backward 4 (Q + K). Activations: 5, 8 tensors.
    norms = 0 if model.qk_norm == "none" else query + key
    rotated = 2 * (query + key)
    per_layer = (10 * hidden + rotated + 2 * norms, 20 * hidden + rotated + 4 * norms)
    forward = num_layers * per_layer[0] + num_moe * 3 * hidden + 5 * wide / 3 + 2 * vocab
    backward = num_layers * per_layer[1] + num_moe * 8 * hidden + 8 * wide / 3 + 3 * vocab
    column_us = _us(num_tokens * _ITEMSIZE, hardware.fused_bytes_per_s)
    head_us = _us(2.0 * num_tokens * vocab * hidden, hardware.gemm_flops_per_s)
    head_us += 2 * vocab * column_us
    forward_us = gemm_us + scores_us + router_us + forward * column_us
    backward_us = 2 * (gemm_us + router_us) + _ATTENTION_BACKWARD * scores_us
    moved = 2.0 * num_tokens * num_moe * (attention + shared * hidden)
    return DenseTimes(
        forward_us=forward_us,
        backward_us=backward_us + backward * column_us,
        again_us=forward_us - head_us,
        weights_us=_us(moved, hardware.gemm_flops_per_s),
    )


def update_us(number: float, hardware: Hardware, *, gradients: int, states: int) -> float:
    """Return the us to sum up, clip and apply the gradients of ``number`` parameters.

    ``gradients`` and ``states`` are the numbers of ranks that divide gradients and other states.
    """
    num_bytes = _GRADIENT_BYTES + _CLIP_BYTES / gradients + _STATE_BYTES / states
    return _us(number * num_bytes, hardware.fused_bytes_per_s)


def _us(amount: float, rate: float) -> float:
    return amount / rate * 1e6
