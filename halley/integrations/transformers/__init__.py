"""Run the routed experts of Hugging Face Transformers models; see docs/transformers.md.

Call ``enable()`` before a model is loaded, or ``enable(model)`` after it is. Start with
``registration.py``.
"""

from torch import nn

from halley.integrations.contract import ExpertRunner, describe, warn_deprecated
from halley.integrations.transformers.registration import (
    NAME,
    Group,
    disable,
    enable,
    full_state_dict,
    shard_model,
)


__all__ = [
    "NAME",
    "describe",
    "disable",
    "enable",
    "full_state_dict",
    "overlap_shared_experts",
    "register",
    "shard_experts",
    "unregister",
]


def register(strategy: str = "auto", *, strict: bool = False, default: bool = False) -> str:
    """Deprecated name of ``enable``; its ``default`` was False."""
    warn_deprecated("register", "halley.integrations.transformers.enable")
    return enable(strategy=strategy, strict=strict, default=default)


def unregister() -> None:
    """Deprecated name of ``disable``."""
    warn_deprecated("unregister", "halley.integrations.transformers.disable")
    disable()


def shard_experts(
    model: nn.Module, ep_group: Group, *, strategy: str = "auto", strict: bool = False
) -> list[str]:
    """Deprecated name of ``enable(model)``; returns the names of the divided parameters."""
    warn_deprecated("shard_experts", "halley.integrations.transformers.enable(model, group=...)")
    return shard_model(model, ep_group, runner=ExpertRunner(strategy, strict=strict))


def overlap_shared_experts(model: nn.Module) -> list[str]:
    """Do nothing; deprecated: shared experts on a side stream had no measured speed-up."""
    warn_deprecated("overlap_shared_experts", "no call in its place: it has no effect any more")
    return []
