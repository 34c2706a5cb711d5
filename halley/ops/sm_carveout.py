"""Run GEMMs that leave some SMs free for a concurrent collective.

A GEMM of cuBLAS or CUTLASS occupies every SM from start to end. A collective that is launched a
moment later waits until the GEMM is done. If the collective runs already, the GEMM's CTAs that find
no SM wait for all others. With an SM carve-out, the GEMM runs on the remaining SMs only.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F

from halley.ops.library import define


def has_sm_carveout() -> bool:
    """Return whether this version of torch has the experimental setting for SM carve-outs."""
    return hasattr(torch._C, "_set_sm_carveout_experimental")


@contextlib.contextmanager
def sm_carveout(num_sms: int) -> Generator[None, None, None]:
    """Make dense and grouped GEMMs launched in the ``with`` block leave ``num_sms`` SMs free."""
    if num_sms == 0:
        yield
        return
    previous = torch._C._get_sm_carveout_experimental()
    library = torch.backends.cuda.preferred_blas_library()
    # In dense GEMMs, torch passes the carve-out to cuBLASLt, but not to cuBLAS: use cuBLASLt here.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        torch._C._set_sm_carveout_experimental(previous)


def _gemm_with_carveout(
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None,
    num_sms: int,
) -> torch.Tensor:
    """Return ``left @ right``, plus ``bias`` if dense; on a GPU, leave ``num_sms`` SMs free.

    With ``ends``, the end of each group, int32, it is a grouped GEMM without bias, else dense.
    """
    with sm_carveout(num_sms if left.is_cuda else 0):
        if ends is not None:
            return F.grouped_mm(left, right, offs=ends)
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _fake_gemm_with_carveout(_bias: Any, left: Any, right: Any, ends: Any, _: int) -> torch.Tensor:
    groups = () if ends is None or right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


define(
    "gemm_with_carveout(Tensor? bias, Tensor left, Tensor right, Tensor? ends, int num_sms)"
    " -> Tensor",
    _gemm_with_carveout,
    _fake_gemm_with_carveout,
)
gemm_with_carveout = torch.ops.halley.gemm_with_carveout.default
