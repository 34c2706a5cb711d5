"""Moves of rows against indexing by hand, and their gradients against finite differences."""

import pytest
import torch

from halley.ops.permute import Permutation, combine_tokens, gather_tokens, permute_rows


def _order(num_rows: int, *, seed: int = 0, dtype: torch.dtype = torch.int64) -> Permutation:
    generator = torch.Generator().manual_seed(seed)
    return Permutation(torch.randperm(num_rows, generator=generator).to(dtype))


def _normal(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_inverse(num_rows: int, dtype: torch.dtype) -> None:
    order = _order(num_rows, dtype=dtype)
    want = [order.index_N.tolist().index(place) for place in range(num_rows)]
    assert order.inverse_N.tolist() == want
    undone = order.inverted()
    assert undone.index_N.tolist() == want
    assert undone.inverse_N is order.index_N


def test_known_inverse_is_kept() -> None:
    index_N, inverse_N = torch.tensor([1, 2, 0]), torch.tensor([2, 0, 1])
    order = Permutation(index_N, inverse_N)
    assert order.inverse_N is inverse_N
    assert order.inverted().inverse_N is index_N


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_permute_rows(dtype: torch.dtype) -> None:
    order, rows_RD = _order(7, dtype=dtype), _normal(7, 3)
    want = [rows_RD[i].tolist() for i in order.index_N.tolist()]
    assert permute_rows(rows_RD, order).tolist() == want
    back_RD = permute_rows(permute_rows(rows_RD, order), order.inverted())
    assert torch.equal(back_RD, rows_RD)
    assert torch.autograd.gradcheck(lambda rows: permute_rows(rows, order), (rows_RD,))


def test_gather_tokens() -> None:
    slots, x_TD = _order(12), _normal(4, 5)
    want = [x_TD[slot // 3].tolist() for slot in slots.index_N.tolist()]
    assert gather_tokens(x_TD, slots, top_k=3).tolist() == want
    assert torch.autograd.gradcheck(lambda x: gather_tokens(x, slots, top_k=3), (x_TD,))


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_combine_tokens(layout: str) -> None:
    slots, rows_ND, weights_TK = _order(12), _normal(12, 5), _normal(4, 3, seed=2)
    if layout == "columns":  # as a capacity that goes by choice leaves them
        weights_TK = weights_TK.detach().T.contiguous().T.requires_grad_()
    want_TD = torch.zeros(4, 5, dtype=torch.float64)
    for place, slot in enumerate(slots.index_N.tolist()):
        want_TD[slot // 3] += weights_TK[slot // 3, slot % 3].detach() * rows_ND[place].detach()
    torch.testing.assert_close(combine_tokens(rows_ND, weights_TK, slots), want_TD)
    assert torch.autograd.gradcheck(
        lambda rows, weights: combine_tokens(rows, weights, slots), (rows_ND, weights_TK)
    )


def test_combine_undoes_gather() -> None:
    slots, x_TD, weights_TK = _order(12), _normal(4, 5), _normal(4, 3, seed=2)
    y_TD = combine_tokens(gather_tokens(x_TD, slots, top_k=3), weights_TK, slots)
    torch.testing.assert_close(y_TD, weights_TK.sum(1, keepdim=True) * x_TD)


def test_sums_are_in_float32() -> None:
    # 256 + 1 + 1: in bfloat16 each 1 would be lost, as 257 lies half way to 258.
    slots, rows_ND = Permutation(torch.arange(3)), torch.tensor([[256.0], [1.0], [1.0]])
    y_TD = combine_tokens(rows_ND.bfloat16(), torch.ones(1, 3), slots)
    assert y_TD.dtype == torch.bfloat16
    assert y_TD.item() == 258.0
    x_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_tokens(x_TD, slots, top_k=3).backward(rows_ND.bfloat16())
    assert x_TD.grad is not None
    assert x_TD.grad.item() == 258.0


def test_gradient_of_the_weights_keeps_their_dtype() -> None:
    slots, rows_ND = Permutation(torch.tensor([1, 0])), torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    weights_TK = torch.tensor([[0.5, 0.25]], requires_grad=True)
    y_TD = combine_tokens(rows_ND.bfloat16(), weights_TK, slots)
    assert y_TD.tolist() == [[3.0, 4.25]]
    y_TD.backward(torch.tensor([[1.0, 10.0]]).bfloat16())
    assert weights_TK.grad is not None
    assert weights_TK.grad.dtype == torch.float32
    assert weights_TK.grad.tolist() == [[75.0, 32.0]]


def test_no_tokens() -> None:
    slots = Permutation(torch.zeros(0, dtype=torch.int64))
    x_TD, weights_TK = (torch.zeros(0, n, requires_grad=True) for n in (5, 2))
    rows_ND = gather_tokens(x_TD, slots, top_k=2)
    combine_tokens(rows_ND, weights_TK, slots).sum().backward()
    assert (x_TD.grad is not None and x_TD.grad.shape) == (0, 5)
    assert (weights_TK.grad is not None and weights_TK.grad.shape) == (0, 2)
