"""Raise ``ValueError`` for a model that cannot fit into device memory, before it is allocated.

The estimates are lower bounds: a model that passes the check may still run out of memory.
"""

import os
from typing import NamedTuple

import torch

from halley.core.config import ModelConfig, MoEConfig, RunConfig
from halley.core.types import DTYPES


_FLOAT32_BYTES = 4
_ADAM_STATES = 2  # Adam's first and second moment, float32


def check_memory(
    config: RunConfig, *, num_ranks: int, device: torch.device, num_sharing: int = 1
) -> None:
    """Raise ``ValueError`` if the ``training_bytes`` of all ranks on a device exceed its memory.

    For a GPU, the check creates a CUDA context in this process. ``num_sharing`` ranks share the
    device's memory, such as all CPU ranks of a host.
    """
    needed = training_bytes(config, num_ranks=num_ranks) * num_sharing
    sizes = model_sizes(config.model, prefix="model.", moe_prefix="model.moe.") | {
        "train.batch_size": config.train.batch_size,
        "data.seq_len": config.data.seq_len,
    }
    ranks = "a rank" if num_sharing == 1 else f"the {num_sharing} ranks that share it"
    check_fits(needed, sizes, device=device, use=f"of training state on {ranks}")


def model_sizes(config: ModelConfig, *, prefix: str = "", moe_prefix: str = "") -> dict[str, int]:
    """Return the main sizes that determine a model's memory, by prefixed name, for errors."""
    names = ("vocab_size", "hidden_size", "num_layers")
    moe_names = ("num_experts", "intermediate_size")
    sizes = {f"{prefix}{name}": getattr(config, name) for name in names}
    return sizes | {f"{moe_prefix}{name}": getattr(config.moe, name) for name in moe_names}


class StateBytes(NamedTuple):
    """Bytes of one parameter in ``train.optim``: its weight, gradient and optimizer state."""

    weight: int
    gradient: int  # float32: ``GradientBuckets`` adds up the gradients of a step
    optimizer: int  # float32: moments, and master weights of weights that are not float32


def state_bytes(dtype: str = "bfloat16", optimizer: str = "adamw") -> StateBytes:
    """Return the bytes of one parameter, given its dtype and ``OptimizerConfig.kind``."""
    num_states = (_ADAM_STATES if optimizer == "adamw" else 0) + (dtype != "float32")
    return StateBytes(DTYPES[dtype].itemsize, _FLOAT32_BYTES, num_states * _FLOAT32_BYTES)


def training_bytes(config: RunConfig, *, num_ranks: int) -> int:
    """Return the fewest bytes a rank needs, with any strategy, in forward or in the update."""
    model, state = config.model, state_bytes(config.train.dtype, config.optimizer.kind)
    ep_size = config.ep_size or num_ranks
    number = num_parameters(model, ep_size=ep_size, tp_size=config.expert_tp_size)
    num_tokens = config.train.batch_size * config.data.seq_len
    # The input of each layer and of the last norm is alive at the end of forward.
    inputs = num_tokens * (model.num_layers + 1) * model.hidden_size * state.weight
    return number * (state.weight + state.optimizer) + max(number * state.gradient, inputs)


def num_parameters(config: ModelConfig, *, ep_size: int, tp_size: int) -> int:
    """Return the number of model parameters that one rank holds, if no expert has replicas."""
    hidden, num_moe = config.hidden_size, config.num_moe_layers
    query, key = (num * config.head_dim for num in (config.num_heads, config.num_kv_heads))
    attention = 2 * hidden * (query + key)
    if config.attention_bias:
        attention += query + 2 * key
    norm = {"none": 0, "head": 2 * config.head_dim, "full": query + key}[config.qk_norm]
    moe = num_layer_parameters(config.moe, hidden, ep_size=ep_size, tp_size=tp_size)
    dense = 3 * hidden * config.dense_intermediate_size
    layers = config.num_layers * (attention + norm + 2 * hidden)
    layers += num_moe * moe + (config.num_layers - num_moe) * dense
    return layers + 2 * config.vocab_size * hidden + hidden


def num_layer_parameters(config: MoEConfig, hidden_size: int, *, ep_size: int, tp_size: int) -> int:
    """Return the number of an MoE layer's parameters on a rank, if no expert has replicas."""
    num_local = -(-config.num_experts * tp_size // ep_size)
    num_up = 2 if config.activation == "swiglu" else 1
    size = config.intermediate_size // tp_size
    expert = (num_up + 1) * hidden_size * size
    if config.expert_bias:
        expert += num_up * size + hidden_size
    shared = (num_up + 1) * hidden_size * config.shared_intermediate_size
    gate = hidden_size if config.shared_gate and config.shared_intermediate_size else 0
    return config.num_experts * hidden_size + num_local * expert + shared + gate


def total_memory(device: torch.device) -> int | None:
    """Return the total bytes of a device's memory, free or not; None for "meta", which has none."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise RuntimeError(f"device ({device}) must be one of {count} CUDA devices")
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def check_fits(needed: int, sizes: dict[str, int], *, device: torch.device, use: str = "") -> None:
    """Raise ``ValueError``, listing ``sizes``, if a device's memory is below ``needed`` bytes."""
    # Under FakeTensorMode, torch.empty returns a subclass without memory: nothing is checked.
    is_real = type(torch.empty(0)) is torch.Tensor
    available = total_memory(device) if is_real else None
    if available is not None and needed > available:
        listed = ", ".join(f"{name} ({size})" for name, size in sizes.items())
        raise ValueError(
            f"{listed} must fit into the memory of {device}, {available / 1e9:.1f} GB, and need "
            f"at least {needed / 1e9:.1f} GB {use or 'of parameters on a rank'}"
        )
