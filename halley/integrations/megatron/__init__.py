"""MoE layers of Megatron-Core run by Halley, by one spec; see docs/megatron.md."""

from halley.integrations.contract import describe
from halley.integrations.megatron.grouped_experts import StackedExperts
from halley.integrations.megatron.moe_layer import HalleyMoELayer
from halley.integrations.megatron.spec import job_spec, use_halley


__all__ = ["HalleyMoELayer", "StackedExperts", "describe", "job_spec", "layer_spec", "use_halley"]

# Megatron-LM takes this name from this module, and wants an object there, no function.
layer_spec = job_spec()
