"""An operator in compiled backward graphs that calls a parameter's hook with its gradient.

Autograd gives parameters their gradients when a compiled backward graph has ended. A parameter with
the attribute ``gradient_ready_hook``, a function of one tensor, receives its gradient as soon as
the graph has computed it. A hook must copy the gradient to keep it: the graph owns the memory.
"""

from collections.abc import Callable

import torch


_HOOK = "gradient_ready_hook"
_library = torch.library.Library("halley", "FRAGMENT")
# Declare a write to ``gradient``: compilers remove an operator that neither returns nor writes.
_library.define(
    "run_gradient_hook(Tensor(a!) gradient, Tensor parameter) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def find_gradient_hook(parameter: object) -> Callable[[torch.Tensor], None] | None:
    """Return the gradient-ready hook of a parameter, a function of its gradient; or None."""
    return getattr(parameter, _HOOK, None)


def set_gradient_hook(
    parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None] | None
) -> None:
    """Set or remove a parameter's gradient-ready hook, before the parameter's graph is compiled."""
    setattr(parameter, _HOOK, hook)


def _run_gradient_hook(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    hook = find_gradient_hook(parameter)
    if hook is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has no {_HOOK}, but its graph was "
            "compiled when it had one"
        )
    hook(gradient)


_library.impl("run_gradient_hook", _run_gradient_hook, "CompositeExplicitAutograd")
torch.library.register_fake("halley::run_gradient_hook", lambda *_: None, lib=_library)
run_gradient_hook = torch.ops.halley.run_gradient_hook.default
