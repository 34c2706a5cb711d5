"""Operators that write parts of a tensor into one buffer, each as soon as it is there.

Unlike other operators they write to their first argument, and return it: each takes the result of
the one before, so that data alone orders them, and only the result of the last is the tensor. They
have no gradients: graphs for which they are made have their backward already.
"""

from collections.abc import Callable

import torch

from halley.ops.library import define, takes_kernels


_library = torch.library.Library("halley", "FRAGMENT")


def _define(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halley::{name}", fake, lib=_library)


def _fill_range(whole: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """Write ``part`` into ``whole`` along ``dim``, from ``start`` on; return ``whole``."""
    whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


def _fill_rows(whole: torch.Tensor, part: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Write row i of ``part`` to row ``places[i]`` of ``whole``; return ``whole``."""
    return whole.index_copy_(0, places, part)


def _places_of_part(counts: torch.Tensor, num_parts: int, part: int, num_rows: int) -> torch.Tensor:
    """Return the places in the whole of the rows of one part, int64.

    ``counts`` are those of part after part. Each has its rows by destination (or source), numbered
    by its counts; in the whole, rows of one destination stand together, those of earlier parts
    first. This is the inverse of what ``order_of_parts`` returns, in the range of the part.

    Args:
        counts: int64, ``num_parts`` times as many as destinations.
        num_parts: of the whole.
        part: which.
        num_rows: of the part.

    Example: counts [1, 1] and [2, 0] of rows a b and c d: the whole has a c d b; those of the first
    part go to 0 and 3, those of the second to 1 and 2.
    """
    if takes_kernels(counts):
        from halley.ops.kernels import route

        return route.places_of_part(counts, num_parts, part, num_rows)
    counts_PS = counts.view(num_parts, -1)
    in_whole = counts_PS.t().flatten()
    starts_PS = (in_whole.cumsum(0) - in_whole).view(-1, num_parts).t()
    ends_S = counts_PS[part].cumsum(0)
    shift_S = starts_PS[part] - ends_S + counts_PS[part]
    row_R = torch.arange(num_rows, device=counts.device)
    return row_R + shift_S.index_select(0, torch.searchsorted(ends_S, row_R, right=True))


def _first(whole: torch.Tensor, *others: object) -> torch.Tensor:
    return whole


def _fake_places(counts: torch.Tensor, num_parts: int, part: int, num_rows: int) -> torch.Tensor:
    return counts.new_empty(num_rows)


_define(
    "fill_range(Tensor(a!) whole, Tensor part, int dim, SymInt start) -> Tensor(a!)",
    _fill_range,
    _first,
)
_define("fill_rows(Tensor(a!) whole, Tensor part, Tensor places) -> Tensor(a!)", _fill_rows, _first)
define(
    "places_of_part(Tensor counts, int num_parts, int part, SymInt num_rows) -> Tensor",
    _places_of_part,
    _fake_places,
)
fill_range = torch.ops.halley.fill_range.default
fill_rows = torch.ops.halley.fill_rows.default
places_of_part = torch.ops.halley.places_of_part.default
