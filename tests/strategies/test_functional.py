"""The strategy on functional collectives against the reference; compiled, in tests/compiler."""

import pytest
import torch

from halley.strategies.functional import FunctionalStrategy
from tests.strategies.layer_case import LayerCase, make_experts, make_tokens
from tests.strategies.test_values import check_layer


CASES = {
    "top-1": LayerCase(num_tokens_W=(7, 12), top_k=1),
    "top-4": LayerCase(num_tokens_W=(7, 12), num_experts=16, top_k=4),
    "bf16": LayerCase(num_tokens_W=(7, 12), top_k=2, dtype=torch.bfloat16),
    "gelu": LayerCase(num_tokens_W=(11, 6), activation="gelu"),
    "one expert takes all": LayerCase(num_tokens_W=(7, 12), top_k=1, skew="one-hot", seed=1),
    "an expert without rows": LayerCase(num_tokens_W=(7, 12), skew="empty-expert", seed=1),
    "dropped slots": LayerCase(num_tokens_W=(11, 6), dropped=0.4, seed=3),
    "all dropped": LayerCase(num_tokens_W=(11, 6), dropped=1.0, seed=3),
    "a rank without tokens": LayerCase(num_tokens_W=(0, 9), seed=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values(run_ranks, case: LayerCase) -> None:
    run_ranks(check_layer, 2, case, "functional")


def test_values_on_one_rank(run_ranks) -> None:
    run_ranks(check_layer, 1, LayerCase(num_tokens_W=(9,)), "functional")


def test_biases_are_refused() -> None:
    case = LayerCase(num_tokens_W=(4,), bias=True)
    experts = make_experts(case)
    strategy = FunctionalStrategy(None)
    assert strategy.find_problem(experts, top_k=2) == "experts have biases"
    x_TD, routing, _ = make_tokens(case, 0)
    with pytest.raises(ValueError, match=r"expert_bias \(true\) must be false for the functional"):
        strategy.forward(x_TD, routing, experts)
