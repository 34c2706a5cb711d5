"""Train Mixture-of-Experts models with communication overlapped by computation.

``MoE`` is a layer that builds its own groups and strategy. ``MoELayer``, ``build_groups`` and
``build_strategy`` are its parts. To write a strategy, subclass ``AbstractStrategy``. ``compile`` is
``torch.compile`` with Halley's backend. Plug-ins for other frameworks are in
``halley.integrations``.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from halley.core.config import MoEConfig, RouterConfig
from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import Predictor
from halley.distributed.mesh import ParallelGroups, build_groups, sync_gradients
from halley.distributed.watchdog import Watchdog
from halley.moe.layer import MoELayer, MoEOutput
from halley.moe.moe import MoE
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = [
    "AbstractStrategy",
    "ExpertPlacement",
    "Experts",
    "LayerShape",
    "MoE",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "ParallelGroups",
    "Predictor",
    "Recorder",
    "RouterConfig",
    "Routing",
    "Task",
    "Watchdog",
    "__version__",
    "build_groups",
    "build_strategy",
    "compile",
    "sync_gradients",
]

try:
    __version__ = version("halley-moe")
except PackageNotFoundError:  # Halley is not installed: it runs from a source tree
    __version__ = "0+unknown"


def compile(
    function: "Callable[..., Any]", *, fullgraph: bool = True, **options: Any
) -> "Callable[..., Any]":
    """Return a function that runs ``function`` compiled by ``torch.compile`` with Halley's backend.

    Halley's pass schedules weight-gradient GEMMs under all-to-alls. MoE layers must use a strategy
    that can be traced: "functional", "unfused" or "fused".

    Args:
        fullgraph: raise an error where a graph would break, as for ``torch.compile``.
        options: options of the pass, see ``halley.compiler.options.Options``.

    Raises:
        ValueError: an option is unknown or has a value that is not allowed.
    """
    # Imported here, because the imports of Triton and of torch's compiler take seconds.
    from halley.compiler import compile_function

    return compile_function(function, fullgraph=fullgraph, **options)
