"""The reference layer, compared with a loop over tokens in plain Python floats."""

import math

import pytest
import torch

from halley.core.reference import activate, moe_reference
from halley.core.types import DROPPED, Activation, Experts, Routing
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.skew import balanced_load, sample_routing


Matrix = list[list[float]]


def _silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def _gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))


def _times(matrix: Matrix, vector: list[float], bias: list[float] | None) -> list[float]:
    out = [math.fsum(a * x for a, x in zip(row, vector, strict=True)) for row in matrix]
    return out if bias is None else [y + b for y, b in zip(out, bias, strict=True)]


def _slow_expert(x: list[float], experts: Experts, index: int) -> list[float]:
    up_bias = None if experts.up_bias_LG is None else experts.up_bias_LG[index].tolist()
    down_bias = None if experts.down_bias_LD is None else experts.down_bias_LD[index].tolist()
    h = _times(experts.up_LGD[index].tolist(), x, up_bias)
    if experts.activation == "swiglu":
        half = len(h) // 2
        h = [_silu(gate) * up for gate, up in zip(h[:half], h[half:], strict=True)]
    else:
        h = [_gelu(value) for value in h]
    return _times(experts.down_LDF[index].tolist(), h, down_bias)


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
    experts = Experts(
        up_LGD=normal(5, up_size, 4),
        down_LDF=normal(5, 4, 3),
        up_bias_LG=normal(5, up_size) if bias else None,
        down_bias_LD=normal(5, 4) if bias else None,
        activation=activation,
    )
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
def test_layer_is_the_sum_of_weighted_experts(
    activation: Activation, bias: bool, num_tokens: int
) -> None:
    x_TD, routing, experts = _make(activation, bias=bias, num_tokens=num_tokens)
    y_TD = moe_reference(x_TD, routing, experts)
    want_TD = _slow_layer(x_TD, routing, experts)
    assert relative_error(y_TD, want_TD) <= RELATIVE_TOLERANCE[torch.float64]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradients_are_those_of_finite_differences(activation: Activation) -> None:
    x_TD, routing, experts = _make(activation, bias=True)

    def layer(x, weights, up, down, up_bias, down_bias):
        return moe_reference(
            x,
            Routing(topk_idx_TK=routing.topk_idx_TK, topk_weights_TK=weights),
            Experts(
                up_LGD=up,
                down_LDF=down,
                up_bias_LG=up_bias,
                down_bias_LD=down_bias,
                activation=activation,
            ),
        )

    assert experts.up_bias_LG is not None
    assert experts.down_bias_LD is not None
    leaves = (experts.up_LGD, experts.down_LDF, experts.up_bias_LG, experts.down_bias_LD)
    assert torch.autograd.gradcheck(layer, (x_TD, routing.topk_weights_TK, *leaves))


@pytest.mark.parametrize("sizes", [[5], [2, 1, 2]])
def test_parts_over_ranges_of_experts_add_up(sizes: list[int]) -> None:
    x_TD, routing, experts = _make("swiglu", bias=True)
    parts = []
    for index, part in enumerate(experts.split(sizes)):
        assert part.num_local_experts == sizes[index]
        first = sum(sizes[:index])
        parts.append(moe_reference(x_TD, routing, part, first_expert=first))
    want_TD = _slow_layer(x_TD, routing, experts)
    assert relative_error(sum(parts, torch.zeros(())), want_TD) <= RELATIVE_TOLERANCE[torch.float64]


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
