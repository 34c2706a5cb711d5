"""Where the installed transformers lets an implementation of experts in."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from halley.integrations.versions import check_arguments, find_module, find_version, warn_if_newer


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
    version = find_version("transformers", install="'halley-moe[hf]'")
    experts = find_module(_EXPERTS, "ExpertsInterface")
    if experts is None:
        raise ValueError(
            f"transformers ({version}) must be 5.0 or newer: this one has no interface for experts"
        )
    warn_if_newer("transformers", version, NEWEST)
    check = partial(check_arguments, package="transformers", newest=NEWEST)
    implementations = find_module(_STYLES[0], "EPImplementationInterface")
    if implementations is not None:
        wanted = ("self", "experts", "ep_mesh", "tp_mesh")
        check(implementations.EPImplementation.__init__, wanted)
        return Seams(
            version=version, name="ep_implementation", experts=experts, parallel=implementations
        )
    for place in _STYLES:
        styles = find_module(place, "EpDispatchExpertsParallel")
        if styles is not None:
            wanted = ("self", "module", "ep_mesh", "tp_mesh")
            install = styles.EpDispatchExpertsParallel.install_forward
            check(install, wanted)
            return Seams(version=version, name="parallel_style", experts=experts, parallel=styles)
    return Seams(version=version, name="experts_function", experts=experts, parallel=None)
