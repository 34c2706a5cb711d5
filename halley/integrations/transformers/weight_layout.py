"""How an experts module of transformers keeps its weights, and what it does with them."""

from typing import Any

import torch
from torch import nn

from halley.core.types import DTYPES, Experts
from halley.integrations.contract import ExpertsFunction, LocalExperts


# What transformers' decorator of experts sets on each module, in every version that has it.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Classes of transformers, then of torch, then functions of torch.
_SILU, _GELU = ("SiLUActivation", "SiLU", "silu"), ("GELUActivation", "GELU", "gelu")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one that transformers' experts interface runs."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def find_problem(module: nn.Module) -> str:
    """Return why a module cannot be taken for a stack of experts, or ""."""
    name = type(module).__name__
    if not is_experts(module):
        return f"experts module {name} must be one that transformers' experts interface runs"
    for part in (_up_name(module), "down_proj", "num_experts"):
        if not hasattr(module, part):
            return f"experts module {name} must have {part}"
    return ""


def local_experts(module: nn.Module, function: ExpertsFunction) -> LocalExperts:
    """Return the experts that a module holds, as strategies take them where they can.

    Args:
        module: one without a ``find_problem``, its weights plain tensors of this rank.
        function: the module's own arithmetic.
    """
    experts: Any = module
    reason = find_custom(module)
    num_local = experts.down_proj.shape[0]
    if reason:
        return LocalExperts(num_local=num_local, function=function, reason=reason)
    up, down = getattr(experts, _up_name(module)), experts.down_proj
    if experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    stacked = Experts(
        up_LGD=up,
        down_LDF=down,
        up_bias_LG=getattr(experts, f"{_up_name(module)}_bias") if experts.has_bias else None,
        down_bias_LD=experts.down_proj_bias if experts.has_bias else None,
        activation="swiglu" if experts.has_gate else "gelu",
    )
    return LocalExperts(num_local=num_local, function=function, stacked=stacked)


def find_custom(module: nn.Module) -> str:
    """Return what in a module's arithmetic no strategy knows, or ""."""
    experts: Any = module
    dtype = experts.down_proj.dtype
    if dtype not in DTYPES.values():
        return f"dtype ({dtype}) of the experts is none of {', '.join(DTYPES)}"
    if getattr(experts, "has_post_expert_norm", False):
        return "the experts' outputs are normalised"
    if experts.has_gate:
        if type(experts)._apply_gate.__name__ != "_default_apply_gate":
            return "the experts' gate is of their own kind"
        if not experts.is_concatenated:
            return "the experts' gate and up columns are interleaved"
    activation = getattr(experts, "act_fn", None)
    found = getattr(activation, "__name__", type(activation).__name__)
    if found not in (_SILU if experts.has_gate else _GELU):
        return f"the experts' activation is {found}"
    return ""


def own_forward(forward: Any) -> ExpertsFunction:
    """Return what runs a module's own forward on rows that were brought to their expert.

    Args:
        forward: the module's, on ``(R, D)``, local ids ``(R, 1)`` and weights ``(R, 1)``.
    """

    def run(rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        return forward(rows_RD, ids_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))

    return run


def _up_name(module: nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
