"""Relative error in the Euclidean norm, and its tolerance by dtype for tests and benchmarks."""

import math

import torch


# Norm of the difference over norm of the reference. A layer rounds about four times, and each
# rounding adds up to half a unit in the last place (8 bits in bfloat16, 11 in float16).
RELATIVE_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}

_SLICE_SIZE = 2**26  # elements


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in the Euclidean norm, computed in float64.

    If the reference is zero, the result is 0 for a zero value and infinity otherwise. A value that
    is not finite gives infinity, so that NaN never passes a comparison.

    Raises:
        ValueError: the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(
            f"value {tuple(value.shape)} must have the reference's shape {tuple(reference.shape)}"
        )
    difference = norm = 0.0
    # In slices, because float64 copies of all expert weights would not fit beside the weights.
    values = torch.split(value.flatten(), _SLICE_SIZE)
    references = torch.split(reference.flatten(), _SLICE_SIZE)
    for found, expected in zip(values, references, strict=True):
        difference += (found.double() - expected.double()).square().sum().item()
        norm += expected.double().square().sum().item()
    if not math.isfinite(difference):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)
