"""Protocol mistakes for tests: replace lines of a device function in the interpreter."""

import inspect
import textwrap
from dataclasses import KW_ONLY, dataclass

import pytest
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction

from tests.fused.kernel_case import KernelCase


@dataclass(frozen=True)
class Mutation:
    """A mistake: lines of one device function, and the wrong lines that replace them.

    Attributes:
        function: a ``triton.jit`` function.
        edits: pairs of old text, which occurs once, and new text.
        case: sizes with which the mistake has an effect.
        timeout_s: time limit of waits.
        first_seed: first seed to try: one that shows the mistake, which saves time.
    """

    function: object
    edits: tuple[tuple[str, str], ...]
    _: KW_ONLY
    case: KernelCase
    timeout_s: float = 30.0
    first_seed: int = 0


def apply(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter run the mutated source of the function."""
    function = mutation.function
    assert isinstance(function, InterpretedFunction)
    source = textwrap.dedent(inspect.getsource(function.fn))
    source = source[source.index("def ") :]
    for old, new in mutation.edits:
        assert source.count(old) == 1, f"{old!r} must occur once in {function.fn.__name__}"
        source = source.replace(old, new)
    rewriter = FunctionRewriter(function.fn, **function.kwargs)
    rewriter.filename, rewriter.def_file_lineno = "<mutation>", 1
    mutated = rewriter._compile_and_exec(rewriter._transform_ast(source))
    monkeypatch.setitem(InterpretedFunction.rewritten_fn, function.fn, mutated)
