"""How far a right result may lie from the reference, by dtype: one table for tests and bench."""

import math

import torch


# Norm of the difference over norm of the reference. bfloat16 keeps 8 bits and float16 11: a layer
# rounds about four times on its way, and each rounding adds up to half a unit in the last place.
RELATIVE_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}

_SLICE = 2**26  # elements


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in the Euclidean norm, in float64.

    A zero reference gives 0 for a zero value, else infinity; a value that is not finite gives
    infinity, so that NaN never passes a comparison.

    Raises:
        ValueError: the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(
            f"value {tuple(value.shape)} must have the reference's shape {tuple(reference.shape)}"
        )
    difference = norm = 0.0
    # A slice at a time: a stack of experts in float64 would not fit beside the experts.
    values = torch.split(value.flatten(), _SLICE)
    for part, wanted in zip(values, torch.split(reference.flatten(), _SLICE), strict=True):
        difference += (part.double() - wanted.double()).square().sum().item()
        norm += wanted.double().square().sum().item()
    if not math.isfinite(difference):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)
