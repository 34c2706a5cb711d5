"""The next-token loss of a large vocabulary, computed without the logits of all tokens.

The head multiplies one chunk of tokens after another. Each chunk yields its share of the loss and
of the gradients in forward, so its logits are freed before the next chunk. Backward only scales the
gradients. The GEMMs have as much arithmetic as without chunks. C is the tokens of a chunk.
"""

from typing import Any

import torch

from halley.moe.dense import compiled_on_gpu
from halley.ops.library import define


CHUNK_BYTES = 2**29  # most bytes of the logits of a chunk; smaller chunks are slower
_FLOAT32_BYTES = 4


def needs_chunks(num_tokens: int, *, vocab_size: int, hidden_size: int, itemsize: int) -> bool:
    """Return whether a loss in chunks takes less memory than the logits of all tokens.

    The loss in chunks adds up the head's weight gradient in a float32 buffer. ``itemsize`` is that
    of the model's dtype, in bytes.
    """
    added_bytes = vocab_size * hidden_size * _FLOAT32_BYTES
    return num_tokens * vocab_size * itemsize > max(CHUNK_BYTES, added_bytes)


def chunked_loss(
    hidden_BSD: torch.Tensor, weight_VD: torch.Tensor, *, targets_BS: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross-entropy of the head's logits and targets, in nats, a float32 scalar.

    Values are those of ``next_token_loss`` up to rounding. The sums over chunks are float32.

    Args:
        hidden_BSD: inputs of the head; they are converted to the dtype of its weight.
        targets_BS: int64 token ids, from 0 to V - 1; none is ignored.
    """
    num_tokens, vocab_size = targets_BS.numel(), weight_VD.shape[0]
    num_chunks = -(-num_tokens * vocab_size * weight_VD.itemsize // CHUNK_BYTES)
    chunk_size = -(-num_tokens // max(num_chunks, 1))
    with torch.autocast(hidden_BSD.device.type, enabled=False):
        total, _, _ = _head_loss(
            hidden_BSD.flatten(0, 1).to(weight_VD.dtype),
            weight_VD,
            targets_BS.flatten(),
            max(chunk_size, 1),
            torch.is_grad_enabled(),
        )
    return total / num_tokens


@compiled_on_gpu
def _loss_sum(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    log_p_CV = logits_CV.float().log_softmax(-1)
    return -log_p_CV.gather(1, targets_C[:, None]).sum()


@compiled_on_gpu
def _loss_sum_and_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p_CV = logits_CV.float().log_softmax(-1)
    total = -log_p_CV.gather(1, targets_C[:, None]).sum()
    is_target_CV = torch.arange(logits_CV.shape[1], device=targets_C.device) == targets_C[:, None]
    return total, (log_p_CV.exp() - is_target_CV.float()).to(logits_CV.dtype)


def _add_gemm(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right``, not rounded to their dtype, to the float32 matrix ``total``."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:  # on a CPU, ``addmm`` has no ``out_dtype``
        total.addmm_(left.float(), right.float())


def _run(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    chunk_size: int,
    with_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the tokens' losses, and its gradients by hidden states and by weight.

    Without gradients, the last two are empty.
    """
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    grad_hidden_TD = hidden_TD.new_empty(hidden_TD.shape if with_gradients else 0)
    sum_VD = weight_VD.new_zeros(weight_VD.shape if with_gradients else 0, dtype=torch.float32)
    for start in range(0, hidden_TD.shape[0], chunk_size):
        chunk = slice(start, start + chunk_size)
        hidden_CD, targets_C = hidden_TD[chunk], targets_T[chunk]
        logits_CV = hidden_CD @ weight_VD.t()
        if not with_gradients:
            total += _loss_sum(logits_CV, targets_C)
            continue
        chunk_total, grad_CV = _loss_sum_and_gradient(logits_CV, targets_C)
        total += chunk_total
        torch.mm(grad_CV, weight_VD, out=grad_hidden_TD[chunk])
        _add_gemm(sum_VD, grad_CV.t(), hidden_CD)
    return total, grad_hidden_TD, sum_VD.to(weight_VD.dtype)


def _fake(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    chunk_size: int,
    with_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = hidden_TD.new_empty((), dtype=torch.float32)
    grad_hidden_TD = hidden_TD.new_empty(hidden_TD.shape if with_gradients else 0)
    grad_weight_VD = weight_VD.new_empty(weight_VD.shape if with_gradients else 0)
    return total, grad_hidden_TD, grad_weight_VD


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros as gradients of these two outputs
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, factor: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
    return _scale(grad_hidden_TD, factor), _scale(grad_weight_VD, factor), None, None, None


@compiled_on_gpu
def _run_scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # ``gradient * factor`` would round the factor to the gradient's dtype first.
    return (gradient.float() * factor).to(gradient.dtype)


# An operator, because aot_autograd, which traces ``_backward``, cannot trace a compiled function.
_scale = define(
    "scale_gradient(Tensor gradient, Tensor factor) -> Tensor",
    _run_scale,
    lambda gradient, factor: torch.empty_like(gradient),
)

# One operator, so that graphs have one node for all chunks: the partitioner of torch.compile could
# otherwise save the logits of each chunk for backward.
_head_loss = define(
    "head_loss(Tensor hidden, Tensor weight, Tensor targets, int chunk_size, bool with_gradients)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_save_gradients,
    backward=_backward,
)
