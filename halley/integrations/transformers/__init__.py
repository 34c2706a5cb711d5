"""Experts of Hugging Face's transformers run by Halley; see docs/huggingface.md."""

from halley.integrations.contract import describe
from halley.integrations.transformers.register import NAME, register, unregister
from halley.integrations.transformers.shard import full_state_dict, shard_experts
from halley.integrations.transformers.shared_experts import overlap_shared_experts


__all__ = [
    "NAME",
    "describe",
    "full_state_dict",
    "overlap_shared_experts",
    "register",
    "shard_experts",
    "unregister",
]
