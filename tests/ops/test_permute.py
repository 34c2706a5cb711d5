"""Row permutations equal plain indexing; their gradients pass a finite-difference check."""

import pytest
import torch

from halley.ops.exchange import combine_tokens, gather_tokens, invert_permutation, reorder_rows


def _order(num_rows: int, *, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random permutation and its inverse."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(dtype)
    return order, invert_permutation(order)


def _normal(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(("num_rows", "dtype"), [(0, torch.int64), (9, torch.int32)])
def test_inverse_of_a_permutation(num_rows: int, dtype: torch.dtype) -> None:
    order, inverse = _order(num_rows, dtype=dtype)
    assert inverse.tolist() == [order.tolist().index(place) for place in range(num_rows)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reorder_rows(dtype: torch.dtype) -> None:
    (order, inverse), rows_RD = _order(7, dtype=dtype), _normal(7, 3)
    moved_RD = reorder_rows(rows_RD, order, inverse_R=inverse)
    assert torch.equal(moved_RD, rows_RD[order.long()])
    assert torch.equal(reorder_rows(moved_RD, inverse, inverse_R=order), rows_RD)
    assert torch.autograd.gradcheck(
        lambda rows: reorder_rows(rows, order, inverse_R=inverse), (rows_RD,)
    )


def test_gather_tokens() -> None:
    (slots, inverse), x_TD = _order(12), _normal(4, 5)
    rows_ND = gather_tokens(x_TD, slots, inverse_N=inverse, top_k=3)
    assert torch.equal(rows_ND, x_TD[slots // 3])
    assert torch.autograd.gradcheck(
        lambda x: gather_tokens(x, slots, inverse_N=inverse, top_k=3), (x_TD,)
    )


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


def test_no_tokens() -> None:
    slots = torch.zeros(0, dtype=torch.int64)
    x_TD, weights_TK = (torch.zeros(0, n, requires_grad=True) for n in (5, 2))
    rows_ND = gather_tokens(x_TD, slots, inverse_N=slots, top_k=2)
    combine_tokens(rows_ND, weights_TK, slots_N=slots, inverse_N=slots).sum().backward()
    assert (x_TD.grad is not None and x_TD.grad.shape) == (0, 5)
    assert (weights_TK.grad is not None and weights_TK.grad.shape) == (0, 2)
