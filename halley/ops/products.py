"""Matrix products that leave multiprocessors to a collective, or write where they are told.

Those of cuBLAS and CUTLASS take every multiprocessor of a GPU from their beginning to their end. A
collective that starts a moment later waits until they are done, and where one runs already, the
blocks that find no place wait for all others. With some left free neither happens.
"""

import contextlib
from collections.abc import Generator

import torch
import torch.nn.functional as F

from halley.ops.library import define


_library = torch.library.Library("halley", "FRAGMENT")


def has_sm_margin() -> bool:
    """Return whether this torch's products can be told to leave multiprocessors free.

    It calls that an experiment, which may go.
    """
    return hasattr(torch._C, "_set_sm_carveout_experimental")


@contextlib.contextmanager
def leave_sms(sm_margin: int) -> Generator[None, None, None]:
    """Have dense and grouped products leave multiprocessors free that are launched meanwhile.

    Args:
        sm_margin: how many; with 0 nothing changes.
    """
    if sm_margin == 0:
        yield
        return
    margin = torch._C._get_sm_carveout_experimental()
    library = torch.backends.cuda.preferred_blas_library()
    # To the older of cuBLAS's two interfaces torch says nothing of it.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(sm_margin)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        torch._C._set_sm_carveout_experimental(margin)


def _product_beside(
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None,
    sm_margin: int,
) -> torch.Tensor:
    """Return ``left @ right`` by a kernel that leaves multiprocessors free.

    Args:
        bias: added to each row; None for none.
        left, right: matrices; of a grouped product as in ``torch.nn.functional.grouped_mm``.
        ends: ends of groups, int32, for a grouped product, which has no bias.
        sm_margin: how many are left free, on a GPU.
    """
    with leave_sms(sm_margin if left.is_cuda else 0):
        if ends is not None:
            return F.grouped_mm(left, right, offs=ends)
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _fake_product_beside(
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None,
    sm_margin: int,
) -> torch.Tensor:
    groups = () if ends is None or right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _product_into(
    out: torch.Tensor,
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    sm_margin: int,
) -> None:
    """Write ``left @ right`` into ``out``; arguments as of ``_product_beside``."""
    with leave_sms(sm_margin if out.is_cuda else 0):
        if bias is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(bias, left, right, out=out)


define(
    "product_beside(Tensor? bias, Tensor left, Tensor right, Tensor? ends, int sm_margin)"
    " -> Tensor",
    _product_beside,
    _fake_product_beside,
)
# Compilers drop what has no results, unless it says that it writes.
_library.define(
    "product_into(Tensor(a!) out, Tensor? bias, Tensor left, Tensor right, int sm_margin) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("product_into", _product_into, "CompositeExplicitAutograd")
torch.library.register_fake("halley::product_into", lambda *_: None, lib=_library)
product_beside = torch.ops.halley.product_beside.default
product_into = torch.ops.halley.product_into.default
