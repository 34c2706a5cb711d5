"""Experts by grouped GEMMs against one expert at a time, and the operator ``expert_gemm``."""

import pytest
import torch

from halley.core.reference import apply_expert
from halley.core.types import Activation, Experts
from halley.ops.expert_gemm import add_bias, apply_experts, check_alignment, expert_gemm
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error


ROWS = [
    pytest.param([0, 5, 0, 3], id="empty first and within"),
    pytest.param([2, 0, 6, 0], id="empty last"),
    pytest.param([0, 0, 0, 0], id="none"),
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def _normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def _ends(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows).cumsum(0).to(torch.int32)


def _check(got: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Compare a result and its gradients with those of the same leaves in float64."""
    dtype, grad = leaves[0].dtype, _normal(*want.shape, seed=9, dtype=leaves[0].dtype).detach()
    got_grads = torch.autograd.grad(got, leaves, grad)
    want_grads = torch.autograd.grad(want, leaves, grad.double())
    for value, reference in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert value.dtype == dtype
        assert relative_error(value.detach(), reference.detach()) <= RELATIVE_TOLERANCE[dtype]


def test_bias_gradient_is_accumulated_in_float32() -> None:
    bias_LO = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    grad_RO = torch.ones(259, 8, dtype=torch.bfloat16)
    grad_RO[0] = 256.0  # a bfloat16 sum would lose each 1
    x_RO = torch.zeros_like(grad_RO)
    add_bias(x_RO, bias_LO, ends_L=_ends([257, 2])).backward(grad_RO)
    assert bias_LO.grad is not None
    assert bias_LO.grad.tolist() == [[512.0] * 8, [2.0] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", True), ("gelu", False)])
def test_apply_experts(
    rows: list[int], activation: Activation, bias: bool, dtype: torch.dtype
) -> None:
    up_size = 16 if activation == "swiglu" else 8
    x_RD = _normal(sum(rows), 16, seed=0, dtype=dtype)
    shapes = [(4, up_size, 16), (4, 16, 8)] + ([(4, up_size), (4, 16)] if bias else [])
    weights = [_normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes, start=1)]
    got = apply_experts(x_RD, _experts(weights, activation), ends_L=_ends(rows))
    slow = _experts([weight.double() for weight in weights], activation)
    groups = torch.split(x_RD.double(), rows)
    want = torch.cat([apply_expert(group, slow, index=e) for e, group in enumerate(groups)])
    _check(got, want, [x_RD, *weights])


def _experts(weights: list[torch.Tensor], activation: Activation) -> Experts:
    up, down, *biases = weights
    up_bias, down_bias = biases or (None, None)
    return Experts(
        up_LGD=up,
        down_LDF=down,
        up_bias_LG=up_bias,
        down_bias_LD=down_bias,
        activation=activation,
    )


@pytest.mark.parametrize(
    ("size", "dtype", "multiple"), [(6, torch.float32, 4), (12, torch.bfloat16, 8)]
)
def test_rows_must_be_multiples_of_16_bytes(size: int, dtype: torch.dtype, multiple: int) -> None:
    rule = rf"hidden_size \({size}\) must be a multiple of {multiple} for {dtype}: "
    with pytest.raises(ValueError, match=rule):
        check_alignment(size, name="hidden_size", dtype=dtype)
    check_alignment(3 * multiple, name="hidden_size", dtype=dtype)


def test_expert_gemm() -> None:
    rows, weights = (_normal(*s, seed=1, dtype=torch.float64) for s in ((6, 3), (3, 3, 2)))
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second expert has no rows
    y = expert_gemm(rows, weights, ends)
    torch.testing.assert_close(y[:2], rows[:2] @ weights[0])
    torch.testing.assert_close(y[2:], rows[2:] @ weights[2])
    assert torch.autograd.gradcheck(lambda x, w: expert_gemm(x, w, ends), (rows, weights))
    empty = torch.zeros(3, dtype=torch.int32)
    assert expert_gemm(rows[:0], weights, empty).shape == (0, 2)


def test_expert_gemm_of_a_row_does_not_depend_on_other_rows() -> None:
    rows = torch.randn(40, 128)
    weights = torch.randn(1, 32, 128).transpose(1, 2)
    want = expert_gemm(rows, weights, torch.tensor([40], dtype=torch.int32))
    for first, end in ((0, 1), (3, 7), (10, 30), (39, 40)):
        ends = torch.tensor([end - first], dtype=torch.int32)
        assert torch.equal(expert_gemm(rows[first:end], weights, ends), want[first:end])
