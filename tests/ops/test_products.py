"""Products that leave multiprocessors free: values by torch's own, and torch's state as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from halley.ops.products import has_sm_margin, leave_sms, product_beside, product_into
from tests.gpus import needs_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def _randn(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("sm_margin", [0, 8])
def test_products_are_torchs(device: torch.device, sm_margin: int) -> None:
    left, right = _randn(96, 64, device=device), _randn(64, 32, device=device, seed=1)
    bias = _randn(32, device=device, seed=2)
    for given, want in ((None, left @ right), (bias, torch.addmm(bias, left, right))):
        found = product_beside(given, left, right, None, sm_margin)
        torch.testing.assert_close(found, want)
        whole = torch.zeros(2, 96, 32, dtype=left.dtype, device=device)
        product_into(whole[1], given, left, right, sm_margin)
        torch.testing.assert_close(whole[1], want)
        assert not whole[0].any()


@pytest.mark.parametrize("sm_margin", [0, 8])
def test_grouped_products_are_torchs(device: torch.device, sm_margin: int) -> None:
    rows, grad = _randn(96, 64, device=device), _randn(96, 32, device=device, seed=1)
    weights = _randn(3, 64, 32, device=device, seed=2)
    ends = torch.tensor([40, 40, 96], dtype=torch.int32, device=device)  # one group is empty
    for left, right in ((rows, weights), (rows.t(), grad)):
        found = product_beside(None, left, right, ends, sm_margin)
        torch.testing.assert_close(found, F.grouped_mm(left, right, offs=ends))
    opcheck(product_beside, (None, rows, weights, ends, sm_margin))


@needs_gpu
@pytest.mark.skipif(not has_sm_margin(), reason="this torch has no margin")
def test_margin_ends_with_its_products() -> None:
    get = torch._C._get_sm_carveout_experimental
    library = torch.backends.cuda.preferred_blas_library()
    with leave_sms(8):
        assert get() == 8
        with leave_sms(16), leave_sms(0):
            assert get() == 16
        assert get() == 8
    assert get() is None
    assert torch.backends.cuda.preferred_blas_library() == library
