"""Loads worked out by hand, and frequencies of drawn experts."""

import math

import pytest
import torch

from halley.core.types import Routing
from halley.tools.skew import balanced_load, one_hot_load, parse_load, sample_routing, zipf_load


def _draw(load_E: torch.Tensor, num_tokens: int, *, top_k: int, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    return sample_routing(load_E, num_tokens, top_k=top_k, generator=generator)


def _assert_load(load_E: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(load_E, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-14)


# Steps of 0.02 around 1/5 have the deviation 0.02 * sqrt((4 + 1 + 0 + 1 + 4) / 5).
STD, STEPS = 0.02 * math.sqrt(2.0), [0.24, 0.22, 0.20, 0.18, 0.16]


@pytest.mark.parametrize(
    ("text", "top_k", "want"),
    [
        ("balanced", 2, [1 / 4] * 4),
        (f"std:{STD}", 2, STEPS),
        (f"cv:{5 * STD}", 2, STEPS),
        ("std:0", 1, [1.0]),
        # The ramp of 4 experts, (1, 1/3, -1/3, -1), has a deviation of sqrt(5) / 3 and may be
        # scaled by 1/4 until the last share is 0, or by 1/3 - 1/4 until the first is 1/3.
        (f"std:{math.sqrt(5.0) / 12}", 1, [1 / 2, 1 / 3, 1 / 6, 0.0]),
        (f"std:{math.sqrt(5.0) / 12}", 2, [1 / 2, 1 / 3, 1 / 6, 0.0]),
        (f"std:{math.sqrt(5.0) / 36}", 3, [1 / 3, 5 / 18, 2 / 9, 1 / 6]),
        ("one-hot", 1, [1.0, 0.0, 0.0, 0.0]),
        ("one-hot", 2, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("one-hot", 1, [1.0]),
        ("zipf:1.0", 1, [12 / 25, 6 / 25, 4 / 25, 3 / 25]),
        ("zipf:0.0", 2, [1 / 4] * 4),
        # Weights 1, 1/4, 1/9, 1/16: the first would get 0.70 and is cut to 1/2; the others share
        # 1/2 in proportion 36 : 16 : 9.
        ("zipf:2.0", 2, [1 / 2, 18 / 61, 8 / 61, 9 / 122]),
        # A third each: once the first is cut, the second is too large as well.
        ("zipf:2.0", 3, [1 / 3, 1 / 3, 16 / 75, 9 / 75]),
        ("zipf:2.0", 4, [1 / 4] * 4),
    ],
)
def test_loads_by_hand(text: str, top_k: int, want: list[float]) -> None:
    _assert_load(parse_load(text, num_experts=len(want), top_k=top_k), want)


@pytest.mark.parametrize("skew", ["balanced", "std:0.05", "zipf:1.2", "one-hot"])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("num_tokens", [0, 20_000])
def test_each_expert_is_drawn_with_its_share(skew: str, top_k: int, num_tokens: int) -> None:
    load_E = parse_load(skew, num_experts=8, top_k=top_k)
    idx_TK = _draw(load_E, num_tokens, top_k=top_k).topk_idx_TK
    assert (idx_TK.sort(1).values.diff(dim=1) > 0).all()  # the experts of a token differ
    # A token chooses an expert or not, so the count is binomial. A correct count differs by more
    # than five standard deviations once in two million draws.
    for count, share in zip(idx_TK.flatten().bincount(minlength=8), load_E.tolist(), strict=True):
        mean = num_tokens * top_k * share
        limit = 5.0 * math.sqrt(max(mean * (1.0 - top_k * share), 0.0)) + 1e-9
        assert abs(count.item() - mean) <= limit


def test_order_of_the_choices_does_not_depend_on_the_expert() -> None:
    idx_TK = _draw(balanced_load(4), 20_000, top_k=2).topk_idx_TK
    first = torch.bincount(idx_TK[:, 0], minlength=4)
    assert (first - 5000).abs().max().item() <= 5.0 * math.sqrt(20_000 * 0.25 * 0.75)


def test_weights_of_a_token_sum_to_one() -> None:
    weights_TK = _draw(balanced_load(8), 1000, top_k=3).topk_weights_TK
    assert weights_TK.dtype == torch.float32
    assert weights_TK.min().item() > 0.0
    sums_T = weights_TK.double().sum(1)
    torch.testing.assert_close(sums_T, torch.ones_like(sums_T), atol=1e-6, rtol=0)
    assert weights_TK[:, 0].std().item() > 0.1  # they differ from token to token


def test_same_seed_same_routing() -> None:
    load_E = zipf_load(8, exponent=1.0, top_k=2)
    one, same, other = (_draw(load_E, 100, top_k=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.topk_idx_TK, same.topk_idx_TK)
    assert torch.equal(one.topk_weights_TK, same.topk_weights_TK)
    assert not torch.equal(one.topk_idx_TK, other.topk_idx_TK)


def test_load_that_top_k_does_not_allow_is_an_error() -> None:
    wanted = r"load \(1.0000 for one expert\) must be at most .*0.5000"
    with pytest.raises(ValueError, match=wanted):
        _draw(one_hot_load(4, top_k=1), 10, top_k=2)
