"""A Transformers model whose experts run by Halley has the same bits in lanes as without them."""

import torch
import torch.distributed as dist

import halley.integrations.transformers as halley_transformers
from halley.lanes import compile_step
from tests.compiler.model_case import fresh_graphs
from tests.integrations.transformers_case import disabled_afterwards, make_model, make_tokens
from tests.lanes.lane_case import is_equal, take_result
from tests.rank_pool import RunRanks


NUM_STEPS = 4  # the third makes the plan
FAMILIES = ("mixtral", "qwen2_moe")


def _run(rank: int, num_ranks: int, family: str, strategy: str) -> tuple[list[bool], str, int]:
    """Return which steps have the bits of the model without lanes; fallback; number of lanes."""
    with disabled_afterwards(), fresh_graphs():
        model = make_model(family, num_hidden_layers=1)
        halley_transformers.enable(model, strategy=strategy, strict=True)
        tokens = make_tokens().chunk(num_ranks)[rank]

        def loss_function(ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        losses = [loss_function(each) for each in tokens.chunk(2)]
        for loss in losses:
            loss.backward()
        wanted = take_result(torch.stack(losses), model)
        step = compile_step(loss_function, 2, inner="eager")
        results = [take_result(step(tokens), model) for _ in range(NUM_STEPS)]
        dist.barrier()
    assert step.plan is not None
    return [is_equal(each, wanted) for each in results], step.fallback, step.plan.num_lanes


def test_transformers_models_in_lanes_have_the_same_bits(run_ranks: RunRanks) -> None:
    for family in FAMILIES:
        found = run_ranks(_run, 2, family, "functional", timeout_s=120.0)
        assert found == [([True] * NUM_STEPS, "", 2)] * 2


def test_transformers_model_with_deduplicated_rows_in_lanes(run_ranks: RunRanks) -> None:
    found = run_ranks(_run, 2, "qwen3_moe", "functional:deduplicated", timeout_s=120.0)
    assert found == [([True] * NUM_STEPS, "", 2)] * 2
