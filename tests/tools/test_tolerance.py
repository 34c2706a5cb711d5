"""Relative error by hand, and values that must never pass a comparison."""

import math

import pytest
import torch

from halley.tools import layer_case
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error


def test_error_is_the_share_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 12.0]])  # norm 13
    value = reference + torch.tensor([[0.0, 3.0], [-4.0, 0.0]])  # difference 5
    assert relative_error(reference, reference) == 0.0
    for size in (3, 2**26):  # the norm is summed slice by slice
        monkeypatch.setattr(layer_case, "_SLICE_SIZE", size)
        assert relative_error(value, reference) == pytest.approx(5 / 13, rel=1e-15)


def test_error_is_computed_in_float64() -> None:
    value, reference = torch.tensor([300.0, 0.0]), torch.tensor([0.0, 400.0])
    for dtype in RELATIVE_TOLERANCE:  # in float16 the squares would overflow
        assert relative_error(value.to(dtype), reference) == 1.25


def test_zero_reference() -> None:
    zero = torch.zeros(3)
    assert relative_error(zero, zero) == relative_error(zero[:0], zero[:0]) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-30, 0.0]), zero) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_never_pass(bad: float) -> None:
    good, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])
    for value, reference in ((broken, good), (good, broken), (broken, broken)):
        assert relative_error(value, reference) == math.inf


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(ValueError, match=r"value \(2, 1\) must have the reference's shape \(2,\)"):
        relative_error(torch.ones(2, 1), torch.ones(2))


def test_tolerance_is_a_few_roundings_of_each_dtype() -> None:
    assert set(RELATIVE_TOLERANCE) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    for dtype, allowed in RELATIVE_TOLERANCE.items():
        # Rounding alone must pass, one wrong row of a thousand must not.
        x = torch.randn(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert relative_error(x.to(dtype), x) < allowed
        wrong = x.to(dtype).clone()
        wrong[17] = 0.0
        assert relative_error(wrong, x) > allowed
