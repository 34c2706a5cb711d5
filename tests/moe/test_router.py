"""Routers equal a loop over tokens: choice, weights, capacity and losses."""

import math
from typing import Any

import pytest
import torch

from halley.core.config import MoEConfig, RouterConfig
from halley.core.types import DROPPED
from halley.moe.router import (
    AbstractRouter,
    SigmoidRouter,
    balance_loss,
    build_router,
    capacity,
    z_loss,
)


def _build(num_experts: int, top_k: int, **router: Any) -> AbstractRouter:
    """Return a router whose logits equal its input, because its weight is an identity."""
    router.setdefault("balance_coefficient", 0.0)
    chosen = RouterConfig(**router)
    config = MoEConfig(num_experts=num_experts, top_k=top_k, intermediate_size=1, router=chosen)
    built = build_router(config, hidden_size=num_experts, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        built.weight.copy_(torch.eye(num_experts))
    return built


def _logits(num_tokens: int, num_experts: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_experts, generator=generator)


def _largest(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_softmax_router(normalize: bool, top_k: int) -> None:
    x_TD = _logits(20, 8)
    out = _build(8, top_k, normalize=normalize)(x_TD)
    want_idx, want_weights = [], []
    for logits in x_TD.tolist():
        probs = [math.exp(x) / math.fsum(map(math.exp, logits)) for x in logits]
        chosen = _largest(probs, top_k)
        total = math.fsum(probs[e] for e in chosen) if normalize else 1.0
        want_idx.append(chosen)
        want_weights.append([probs[e] / total for e in chosen])
    assert out.routing.topk_idx_TK.tolist() == want_idx
    torch.testing.assert_close(out.routing.topk_weights_TK, torch.tensor(want_weights))
    assert out.counts_E.tolist() == [sum(row.count(e) for row in want_idx) for e in range(8)]
    assert out.loss.item() == 0.0


def test_router_computes_in_float32() -> None:
    config = MoEConfig(num_experts=2, top_k=1, intermediate_size=1)
    router = build_router(config, hidden_size=2, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        # In bfloat16 both logits would be 256: the sum 257 has nine bits.
        router.weight.copy_(torch.tensor([[256.0, 0.0], [256.0, 1.0]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = router(torch.ones(1, 2, dtype=torch.bfloat16))
    assert out.routing.topk_idx_TK.tolist() == [[1]]
    assert out.routing.topk_weights_TK.dtype == torch.float32


def test_switch_router_weights_are_probabilities_and_excess_is_dropped() -> None:
    # Logits of ln 3 and 0: probabilities 3/4 and 1/4. Five tokens want expert 0, one wants
    # expert 1; an expert takes ceil(1.0 * 6 / 2) = 3.
    x_TD = torch.tensor(
        [[math.log(3.0), 0.0]] * 3 + [[0.0, math.log(3.0)]] + [[math.log(3.0), 0.0]] * 2
    )
    out = _build(2, 1, kind="switch", capacity_factor=1.0)(x_TD)
    assert out.routing.topk_idx_TK.flatten().tolist() == [0, 0, 0, 1, DROPPED, DROPPED]
    want_T = torch.tensor([0.75] * 4 + [0.0, 0.0])
    torch.testing.assert_close(out.routing.topk_weights_TK.flatten(), want_T)
    assert out.counts_E.tolist() == [5, 1]  # counted before slots are dropped


def test_top2_router_keeps_first_choices_before_second_choices() -> None:
    # Probabilities 6/9, 2/9, 1/9 in this order of experts for each token.
    orders = [(0, 1, 2), (1, 0, 2), (0, 1, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)]
    x_TD = torch.empty(6, 3)
    for token, order in enumerate(orders):
        for expert, share in zip(order, (6.0, 2.0, 1.0), strict=True):
            x_TD[token, expert] = math.log(share)
    out = _build(3, 2, kind="top2", capacity_factor=0.75)(x_TD)  # ceil(0.75 * 12 / 3) = 3 slots
    # First choices: expert 0 takes tokens 0, 2, 4 and is full; 1 takes 1, 3; 2 takes 5. Second
    # choices: 1 takes that of token 0 and is full; 2 takes those of tokens 3 and 4.
    first, second = [0, 1, 0, 1, 0, 2], [1, DROPPED, DROPPED, 2, 2, DROPPED]
    assert out.routing.topk_idx_TK.T.tolist() == [first, second]
    want_TK = torch.tensor([[0.75, 0.25], [0.75, 0.0], [0.75, 0.0]] * 2)
    want_TK[3:5] = torch.tensor([0.75, 0.25])
    torch.testing.assert_close(out.routing.topk_weights_TK, want_TK)
    assert out.counts_E.tolist() == [5, 4, 3]


def test_priority_by_weight_drops_the_tokens_of_least_weight() -> None:
    # All want expert 0, with growing probability; an expert takes ceil(1.0 * 4 / 2) = 2.
    x_TD = torch.tensor([[math.log(2.0 + token), 0.0] for token in range(4)])
    out = _build(2, 1, kind="switch", capacity_factor=1.0, priority="weight")(x_TD)
    assert out.routing.topk_idx_TK.flatten().tolist() == [DROPPED, DROPPED, 0, 0]
    want_T = torch.tensor([0.0, 0.0, 4.0 / 5.0, 5.0 / 6.0])
    torch.testing.assert_close(out.routing.topk_weights_TK.flatten(), want_T)


@pytest.mark.parametrize(
    ("factor", "num_slots", "want"),
    [(1.0, 64, 8), (1.25, 64, 10), (1.0, 65, 9), (0.5, 8, 1), (0.01, 8, 1), (2.0, 0, 1)],
)
def test_capacity_is_rounded_up(factor: float, num_slots: int, want: int) -> None:
    assert capacity(factor, num_slots, num_experts=8) == want


def _sigmoid_by_loop(logits: list[float], bias: list[float], config: MoEConfig) -> list[int]:
    scores = [_sigmoid(x) + b for x, b in zip(logits, bias, strict=True)]
    size = len(scores) // config.router.num_groups
    groups = [scores[start : start + size] for start in range(0, len(scores), size)]
    sums = [sum(sorted(group)[-2:]) for group in groups]
    best = _largest(sums, config.router.num_limited_groups)
    allowed = [score if e // size in best else -math.inf for e, score in enumerate(scores)]
    return _largest(allowed, config.top_k)


@pytest.mark.parametrize(
    ("normalize", "num_groups", "num_limited", "top_k"),
    [(True, 1, 1, 3), (False, 4, 2, 6), (True, 12, 5, 4), (True, 2, 1, 6)],
)
def test_sigmoid_router(normalize: bool, num_groups: int, num_limited: int, top_k: int) -> None:
    groups = {"num_groups": num_groups, "num_limited_groups": num_limited}
    router = _build(12, top_k, kind="sigmoid", normalize=normalize, scaling_factor=2.5, **groups)
    assert isinstance(router, SigmoidRouter)
    # With biases below -1 some scores are negative. Experts of excluded groups must rank below.
    router.bias.copy_(0.5 * _logits(1, 12, seed=1)[0] - 1.0)
    x_TD = _logits(40, 12)
    out = router(x_TD)
    for token, logits in enumerate(x_TD.tolist()):
        chosen = _sigmoid_by_loop(logits, router.bias.tolist(), router.config)
        weights = [_sigmoid(logits[e]) for e in chosen]  # without the bias
        total = math.fsum(weights) if normalize else 1.0
        want = torch.tensor([2.5 * w / total for w in weights])
        assert out.routing.topk_idx_TK[token].tolist() == chosen
        torch.testing.assert_close(out.routing.topk_weights_TK[token], want)


def test_bias_moves_towards_an_even_load() -> None:
    router = _build(4, 1, kind="sigmoid", bias_update_rate=0.01)
    assert isinstance(router, SigmoidRouter)
    router.update_bias(torch.tensor([10, 0, 5, 5]))  # the mean is 5
    router.update_bias(torch.tensor([8, 8, 0, 4]))
    torch.testing.assert_close(router.bias, torch.tensor([-0.02, 0.0, 0.01, 0.01]))
    assert "bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_balance_and_z_loss_by_hand() -> None:
    even = balance_loss(torch.full((5, 4), 1.0 / 4), torch.full((4,), 10))
    torch.testing.assert_close(even, torch.tensor(1.0))
    probs_TE = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]])  # means 5/8, 1/4, 1/8
    loss = balance_loss(probs_TE, torch.tensor([3, 1, 0]))  # shares 3/4, 1/4, 0
    torch.testing.assert_close(loss, torch.tensor(3 * (15 / 32 + 1 / 16)))
    hot_TE = torch.tensor([[1.0, 0.0, 0.0]])
    assert balance_loss(hot_TE, torch.tensor([9, 0, 0])).item() == 3.0  # the worst: E
    logits_TE = torch.tensor([[math.log(1.0), math.log(3.0)], [math.log(6.0), math.log(2.0)]])
    want = (math.log(4.0) ** 2 + math.log(8.0) ** 2) / 2
    torch.testing.assert_close(z_loss(logits_TE), torch.tensor(want))


def test_loss_is_the_sum_of_both_with_their_coefficients() -> None:
    x_TD = _logits(30, 6)
    out = _build(6, 2, balance_coefficient=0.5, z_coefficient=0.25)(x_TD)
    want = 0.5 * balance_loss(x_TD.softmax(-1), out.counts_E) + 0.25 * z_loss(x_TD)
    torch.testing.assert_close(out.loss, want)
    sigmoid = _build(6, 2, kind="sigmoid", balance_coefficient=0.5)(x_TD)
    shares_TE = x_TD.sigmoid() / x_TD.sigmoid().sum(1, keepdim=True)
    torch.testing.assert_close(sigmoid.loss, 0.5 * balance_loss(shares_TE, sigmoid.counts_E))


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not normalized": {"normalize": False},
    "sigmoid": {"kind": "sigmoid", "num_groups": 2, "num_limited_groups": 1},
    "switch": {"kind": "switch", "capacity_factor": 1.0},
    "top2": {"kind": "top2", "capacity_factor": 1.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", ["weights", "balance", "z"])
def test_gradient_reaches_weight_and_tokens(kind: str, through: str) -> None:
    """Compare directional derivatives with finite differences that change no choice."""
    top_k = 1 if kind == "switch" else 2
    coefficients = {f"{name}_coefficient": float(through == name) for name in ("balance", "z")}
    router = _build(4, top_k, **KINDS[kind] | coefficients)
    x_TD = torch.tensor([2.0, 1.0, -0.3, -1.5])[_logits(12, 4).argsort(1)].requires_grad_()
    factor_TK = _logits(12, top_k, seed=5)

    def loss() -> torch.Tensor:
        out = router(x_TD)
        return (out.routing.topk_weights_TK * factor_TK).sum() if through == "weights" else out.loss

    loss().backward()
    for leaf, seed in ((router.weight, 6), (x_TD, 7)):
        assert leaf.grad is not None
        grad, noise = leaf.grad, _logits(*leaf.shape, seed=seed)
        direction = grad / grad.norm() + noise / noise.norm()
        values = []
        for sign in (1.0, -2.0, 1.0):  # one step forward, one step back, and the first values
            with torch.no_grad():
                leaf += sign * 1e-2 * direction
            values.append(loss().item())
        difference = (values[0] - values[1]) / 2e-2
        assert difference == pytest.approx((grad * direction).sum().item(), rel=1e-2)
        assert difference > 1e-3  # far above rounding
