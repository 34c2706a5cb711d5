"""Where the installed transformers lets an implementation of experts in."""

import importlib
import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Literal


NEWEST = (5, 23)  # the newest minor version that the tests run with

_EXPERTS = "transformers.integrations.moe"
# Since 5.22, before it.
_STYLES = ("transformers.distributed.expert_parallel", "transformers.distributed.tensor_parallel")

# How tokens get to the experts: by an implementation with a name, 5.23 and later; by the style of
# every model's plan, 5.19 to 5.22; by nothing that knows of all-to-all, 5.0 to 5.18.
SeamName = Literal["ep_implementation", "parallel_style", "experts_function"]


@dataclass(frozen=True, kw_only=True)
class Seams:
    """What the installed transformers has.

    Attributes:
        version: as the package says it.
        name: the best of its seams.
        experts: module with ``ExpertsInterface``.
        parallel: module with the seam's classes; None for "experts_function".
    """

    version: str
    name: SeamName
    experts: Any
    parallel: Any

    def experts_function(self, name: str) -> Any:
        """Return an experts function of transformers' own."""
        return self.experts.ExpertsInterface()[name]


def find_seams() -> Seams:
    """Return the seams of the installed transformers, judged by what is there.

    Raises:
        ValueError: transformers is missing, too old, or so new that its seams have changed.
    """
    try:
        version = str(importlib.import_module("transformers").__version__)
    except ImportError as error:
        raise ValueError(
            "package transformers must be installed: pip install 'halley-moe[hf]'"
        ) from error
    experts = _find_module(_EXPERTS, "ExpertsInterface")
    if experts is None:
        raise ValueError(
            f"transformers ({version}) must be 5.0 or newer: this one has no interface for experts"
        )
    if _is_newer(version):
        warnings.warn(
            f"transformers ({version}) is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that "
            "Halley is tested with",
            stacklevel=3,
        )
    implementations = _find_module(_STYLES[0], "EPImplementationInterface")
    if implementations is not None:
        wanted = ("self", "experts", "ep_mesh", "tp_mesh")
        _check_arguments(implementations.EPImplementation.__init__, wanted, version=version)
        return Seams(
            version=version, name="ep_implementation", experts=experts, parallel=implementations
        )
    for place in _STYLES:
        styles = _find_module(place, "EpDispatchExpertsParallel")
        if styles is not None:
            wanted = ("self", "module", "ep_mesh", "tp_mesh")
            install = styles.EpDispatchExpertsParallel.install_forward
            _check_arguments(install, wanted, version=version)
            return Seams(version=version, name="parallel_style", experts=experts, parallel=styles)
    return Seams(version=version, name="experts_function", experts=experts, parallel=None)


def _find_module(name: str, attribute: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, attribute) else None


def _is_newer(version: str) -> bool:
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) > NEWEST


def _check_arguments(function: Any, wanted: tuple[str, ...], *, version: str) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != wanted:
        raise ValueError(
            f"transformers ({version}) must be {NEWEST[0]}.{NEWEST[1]} or older: "
            f"{function.__qualname__} takes {', '.join(found)}, not {', '.join(wanted)}"
        )
