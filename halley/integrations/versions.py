"""Whether an installed framework is one that a plug-in knows, judged by what is there."""

import importlib
import inspect
import warnings
from types import ModuleType
from typing import Any


def find_version(package: str, *, install: str) -> str:
    """Return the version of a framework, as it says it.

    Args:
        package: what is imported.
        install: what pip brings it by.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if not f"{package}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"package {package} must be installed: pip install {install}") from error


def find_module(name: str, attribute: str) -> ModuleType | None:
    """Return a module that has an attribute, or None where there is no such module."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and needs a package that is not
        return None
    return module if hasattr(module, attribute) else None


def import_parts(
    package: str, parts: dict[str, str], *, install: str, newest: tuple[int, int]
) -> list[Any]:
    """Return parts of a framework; for a plug-in that cannot be imported without them.

    A version newer than the tests' is warned of.

    Args:
        package: what is imported, and what users call it.
        parts: modules by the parts that are taken from them.
        install, newest: as for ``find_version`` and ``warn_if_newer``.

    Raises:
        ImportError: the framework is not installed, or lacks a part.
    """
    try:
        version = find_version(package, install=install)
    except ValueError as error:
        raise ImportError(str(error)) from error
    warn_if_newer(package, version, newest)
    found: list[Any] = []
    for part, name in parts.items():
        module = find_module(name, part)
        if module is None:
            raise ImportError(
                f"{package} ({version}) must be {newest[0]}.{newest[1]}, which Halley is tested "
                f"with: this one has no {name}.{part}"
            )
        found.append(getattr(module, part))
    return found


def warn_if_newer(package: str, version: str, newest: tuple[int, int]) -> None:
    """Warn of a version past the newest minor one that the tests run with.

    Args:
        package: as users call it.
        version: as from ``find_version``.
        newest: major and minor.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) > newest:
        warnings.warn(
            f"{package} ({version}) is newer than {newest[0]}.{newest[1]}, the newest that "
            "Halley is tested with",
            stacklevel=4,
        )


def check_arguments(
    function: Any, wanted: tuple[str, ...], *, package: str, newest: tuple[int, int]
) -> None:
    """Check that a function takes what a plug-in gives it.

    Args:
        function: of the framework.
        wanted: names of all its parameters.
        package, newest: as for ``warn_if_newer``.

    Raises:
        ValueError: it takes others.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != wanted:
        version = importlib.import_module(package).__version__
        raise ValueError(
            f"{package} ({version}) must be {newest[0]}.{newest[1]} or older: "
            f"{function.__qualname__} takes {', '.join(found)}, not {', '.join(wanted)}"
        )
