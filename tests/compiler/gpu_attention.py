"""Attention operators of GPUs, in graphs that are traced and interpreted on a CPU."""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import fx


aten = torch.ops.aten
# By name: the operator, and its arguments between values and dropout probability.
_OPERATORS: dict[str, tuple[Any, tuple[object, ...]]] = {
    "flash": (aten._scaled_dot_product_flash_attention.default, ()),
    "efficient": (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
}
GPU_ATTENTIONS = tuple(_OPERATORS)


def operator_of(name: str) -> Any:
    """Return the operator of that name."""
    return _OPERATORS[name][0]


def attend_by(name: str) -> Callable[..., torch.Tensor]:
    """Return a function that calls the operator, like ``scaled_dot_product_attention`` on a GPU."""
    operator, bias = _OPERATORS[name]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor:
        return operator(q, k, v, *bias, 0.0, is_causal)[0]

    return attend


@final
class AsOnGPU(fx.Interpreter):
    """Runs a graph on a CPU; a GPU's attention returns as many results as it would on a GPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = next((name for name in _OPERATORS if target is operator_of(name)), "")
        if not name:
            return super().call_function(target, args, kwargs)
        q, k, v = args[:3]
        out, sums_BHS = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, args[-1])
        sums_BHS, seq_len = sums_BHS.contiguous(), q.shape[2]
        seed = torch.zeros((), dtype=torch.int64)
        if name == "efficient":
            return out, F.pad(sums_BHS, (0, -seq_len % 32)), seed, seed
        if name == "cudnn":
            return out, sums_BHS[..., None], None, None, seq_len, seq_len, seed, seed, None
        state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, sums_BHS, None, None, seq_len, seq_len, state, unused, torch.empty(0)
