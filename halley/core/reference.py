"""Compute routed experts in plain PyTorch in one process, as the reference values of tests."""

import torch
import torch.nn.functional as F

from halley.core.types import Activation, Experts, Routing


def activate(h_RG: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an expert's activation to the output of its first GEMM; return ``(R, F)``.

    ``h_RG`` is ``(R, 2F)`` with the gate's columns first for "swiglu", ``(R, F)`` for "gelu".
    """
    if activation == "swiglu":
        gate_RF, up_RF = h_RG.chunk(2, dim=-1)
        return F.silu(gate_RF) * up_RF
    if activation == "gelu":
        return F.gelu(h_RG)
    raise ValueError(f"activation ({activation!r}) must be one of 'swiglu', 'gelu'")


def apply_expert(x_RD: torch.Tensor, experts: Experts, *, index: int) -> torch.Tensor:
    """Return the output, ``(R, D)``, of expert ``index`` of ``experts`` for the rows ``x_RD``."""
    up_bias = None if experts.up_bias_LG is None else experts.up_bias_LG[index]
    down_bias = None if experts.down_bias_LD is None else experts.down_bias_LD[index]
    h_RF = activate(F.linear(x_RD, experts.up_LGD[index], up_bias), experts.activation)
    return F.linear(h_RF, experts.down_LDF[index], down_bias)


def moe_reference(
    x_TD: torch.Tensor, routing: Routing, experts: Experts, *, first_expert: int = 0
) -> torch.Tensor:
    """Return, for each token, the weighted sum of the outputs of its experts among ``experts``.

    The sum is in order of expert. The result is ``(T, D)``, in float64 for float64 tokens, else in
    float32, and differentiable in ``x_TD``, the routing weights and the experts' weights.

    Args:
        x_TD: tokens. Each expert rounds them to the dtype of its weights. So the gradients of
            float32 tokens are summed over the experts in float32.
        experts: experts ``first_expert`` to ``first_expert + L - 1``. If these are not all experts,
            the result is a partial sum. The sum over all ranks is the layer's output.
    """
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, torch.float32))
    for index in range(experts.num_local_experts):
        token, choice = torch.where(routing.topk_idx_TK == first_expert + index)
        rows = apply_expert(x_TD[token].to(experts.up_LGD.dtype), experts, index=index)
        weighted = rows.to(y_TD.dtype) * routing.topk_weights_TK[token, choice, None]
        y_TD = y_TD.index_add(0, token, weighted)
    return y_TD
