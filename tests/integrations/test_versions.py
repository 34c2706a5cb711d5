"""What is said of frameworks that are missing, too old, newer than tested, or changed."""

import importlib
import sys
from types import ModuleType

import pytest

from halley.integrations.versions import (
    check_arguments,
    find_module,
    find_version,
    import_parts,
    warn_if_newer,
)


PARTS = {"Experts": "frame.moe"}


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a framework of version 1.4 with ``frame.moe.Experts``."""
    package, part = ModuleType("frame"), ModuleType("frame.moe")
    vars(package)["__version__"] = "1.4.2"
    vars(part)["Experts"] = object
    monkeypatch.setitem(sys.modules, "frame", package)
    monkeypatch.setitem(sys.modules, "frame.moe", part)
    return package


@pytest.mark.parametrize(
    ("name", "package"),
    [("torchtitan", "torchtitan"), ("megatron", "megatron.core"), ("deepspeed", "deepspeed")],
)
def test_missing_framework_is_one_sentence(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = f"halley.integrations.{name}"
    for each in list(sys.modules):
        if f"{each}.".startswith(f"{plugin}."):
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^package {package} must be installed: pip install"):
        importlib.import_module(plugin)


def test_missing_package_of_a_framework_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'needed'", name="needed")

    monkeypatch.setattr("halley.integrations.versions.importlib.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="needed"):
        find_version("frame", install="frame")
    with pytest.raises(ModuleNotFoundError, match="needed"):
        find_module("frame.moe", "Experts")


def test_parts_are_found(frame: ModuleType) -> None:
    assert import_parts("frame", PARTS, install="frame", newest=(1, 4)) == [object]


def test_missing_part_is_one_sentence(frame: ModuleType) -> None:
    for parts in ({"Router": "frame.moe"}, {"Router": "frame.routing"}):
        said = rf"^frame \(1.4.2\) must be 1.4, .*: this one has no {parts['Router']}.Router$"
        with pytest.raises(ImportError, match=said):
            import_parts("frame", parts, install="frame", newest=(1, 4))


def test_newer_than_tested_is_warned_of(frame: ModuleType) -> None:
    with pytest.warns(UserWarning, match=r"^frame \(1.4.2\) is newer than 1.3, the newest that"):
        assert import_parts("frame", PARTS, install="frame", newest=(1, 3)) == [object]
    warn_if_newer("frame", "1.3.9", (1, 3))


def test_changed_arguments_are_one_sentence(frame: ModuleType) -> None:
    def forward(x: int, weights: int) -> None: ...

    check_arguments(forward, ("x", "weights"), package="frame", newest=(1, 4))
    said = r"^frame \(1.4.2\) must be 1.4 or older: .*forward takes x, weights, not x$"
    with pytest.raises(ValueError, match=said):
        check_arguments(forward, ("x",), package="frame", newest=(1, 4))
