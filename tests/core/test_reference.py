"""The reference layer, compared with a loop over tokens in plain Python floats."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from halley.core.reference import activate, moe_reference
from halley.core.types import DROPPED, Activation, Experts, Routing
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.skew import balanced_load, sample_routing


Matrix = list[list[float]]


def _times(matrix: Matrix, vector: list[float], bias: list[float] | None) -> list[float]:
    out = [math.fsum(a * x for a, x in zip(row, vector, strict=True)) for row in matrix]
    return out if bias is None else [y + b for y, b in zip(out, bias, strict=True)]


def _slow_expert(x: list[float], experts: Experts, index: int) -> list[float]:
    own = {name: tensor[index].tolist() for name, tensor in experts.tensors().items()}
    h = _times(own["up_LGD"], x, own.get("up_bias_LG"))
    if experts.activation == "swiglu":
        half = len(h) // 2
        gates_and_ups = zip(h[:half], h[half:], strict=True)
        h = [gate / (1.0 + math.exp(-gate)) * up for gate, up in gates_and_ups]
    else:
        h = [0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0))) for x in h]
    return _times(own["down_LDF"], h, own.get("down_bias_LD"))


def _slow_layer(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    rows: Matrix = []
    chosen = zip(routing.topk_idx_TK.tolist(), routing.topk_weights_TK.tolist(), strict=True)
    for x, (ids, weights) in zip(x_TD.tolist(), chosen, strict=True):
        y = [0.0] * len(x)
        for index, weight in zip(ids, weights, strict=True):
            if index != DROPPED:
                out = _slow_expert(x, experts, index)
                y = [a + weight * b for a, b in zip(y, out, strict=True)]
        rows.append(y)
    return torch.tensor(rows, dtype=torch.float64).view(x_TD.shape)


def _make(
    activation: Activation, *, bias: bool, num_tokens: int = 9
) -> tuple[torch.Tensor, Routing, Experts]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    up_size = 6 if activation == "swiglu" else 3
    weights: dict[str, Any] = {"up_LGD": normal(5, up_size, 4), "down_LDF": normal(5, 4, 3)}
    if bias:
        weights |= {"up_bias_LG": normal(5, up_size), "down_bias_LD": normal(5, 4)}
    experts = Experts(**weights, activation=activation)
    drawn = sample_routing(balanced_load(5), num_tokens, top_k=3, generator=generator)
    idx_TK = drawn.topk_idx_TK.clone()
    idx_TK[1:3, 1] = DROPPED
    weights_TK = drawn.topk_weights_TK.double().requires_grad_()
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
    return normal(num_tokens, 4), routing, experts


@pytest.mark.parametrize(
    ("activation", "bias", "num_tokens"),
    [("swiglu", False, 9), ("swiglu", True, 9), ("gelu", True, 9), ("gelu", False, 0)],
)
def test_layer_is_the_sum_of_weighted_experts(activation, bias, num_tokens) -> None:
    x_TD, routing, experts = _make(activation, bias=bias, num_tokens=num_tokens)
    y_TD = moe_reference(x_TD, routing, experts)
    want_TD = _slow_layer(x_TD, routing, experts)
    assert relative_error(y_TD, want_TD) <= RELATIVE_TOLERANCE[torch.float64]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradients_are_those_of_finite_differences(activation: Activation) -> None:
    x_TD, routing, experts = _make(activation, bias=True)
    names = experts.tensors()

    def layer(x_TD, weights_TK, *tensors):
        routed = replace(routing, topk_weights_TK=weights_TK)
        changed = experts.with_tensors(dict(zip(names, tensors, strict=True)))
        return moe_reference(x_TD, routed, changed)

    leaves = (x_TD, routing.topk_weights_TK, *names.values())
    assert len(leaves) == 6
    assert torch.autograd.gradcheck(layer, leaves)


def test_parts_over_ranges_of_experts_add_up() -> None:
    x_TD, routing, experts = _make("swiglu", bias=True)
    found_TD, first = torch.zeros(()), 0
    for part, size in zip(experts.split([2, 1, 2]), (2, 1, 2), strict=True):
        assert part.num_local_experts == size
        found_TD = found_TD + moe_reference(x_TD, routing, part, first_expert=first)
        first += size
    want_TD = _slow_layer(x_TD, routing, experts)
    assert relative_error(found_TD, want_TD) <= RELATIVE_TOLERANCE[torch.float64]


def test_sum_is_in_float32() -> None:
    # A sum in bfloat16 would round 514, the first summand, to 512 or 516.
    experts = Experts(
        up_LGD=torch.ones(2, 1, 1, dtype=torch.bfloat16),
        down_LDF=torch.tensor([[[2.0]], [[-1.0]]], dtype=torch.bfloat16),
        activation="gelu",
    )
    idx_TK = torch.tensor([[1, 0]])
    weights_TK = torch.tensor([[1.0, 0.501953125]])  # 1/2 + 1/512
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
    y_TD = moe_reference(torch.tensor([[512.0]], dtype=torch.bfloat16), routing, experts)
    assert y_TD.dtype == torch.float32
    assert y_TD.item() == 2.0  # 1024 * (1/2 + 1/512) - 512


def test_activation_takes_the_gate_from_the_first_columns() -> None:
    h_RG = torch.tensor([[100.0, -100.0, 3.0, 5.0]])
    torch.testing.assert_close(activate(h_RG, "swiglu"), torch.tensor([[300.0, 0.0]]))
    torch.testing.assert_close(activate(h_RG, "gelu"), torch.tensor([[100.0, 0.0, 2.99595, 5.0]]))
