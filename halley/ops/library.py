"""How operators of the fused kernels are made known to torch.

They are defined on the library, past ``custom_op``, which takes another 4 us a call, and called
past the dispatcher, which takes 9 us, where nobody traces or records.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


# By name, the functions of operators that torch's own could stand for. One node each is what
# compilers want that move or divide them; one that makes kernels wants to see inside.
MADE_OF_TORCH: dict[str, Callable[..., Any]] = {}

_library = torch.library.Library("halley", "FRAGMENT")
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    # The host reads the size of a plan, unless the workspaces bound it, which no schema knows.
    torch.Tag.cudagraph_unsafe,
)


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    made_of_torch: bool = False,
) -> Callable[..., Any]:
    """Define ``halley::<schema>``; return what calls it by the shortest way.

    Args:
        schema: name, arguments and results, as torch writes them.
        run: the operator on tensors.
        fake: its results without values.
        setup_context, backward: its gradient, as ``torch.library.register_autograd`` wants them;
            without, wanting one is an error.
        made_of_torch: whether ``run`` can be traced on tensors of a GPU: it reads none of them.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, _opaque(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"halley::{name}", fake, lib=_library)
    torch.library.register_autograd(
        f"halley::{name}", backward or _refuse, setup_context=setup_context, lib=_library
    )
    operator = getattr(torch.ops.halley, name).default
    if made_of_torch:
        MADE_OF_TORCH[f"halley::{name}"] = run

    def call(first: torch.Tensor, *others: object) -> Any:
        return (run if _is_plain(first) else operator)(first, *others)

    return call


def takes_kernels(tensor: torch.Tensor) -> bool:
    """Return whether an operator on a tensor may launch Halley's kernels, compiled for its GPU."""
    return tensor.is_cuda and _compiles_kernels()


@cache
def _compiles_kernels() -> bool:
    if find_spec("triton") is None:  # not on Linux
        return False
    from halley.interpreter.switch import INTERPRETED

    return not INTERPRETED


def _opaque(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs an operator unseen: behind a graph break Dynamo would trace into it.

    Hidden only once Dynamo is there: it takes seconds to import, and imports Triton, before whose
    first import it must be known how kernels run.
    """
    hidden: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return run(*args)
        if not hidden:
            hidden.append(torch.compiler.disable(run))
        return hidden[0](*args)

    return call


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _refuse(ctx: object, *gradients: object) -> None:
    raise RuntimeError("the halves of a fused layer have gradients together: call fused_experts")
