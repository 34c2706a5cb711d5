"""Run the MoE layers of Megatron-Core; see docs/megatron.md.

``enable(spec)`` returns a model spec with Halley's layers. Start with ``moe_layer.py``.
"""

from typing import Any

from halley.integrations.contract import describe, warn_deprecated
from halley.integrations.megatron.moe_layer import HalleyMoELayer, enable, job_spec
from halley.integrations.megatron.stacked_experts import StackedExperts


__all__ = [
    "HalleyMoELayer",
    "StackedExperts",
    "describe",
    "enable",
    "job_spec",
    "layer_spec",
    "use_halley",
]

# Megatron-LM reads this attribute for ``--spec`` and accepts a spec object only, not a function.
layer_spec = job_spec()


def use_halley(spec: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Deprecated name of ``enable``."""
    warn_deprecated("use_halley", "halley.integrations.megatron.enable")
    return enable(spec, strategy=strategy, strict=strict)
