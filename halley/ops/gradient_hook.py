"""The operator by which a compiled backward pass hands a gradient to who waits for it.

Autograd gives parameters their gradients when a whole backward graph has ended. A parameter with
the attribute ``take_gradient``, a function of a tensor, gets its there while the graph runs. That
tensor's memory is the graph's: what is to stay is copied.
"""

from collections.abc import Callable

import torch


_TAKE = "take_gradient"
_library = torch.library.Library("halley", "FRAGMENT")
# Compilers drop what has no results, unless it says that it writes.
_library.define(
    "hand_over(Tensor(a!) gradient, Tensor parameter) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def find_taker(parameter: object) -> Callable[[torch.Tensor], None] | None:
    """Return what takes a parameter's gradients, if anything does."""
    return getattr(parameter, _TAKE, None)


def set_taker(parameter: torch.nn.Parameter, take: Callable[[torch.Tensor], None]) -> None:
    """Have something take a parameter's gradients in graphs that are compiled from now on."""
    setattr(parameter, _TAKE, take)


def _hand_over(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    take = find_taker(parameter)
    if take is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has no {_TAKE}, which that had with "
            "which its graph was compiled"
        )
    take(gradient)


_library.impl("hand_over", _hand_over, "CompositeExplicitAutograd")


@torch.library.register_fake("halley::hand_over", lib=_library)
def _fake_hand_over(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    return None


hand_over = torch.ops.halley.hand_over.default
