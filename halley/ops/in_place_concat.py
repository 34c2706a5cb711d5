"""Operators that concatenate microbatch results by writing each into one preallocated tensor.

The write operators change their first argument and return it. Each takes the result of the
previous write, so the data flow orders them, and only the result of the last write is the full
tensor. They have no gradients: the compiler inserts them into graphs whose backward exists already.

Rows that are sorted by destination need an index. Every microbatch has its rows sorted by
destination; in the full batch, the rows of one destination are adjacent, and those of earlier
microbatches come first.

Example: microbatch 0 has counts [1, 1] and rows a b; microbatch 1 has counts [2, 0] and rows c d.
The full batch is a c d b. ``rows_of_microbatch`` returns 0 3 for microbatch 0 and 1 2 for
microbatch 1. ``concat_order`` returns 0 2 3 1, which indexes the concatenation a b c d.
"""

from collections.abc import Callable

import torch

from halley.ops.library import define, takes_kernels
from halley.ops.traceable_routing import group_rows


_library = torch.library.Library("halley", "FRAGMENT")


def _define_write(schema: str, run: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halley::{name}", lambda full, *_: full, lib=_library)


def _write_slice(full: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """Write ``part`` into ``full`` along ``dim``, from index ``start`` on; return ``full``."""
    full.narrow(dim, start, part.shape[dim]).copy_(part)
    return full


def _write_rows(full: torch.Tensor, part: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Write row i of ``part`` to row ``places[i]`` of ``full``; return ``full``."""
    return full.index_copy_(0, places, part)


def _rows_of_microbatch(
    counts: torch.Tensor, num_microbatches: int, index: int, num_rows: int
) -> torch.Tensor:
    """Return the place in the full batch of each row of one microbatch, int64 ``(num_rows,)``.

    Args:
        counts: rows of each destination, one microbatch after another, int64.
        num_microbatches: number of microbatches.
        index: which microbatch.
        num_rows: rows of this microbatch.
    """
    if takes_kernels(counts):
        from halley.ops.kernels import route

        return route.rows_of_microbatch(counts, num_microbatches, index, num_rows)
    counts_MS = counts.view(num_microbatches, -1)
    in_full = counts_MS.t().flatten()
    starts_MS = (in_full.cumsum(0) - in_full).view(-1, num_microbatches).t()
    ends_S = counts_MS[index].cumsum(0)
    shift_S = starts_MS[index] - ends_S + counts_MS[index]
    row_R = torch.arange(num_rows, device=counts.device)
    return row_R + shift_S.index_select(0, torch.searchsorted(ends_S, row_R, right=True))


def _concat_order(counts: torch.Tensor, num_microbatches: int, num_rows: int) -> torch.Tensor:
    """Return the index that sorts concatenated microbatches as the full batch, int64.

    Args:
        counts: rows of each destination, one microbatch after another, int64.
        num_microbatches: number of microbatches.
        num_rows: rows of the full batch.
    """
    return group_rows(counts.view(num_microbatches, -1), num_rows=num_rows).order_R


_define_write(
    "write_slice(Tensor(a!) full, Tensor part, int dim, SymInt start) -> Tensor(a!)", _write_slice
)
_define_write("write_rows(Tensor(a!) full, Tensor part, Tensor places) -> Tensor(a!)", _write_rows)
define(
    "rows_of_microbatch(Tensor counts, int num_microbatches, int index, SymInt num_rows) -> Tensor",
    _rows_of_microbatch,
    lambda counts, num_microbatches, index, num_rows: counts.new_empty(num_rows),
)
define(
    "concat_order(Tensor counts, int num_microbatches, SymInt num_rows) -> Tensor",
    _concat_order,
    lambda counts, num_microbatches, num_rows: counts.new_empty(num_rows),
)
write_slice = torch.ops.halley.write_slice.default
write_rows = torch.ops.halley.write_rows.default
rows_of_microbatch = torch.ops.halley.rows_of_microbatch.default
concat_order = torch.ops.halley.concat_order.default
