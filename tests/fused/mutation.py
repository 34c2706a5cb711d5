"""Mistakes made on purpose: other lines in one device function, for the interpreter only."""

import inspect
import textwrap
from dataclasses import dataclass

import pytest
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction

from tests.fused.kernel_case import KernelCase


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Lines of one device function and what stands there instead.

    Attributes:
        function: as ``triton.jit`` made it.
        edits: old text, which stands there once, and new text.
        case: that shows it; None is the case of most.
        timeout_s: of waits.
        first_seed: where to begin to look for a schedule that shows it; saves time, no more.
    """

    function: object
    edits: tuple[tuple[str, str], ...]
    case: KernelCase | None = None
    timeout_s: float = 30.0
    first_seed: int = 0


def apply(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the mutated source in place of the function's."""
    function = mutation.function
    assert isinstance(function, InterpretedFunction)
    source = textwrap.dedent(inspect.getsource(function.fn))
    source = source[source.index("def ") :]
    for old, new in mutation.edits:
        assert source.count(old) == 1, f"{old!r} must stand once in {function.fn.__name__}"
        source = source.replace(old, new)
    rewriter = FunctionRewriter(function.fn, **function.kwargs)
    rewriter.filename, rewriter.def_file_lineno = "<mutation>", 1
    mutated = rewriter._compile_and_exec(rewriter._transform_ast(source))
    monkeypatch.setitem(InterpretedFunction.rewritten_fn, function.fn, mutated)
