"""Loads worked out by hand, and frequencies of drawn experts."""

import itertools
import math

import pytest
import torch

from halley.core.types import Routing
from halley.tools.skew import (
    balanced_load,
    load_with_std,
    one_hot_load,
    parse_load,
    sample_routing,
    zipf_load,
)


def _draw(load_E: torch.Tensor, num_tokens: int, *, top_k: int, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    return sample_routing(load_E, num_tokens, top_k=top_k, generator=generator)


def _assert_load(load_E: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(load_E, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-14)


def test_balanced_load() -> None:
    _assert_load(balanced_load(4), [0.25, 0.25, 0.25, 0.25])


def test_load_with_std_falls_linearly() -> None:
    # Steps of 0.02 around 1/5: deviation 0.02 * sqrt((4 + 1 + 0 + 1 + 4) / 5).
    load_E = load_with_std(5, std=0.02 * math.sqrt(2.0), top_k=2)
    _assert_load(load_E, [0.24, 0.22, 0.20, 0.18, 0.16])


@pytest.mark.parametrize(
    ("num_experts", "top_k", "std"), [(8, 2, 0.032), (64, 4, 0.005), (1, 1, 0.0), (8, 7, 0.011)]
)
def test_load_with_std_has_that_deviation(num_experts: int, top_k: int, std: float) -> None:
    load = load_with_std(num_experts, std=std, top_k=top_k).tolist()
    mean = 1.0 / num_experts
    assert math.fsum(load) == pytest.approx(1.0, abs=1e-12)
    deviation = math.sqrt(math.fsum((share - mean) ** 2 for share in load) / num_experts)
    assert deviation == pytest.approx(std, abs=1e-12)
    assert min(load) >= 0.0
    assert max(load) <= 1.0 / top_k + 1e-12


# The ramp of 4 experts, (1, 1/3, -1/3, -1), has a deviation of sqrt(5) / 3 and may be scaled by
# 1/4 until the last share is 0, or by 1/3 - 1/4 until the first is 1/3.
@pytest.mark.parametrize(("top_k", "scale"), [(1, 1 / 4), (2, 1 / 4), (3, 1 / 12)])
def test_largest_std(top_k: int, scale: float) -> None:
    largest = scale * math.sqrt(5.0) / 3.0
    want = [1 / 4 + scale * place for place in (1.0, 1 / 3, -1 / 3, -1.0)]
    _assert_load(load_with_std(4, std=largest, top_k=top_k), want)
    for wrong in (-0.01, largest + 1e-6):
        with pytest.raises(ValueError, match=rf"std \(.*\) must be between 0 and {largest:.4f}"):
            load_with_std(4, std=wrong, top_k=top_k)


def test_zipf_load_without_a_cap() -> None:
    _assert_load(zipf_load(4, exponent=1.0, top_k=1), [12 / 25, 6 / 25, 4 / 25, 3 / 25])
    _assert_load(zipf_load(4, exponent=0.0, top_k=2), [1 / 4] * 4)
    with pytest.raises(ValueError, match=r"exponent \(-1.0\) must be at least 0"):
        zipf_load(4, exponent=-1.0, top_k=1)


def test_zipf_load_with_a_cap() -> None:
    # Weights 1, 1/4, 1/9, 1/16: the first would get 0.70 and is cut to 1/2; the others share 1/2
    # in proportion 36 : 16 : 9.
    _assert_load(zipf_load(4, exponent=2.0, top_k=2), [1 / 2, 18 / 61, 8 / 61, 9 / 122])
    # A third each: once the first is cut, the second is too large as well.
    _assert_load(zipf_load(4, exponent=2.0, top_k=3), [1 / 3, 1 / 3, 16 / 75, 9 / 75])
    _assert_load(zipf_load(4, exponent=2.0, top_k=4), [1 / 4] * 4)


@pytest.mark.parametrize(("exponent", "top_k"), [(0.5, 1), (1.2, 8), (3.0, 64)])
def test_zipf_load_decreases_with_the_index_of_the_expert(exponent: float, top_k: int) -> None:
    load = zipf_load(64, exponent=exponent, top_k=top_k).tolist()
    assert math.fsum(load) == pytest.approx(1.0, abs=1e-12)
    assert max(load) <= (1.0 + 1e-9) / top_k
    assert all(a >= b * (1.0 - 1e-12) for a, b in itertools.pairwise(load))


def test_one_hot_load() -> None:
    _assert_load(one_hot_load(4, top_k=1), [1.0, 0.0, 0.0, 0.0])
    _assert_load(one_hot_load(4, top_k=2, hot_expert=2), [1 / 6, 1 / 6, 1 / 2, 1 / 6])
    _assert_load(one_hot_load(1, top_k=1), [1.0])


def test_each_kind_of_load_is_parsed() -> None:
    for text, want in {
        "balanced": balanced_load(8),
        "std:0.03": load_with_std(8, std=0.03, top_k=2),
        "cv:0.24": load_with_std(8, std=0.03, top_k=2),
        "zipf:1.5": zipf_load(8, exponent=1.5, top_k=2),
        "one-hot": one_hot_load(8, top_k=2),
    }.items():
        assert parse_load(text, num_experts=8, top_k=2).tolist() == want.tolist()


@pytest.mark.parametrize("text", ["", "even", "std", "std:x", "std:nan", "zipf:inf", "balanced:1"])
def test_wrong_load_is_an_error_that_names_the_syntax(text: str) -> None:
    with pytest.raises(ValueError, match=rf"skew \({text}\) must be balanced, std:NUMBER"):
        parse_load(text, num_experts=8, top_k=2)


@pytest.mark.parametrize("skew", ["balanced", "std:0.05", "zipf:1.2", "one-hot"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_each_expert_is_drawn_with_its_share(skew: str, top_k: int) -> None:
    num_tokens = 20_000
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


def test_every_expert_is_picked_if_top_k_is_all() -> None:
    idx_TK = _draw(balanced_load(6), 500, top_k=6).topk_idx_TK
    assert idx_TK.sort(dim=1).values.tolist() == [[0, 1, 2, 3, 4, 5]] * 500


def test_weights_of_a_token_sum_to_one() -> None:
    weights_TK = _draw(balanced_load(8), 1000, top_k=3).topk_weights_TK
    assert weights_TK.dtype == torch.float32
    assert weights_TK.min().item() > 0.0
    torch.testing.assert_close(
        weights_TK.double().sum(1), torch.ones(1000).double(), atol=1e-6, rtol=0
    )
    assert weights_TK[:, 0].std().item() > 0.1  # they differ from token to token


def test_same_seed_same_routing() -> None:
    load_E = zipf_load(8, exponent=1.0, top_k=2)
    one, same, other = (_draw(load_E, 100, top_k=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.topk_idx_TK, same.topk_idx_TK)
    assert torch.equal(one.topk_weights_TK, same.topk_weights_TK)
    assert not torch.equal(one.topk_idx_TK, other.topk_idx_TK)


def test_no_tokens() -> None:
    routing = _draw(balanced_load(4), 0, top_k=2)
    assert routing.topk_idx_TK.tolist() == []
    assert routing.topk_weights_TK.shape == (0, 2)


def test_load_that_top_k_does_not_allow_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"load \(1.0000 for one expert\) must be at most .*0.5000"
    ):
        _draw(one_hot_load(4, top_k=1), 10, top_k=2)
    with pytest.raises(ValueError, match=r"top_k \(5\) must be between 1 and num_experts \(4\)"):
        _draw(balanced_load(4), 10, top_k=5)
    with pytest.raises(ValueError, match=r"top_k \(0\) must be between 1 and num_experts \(4\)"):
        _draw(balanced_load(4), 10, top_k=0)
