"""Experts against one expert at a time, and row permutations against plain indexing."""

import pytest
import torch

from halley.core.reference import apply_expert
from halley.core.types import Activation, Experts
from halley.ops.expert_rows import (
    add_bias,
    apply_experts,
    check_alignment,
    combine_tokens,
    expert_gemm,
    gather_tokens,
    invert_permutation,
)
from tests.strategies.layer_case import assert_close


ROWS = [
    pytest.param([0, 5, 0, 3], id="empty first and within"),
    pytest.param([2, 0, 6, 0], id="empty last"),
    pytest.param([0, 0, 0, 0], id="none"),
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
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
        assert_close(value.detach(), reference.detach(), "value or gradient")


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
    names = ("up_LGD", "down_LDF", "up_bias_LG", "down_bias_LD")[: len(weights)]
    experts = Experts(**dict(zip(names, weights, strict=True)), activation=activation)
    got = apply_experts(x_RD, experts, ends_L=_ends(rows))
    slow = experts.with_tensors({name: t.double() for name, t in experts.tensors().items()})
    groups = torch.split(x_RD.double(), rows)
    want = torch.cat([apply_expert(group, slow, index=e) for e, group in enumerate(groups)])
    _check(got, want, [x_RD, *weights])


@pytest.mark.parametrize(
    ("size", "dtype", "multiple"), [(6, torch.float32, 4), (12, torch.bfloat16, 8)]
)
def test_rows_must_be_multiples_of_16_bytes(size: int, dtype: torch.dtype, multiple: int) -> None:
    rule = rf"hidden_size \({size}\) must be a multiple of {multiple} for {dtype}: "
    with pytest.raises(ValueError, match=rule):
        check_alignment(size, name="hidden_size", dtype=dtype)
    check_alignment(3 * multiple, name="hidden_size", dtype=dtype)


def test_expert_gemm_of_a_row_does_not_depend_on_other_rows() -> None:
    rows = torch.randn(40, 128)
    weights = torch.randn(1, 32, 128).transpose(1, 2)
    want = expert_gemm(rows, weights, torch.tensor([40], dtype=torch.int32))
    for first, end in ((0, 1), (3, 7), (10, 30), (39, 40)):
        ends = torch.tensor([end - first], dtype=torch.int32)
        assert torch.equal(expert_gemm(rows[first:end], weights, ends), want[first:end])


def _order(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random permutation and its inverse."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    return order, invert_permutation(order)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_combine_tokens(layout: str) -> None:
    (slots, inverse), rows_ND, weights_TK = _order(12), _normal(12, 5), _normal(4, 3, seed=2)
    if layout == "columns":  # the layout of weights after a capacity that counts by choice
        weights_TK = weights_TK.detach().T.contiguous().T.requires_grad_()
    want_TD = torch.zeros(4, 5, dtype=torch.float64)
    for place, slot in enumerate(slots.tolist()):
        want_TD[slot // 3] += weights_TK[slot // 3, slot % 3].detach() * rows_ND[place].detach()

    def combine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine_tokens(rows, weights, slots_N=slots, inverse_N=inverse)

    torch.testing.assert_close(combine(rows_ND, weights_TK), want_TD)
    assert torch.autograd.gradcheck(combine, (rows_ND, weights_TK))


def test_sums_are_accumulated_in_float32() -> None:
    """256 + 1 + 1: bfloat16 would lose each 1, because 257 is halfway to 258."""
    slots, rows_ND = torch.arange(3), torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    y_TD = combine_tokens(rows_ND, torch.ones(1, 3), slots_N=slots, inverse_N=slots)
    assert y_TD.dtype == torch.bfloat16
    assert y_TD.item() == 258.0
    x_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_tokens(x_TD, slots, inverse_N=slots, top_k=3).backward(rows_ND)
    assert x_TD.grad is not None
    assert x_TD.grad.item() == 258.0


def test_weight_gradient_has_the_dtype_of_the_weights() -> None:
    slots, rows_ND = torch.tensor([1, 0]), torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    weights_TK = torch.tensor([[0.5, 0.25]], requires_grad=True)
    y_TD = combine_tokens(rows_ND.bfloat16(), weights_TK, slots_N=slots, inverse_N=slots)
    assert y_TD.tolist() == [[3.0, 4.25]]
    y_TD.backward(torch.tensor([[1.0, 10.0]]).bfloat16())
    assert weights_TK.grad is not None
    assert weights_TK.grad.dtype == torch.float32
    assert weights_TK.grad.tolist() == [[75.0, 32.0]]
