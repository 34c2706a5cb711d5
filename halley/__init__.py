"""Mixture-of-Experts training whose communication hides behind computation."""

from halley.core.config import MoEConfig, RouterConfig
from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups, sync_gradients
from halley.distributed.watchdog import Watchdog
from halley.moe.layer import MoELayer, MoEOutput
from halley.strategies.registry import build_strategy


__all__ = [
    "ExpertPlacement",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "ParallelGroups",
    "Recorder",
    "RouterConfig",
    "Watchdog",
    "build_groups",
    "build_strategy",
    "sync_gradients",
]
