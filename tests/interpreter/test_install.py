"""``install`` refuses interpreters that it cannot repair, and leaves a compiling Triton alone."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from halley.interpreter import install as module
from halley.interpreter import numerics, sanitizer


def test_second_call_changes_nothing() -> None:
    module.install()
    before = (tl.load, InterpreterBuilder.create_masked_load, InterpreterBuilder.binary_op)
    module.install()
    assert before == (tl.load, InterpreterBuilder.create_masked_load, InterpreterBuilder.binary_op)


def _truncate(values: Any) -> Any:
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "wrong"),
    [
        (numerics, "round_to_bfloat16", numerics.round_to_bfloat16, []),
        (numerics, "round_to_bfloat16", _truncate, ["rounding to bfloat16"]),
        (
            numerics,
            "_is_bfloat16",
            lambda handle: False,
            ["bfloat16 dot", "rounding to bfloat16", "bfloat16 comparison"],
        ),
        (sanitizer.Allowed, "check", lambda *args: None, ["address sanitizer"]),
    ],
    ids=["none", "truncation", "integers", "no bounds"],
)
def test_probe_kernel_finds_a_missing_repair(
    owner: Any, name: str, fault: Any, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert module._find_wrong_values() == wrong


def test_other_internals_are_an_error_that_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "__version__", "4.5.6")
    with monkeypatch.context() as patch:
        for part in ("numerics", "coresident"):
            patch.setattr(getattr(module, part), "install", lambda: None)
        patch.setattr(module, "cache_types", lambda: None)
        patch.setattr(module, "_find_wrong_values", lambda: ["atomic addition"])
        message = r"interpreter of triton 4\.5\.6 gives wrong values: atomic addition"
        with pytest.raises(RuntimeError, match=message):
            module.install.__wrapped__()
    monkeypatch.delattr(InterpreterBuilder, "create_dot")
    with pytest.raises(RuntimeError, match=r"interpreter of triton 4\.5\.6 cannot be repaired"):
        module.install.__wrapped__()


def test_only_an_interpreting_triton_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tl, "zeros", object())  # an InterpretedFunction only in the interpreter
    before = GridExecutor.__call__, dict(vars(InterpreterBuilder))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    module.install.__wrapped__()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="must be set before triton is first imported"):
        module.install.__wrapped__()
    assert (GridExecutor.__call__, dict(vars(InterpreterBuilder))) == before


@pytest.mark.parametrize("first", ["halley.compiler", "halley.fused.op"])
def test_any_module_may_be_imported_first(first: str) -> None:
    """Inductor may be the first to import Triton, which then reads TRITON_INTERPRET."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    code = f"import {first}, halley.interpreter; assert halley.interpreter.INTERPRETED"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)
