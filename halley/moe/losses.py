"""The loss of a language model."""

import torch
import torch.nn.functional as F

from halley.moe.elementwise import compiled_on_gpu


def next_token_loss(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats, computed in float32, as a scalar.

    Args:
        logits_BSV: in any floating dtype. On a GPU no float32 copy of them is made, which would be
            the largest tensor of a step.
        targets_BS: int64, below V.
    """
    return _cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


@compiled_on_gpu
def _cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T)
