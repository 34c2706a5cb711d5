"""Installing the repairs: bad interpreters are refused, a compiling Triton stays unchanged."""

import subprocess
import sys
import time

import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from halley.interpreter import install as module


def _run_python(source: str, *, interpret: str) -> subprocess.CompletedProcess[str]:
    environment = {"TRITON_INTERPRET": interpret, "PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_second_call_changes_nothing() -> None:
    module.install()
    before = (tl.load, InterpreterBuilder.create_masked_load, InterpreterBuilder.binary_op)
    module.install()
    assert before == (tl.load, InterpreterBuilder.create_masked_load, InterpreterBuilder.binary_op)


def test_probe_kernel_is_right_within_50_ms() -> None:
    assert module._find_wrong_values() == []
    durations_ms = []
    for _ in range(5):
        begin = time.perf_counter()
        module._find_wrong_values()
        durations_ms.append((time.perf_counter() - begin) * 1e3)
    assert min(durations_ms) < 50


def test_each_missing_repair_is_found() -> None:
    """Undo one repair after another, in a separate process."""
    source = """
from triton.runtime.interpreter import InterpreterBuilder
names = "cast_impl", "binary_op", "create_dot", "create_masked_store"
original = {name: getattr(InterpreterBuilder, name) for name in names}
from halley.interpreter import install
for name in names:
    repaired = getattr(InterpreterBuilder, name)
    setattr(InterpreterBuilder, name, original[name])
    print(name, install._find_wrong_values())
    setattr(InterpreterBuilder, name, repaired)
"""
    result = _run_python(source, interpret="1")
    assert result.stdout.splitlines() == [
        "cast_impl ['rounding to bfloat16']",
        "binary_op ['bfloat16 comparison']",
        "create_dot ['bfloat16 dot']",
        "create_masked_store ['address sanitizer']",
    ], result.stderr


def test_other_internals_are_an_error_that_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "__version__", "4.5.6")
    for part in ("numerics", "sanitizer", "coresident"):
        monkeypatch.setattr(getattr(module, part), "install", lambda: None)
    monkeypatch.setattr(module, "interpret_assembly", lambda: None)
    monkeypatch.setattr(module, "_find_wrong_values", lambda: ["atomic addition"])
    message = r"interpreter of triton 4\.5\.6 gives wrong values: atomic addition"
    with pytest.raises(RuntimeError, match=message):
        module.install.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(triton, "__version__", "4.5.6")
    monkeypatch.delattr(InterpreterBuilder, "create_dot")
    with pytest.raises(RuntimeError, match=r"interpreter of triton 4\.5\.6 cannot be repaired"):
        module.install.__wrapped__()


def test_only_an_interpreting_triton_is_changed() -> None:
    source = """
import os
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
before = GridExecutor.__call__, dict(vars(InterpreterBuilder))
from halley.interpreter.install import install
install()
assert (GridExecutor.__call__, dict(vars(InterpreterBuilder))) == before
print("unchanged")
os.environ["TRITON_INTERPRET"] = "1"
install.__wrapped__()
"""
    result = _run_python(source, interpret="0")
    assert result.stdout == "unchanged\n"
    message = "RuntimeError: TRITON_INTERPRET=1 must be set before triton is first imported"
    assert message in result.stderr
