"""Experts of Hugging Face's transformers run by Halley; see docs/huggingface.md."""

from halley.integrations.contract import describe
from halley.integrations.huggingface.register import NAME, register, unregister
from halley.integrations.huggingface.shard import full_state_dict, shard_experts
from halley.integrations.huggingface.shared import overlap_shared_experts


__all__ = [
    "NAME",
    "describe",
    "full_state_dict",
    "overlap_shared_experts",
    "register",
    "shard_experts",
    "unregister",
]
