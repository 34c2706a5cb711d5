"""GEMMs with an SM carve-out have torch's values and leave torch's state unchanged."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from halley.ops.sm_carveout import gemm_with_carveout, has_sm_carveout, sm_carveout
from tests.gpus import needs_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def _randn(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("num_sms", [0, 8])
def test_dense_gemms_equal_torchs(device: torch.device, num_sms: int) -> None:
    left, right = _randn(96, 64, device=device), _randn(64, 32, device=device, seed=1)
    bias = _randn(32, device=device, seed=2)
    for given, want in ((None, left @ right), (bias, torch.addmm(bias, left, right))):
        found = gemm_with_carveout(given, left, right, None, num_sms)
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("num_sms", [0, 8])
def test_grouped_gemms_equal_torchs(device: torch.device, num_sms: int) -> None:
    rows, grad = _randn(96, 64, device=device), _randn(96, 32, device=device, seed=1)
    weights = _randn(3, 64, 32, device=device, seed=2)
    ends = torch.tensor([40, 40, 96], dtype=torch.int32, device=device)  # one group is empty
    for left, right in ((rows, weights), (rows.t(), grad)):
        found = gemm_with_carveout(None, left, right, ends, num_sms)
        torch.testing.assert_close(found, F.grouped_mm(left, right, offs=ends))
    opcheck(gemm_with_carveout, (None, rows, weights, ends, num_sms))


@needs_gpu
@pytest.mark.skipif(not has_sm_carveout(), reason="this torch has no SM carve-out")
def test_carveout_ends_with_its_context() -> None:
    get = torch._C._get_sm_carveout_experimental
    library = torch.backends.cuda.preferred_blas_library()
    with sm_carveout(8):
        assert get() == 8
        with sm_carveout(16), sm_carveout(0):
            assert get() == 16
        assert get() == 8
    assert get() is None
    assert torch.backends.cuda.preferred_blas_library() == library
