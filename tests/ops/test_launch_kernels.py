"""Compile kernels before their launches. The compiler is replaced, because it needs a GPU."""

import inspect
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import _async_compile

from halley.ops.kernels import launch
from halley.ops.kernels.launch import Launcher, compile_only, only_compiles


class Kernel:
    """Records compilations and launches; compiles in the threads that Triton would use."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        mode = _async_compile.active_mode.get()
        assert mode is not None
        others = list(inspect.signature(mode.submit).parameters)[2:]  # one before Triton 3.9
        compile_fn = lambda: self.compiled.append((args, options))  # noqa: E731
        return mode.submit(args, compile_fn, *[lambda _: None for _ in others])

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.launched.append((args, options))
            return SimpleNamespace(name="kernel", function=1)

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = Kernel()

    def direct(binary: Any, num_programs: int) -> Any:
        return lambda stream, args: made.launched.append((args, num_programs))

    monkeypatch.setattr(launch, "DirectLaunch", direct)
    return made


def test_nothing_is_launched_while_kernels_are_compiled(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(4)
    options: Any = {"num_warps": 8, "max_registers": 96, "overlaps": True}
    with compile_only(2):
        assert only_compiles()
        launcher(3, (x, 1), (64,), **options)
        launcher(3, (x, 1), (128,), **options)
    assert not only_compiles()
    assert kernel.launched == []
    constants = sorted(args[-1] for args, _ in kernel.compiled)
    assert constants == [64, 128]

    launcher(3, (x, 1), (64,), **options)  # outside of compile_only, so it launches
    assert kernel.launched == [kernel.compiled[constants.index(64)]]
    launcher(3, (x, 2), (64,), **options)
    assert kernel.launched[1:] == [((x, 2), 3)]
    with compile_only(2):  # nothing to compile, and no launch
        launcher(3, (x, 3), (64,), **options)
    assert len(kernel.launched) == 2
    assert len(kernel.compiled) == 2


def test_nested_compile_only_compiles_at_the_end_of_the_outer_one(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(4)
    with compile_only(1):
        for constant in (64, 128):
            with compile_only(1):
                launcher(3, (x, 1), (constant,))
            assert only_compiles()
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_error_of_the_compiler_is_raised(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        future: Future[None] = Future()
        future.set_exception(RuntimeError("out of resources"))
        return future.result()

    monkeypatch.setattr(kernel, "warmup", fail)
    with pytest.raises(RuntimeError, match="out of resources"), compile_only(1):
        Launcher(kernel)(3, (torch.zeros(4),), (64,))
    assert not only_compiles()
