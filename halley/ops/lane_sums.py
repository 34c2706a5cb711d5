"""Sums over the lanes of a divided batch, for results that depend on all tokens of the batch.

``halley.lanes`` can divide a batch into lanes of equal size and compute the results of the whole
batch. The code of a lane calls these functions while ``torch.compile`` traces it. Anywhere else
the batch is one lane, and they add no operator to a graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from halley.ops.library import define


_num_lanes: ContextVar[int] = ContextVar("num_lanes", default=1)


def num_lanes() -> int:
    """Return how many lanes of equal size the batch is divided into; 1 if it is not divided."""
    return _num_lanes.get()


# Dynamo calls the function and keeps its result. The public decorator,
# ``torch.compiler.assume_constant_result``, would import Dynamo here, which takes seconds.
num_lanes._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def trace_lane(num_lanes: int) -> Iterator[None]:
    """Make code that is traced in this context the code of one of ``num_lanes`` lanes."""
    token = _num_lanes.set(num_lanes)
    try:
        yield
    finally:
        _num_lanes.reset(token)


def sum_over_lanes(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``x`` over all lanes of the batch, without a gradient; same shape.

    Example: counts of tokens [1, 2] in lane 0 and [3, 0] in lane 1 give [4, 2] in both.
    """
    return x if num_lanes() == 1 else _sum_over_lanes(x, False)


def sum_over_earlier_lanes(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``x`` over the lanes before this one, without a gradient; same shape.

    Example: counts of tokens [1, 2] in lane 0 and [3, 0] in lane 1 give [0, 0] and [1, 2].
    """
    return torch.zeros_like(x) if num_lanes() == 1 else _sum_over_lanes(x, True)


# The implementation is that of a batch that is one lane. In a divided batch, the executor of
# ``halley.lanes`` adds the values of several lanes.
_sum_over_lanes = define(
    "sum_over_lanes(Tensor x, bool earlier) -> Tensor",
    lambda x, earlier: torch.zeros_like(x) if earlier else x.clone(),
    fake=lambda x, earlier: torch.empty_like(x),
)
