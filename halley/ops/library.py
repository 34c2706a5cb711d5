"""Define Halley's operators in ``torch.library`` with little overhead for each call.

Operators are defined on the library directly, because ``torch.library.custom_op`` adds 4 us to a
call. Outside of tracing and autograd, calls bypass the dispatcher, which takes 9 us.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


# Implementations of the operators that can be decomposed into ATen operators, by name. Compiler
# passes need one node for each operator. After them, Inductor decomposes the nodes to fuse kernels.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}

_library = torch.library.Library("halley", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    decomposable: bool = False,
    host_reads: bool = False,
) -> Callable[..., Any]:
    """Define operator ``halley::<schema>``; return a function that calls it with little overhead.

    ``schema``, ``fake``, ``setup_context`` and ``backward`` are as in ``torch.library``. Without
    ``backward``, a backward through the operator is an error. ``decomposable`` means that ``run``,
    the implementation, consists of ATen operators on a GPU and can be traced. ``host_reads`` means
    that the host may read a GPU tensor in ``run``, so no CUDA graph can capture the operator.
    """
    name = schema.partition("(")[0]
    tags = (*_TAGS, torch.Tag.cudagraph_unsafe) if host_reads else _TAGS
    _library.define(schema, tags=tags)
    _library.impl(name, _opaque(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"halley::{name}", fake, lib=_library)
    torch.library.register_autograd(
        f"halley::{name}", backward or _refuse, setup_context=setup_context, lib=_library
    )
    operator = getattr(torch.ops.halley, name).default
    if decomposable:
        DECOMPOSITIONS[f"halley::{name}"] = run

    def call(first: torch.Tensor, *others: object) -> Any:
        return (run if _is_plain(first) else operator)(first, *others)

    return call


def takes_kernels(tensor: torch.Tensor) -> bool:
    """Return whether operators on a tensor run Triton kernels: on a GPU where Triton compiles."""
    return tensor.is_cuda and _compiles_kernels()


@cache
def _compiles_kernels() -> bool:
    if find_spec("triton") is None:  # Triton is not installed, as on macOS
        return False
    from halley.interpreter import INTERPRETED

    return not INTERPRETED


def _opaque(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``run``: Dynamo traces neither ``run`` nor functions it calls.

    The wrapper does not import Dynamo itself, because that takes seconds and imports Triton. Before
    Triton's first import, ``halley.interpreter`` must have chosen how kernels run.
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
    is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return type(tensor) is torch.Tensor and not is_traced


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(*inputs)


def _refuse(ctx: object, *gradients: object) -> None:
    raise RuntimeError("this operator has no gradient: differentiate the operator that calls it")
