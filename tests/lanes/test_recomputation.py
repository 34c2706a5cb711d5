"""Lanes of models that recompute activations: the same bits, and fewer bytes saved."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.graph_bench.gpt2_moe import Block
from halley.distributed.mesh import build_groups
from halley.lanes import compile_step
from halley.tools.layer_case import relative_error
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import (
    SIZE,
    Result,
    SmallModel,
    build_gpt2,
    is_equal,
    make_batch,
    run_uncompiled,
    take_result,
)
from tests.moe.model_case import destroy


Way = Literal["save", "budget", "checkpoint"]
NUM_STEPS = 4  # the third makes the plan
MAX_BYTES = 60_000  # between the peak with all activations, 77 kB, and those without, 52 and 47 kB


def _run(rank: int, num_ranks: int, way: Way) -> tuple[list[bool], int]:
    """Return which steps equal uncompiled ones, and the bytes alive between items at the peak."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2("switch", groups, num_layers=2)
    batch = make_batch(rank, batch_size=4)
    wanted = run_uncompiled(model, batch, num_microbatches=2)
    if way == "checkpoint":
        for block in [each for each in model.modules() if isinstance(each, Block)]:
            block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    budget = 0.5 if way == "budget" else 1.0
    with torch._functorch.config.patch(activation_memory_budget=budget), fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        results = [take_result(step(*batch), model) for _ in range(NUM_STEPS)]
    assert step.plan is not None
    destroy(groups)
    return [is_equal(result, wanted) for result in results], step.plan.peak_bytes_before


def _checkpointed(forward: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x_BSD: checkpoint(forward, x_BSD, use_reentrant=False)


@pytest.mark.parametrize("way", ["save", "budget", "checkpoint"])
def test_recomputed_layers_have_the_same_bits_and_save_fewer_bytes(run_ranks, way: Way) -> None:
    for equal, num_bytes in run_ranks(_run, 2, way):
        assert equal == [True] * NUM_STEPS
        assert (num_bytes > MAX_BYTES) == (way == "save")


def _run_dropout(rank: int, num_ranks: int) -> tuple[list[Result], str]:
    """Return results with and without a checkpoint of a layer that has dropout."""
    results: list[Result] = []
    torch.manual_seed(0)
    model = SmallModel()
    layer = lambda x_TD: F.dropout(model.first(x_TD).sin(), 0.5).sin()  # noqa: E731
    losses = {
        "saved": lambda x_TD: model(layer(x_TD)),
        "checkpoint": lambda x_TD: model(checkpoint(layer, x_TD, use_reentrant=False)),
    }
    batch = torch.randn(4 * num_ranks, SIZE)
    fallback = ""
    for loss in losses.values():
        with fresh_graphs():
            step = compile_step(loss, 2, inner="eager")
            torch.manual_seed(rank)
            results.append(take_result(step(batch), model))
            fallback = step.fallback
    return results, fallback


@pytest.mark.filterwarnings("ignore:microbatches run one after another")
def test_checkpointed_dropout_has_the_gradients_of_saved_dropout(run_ranks) -> None:
    for (saved, checkpointed), fallback in run_ranks(_run_dropout, 2):
        assert is_equal(checkpointed, saved)
        assert "lanes would change the order of random numbers" in fallback


class _Attention(nn.Module):
    """Attention by GEMMs and softmax, which Inductor replaces by one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        parts = self.heads(x_TD.view(2, -1, SIZE)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in parts)
        shares = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)
        return x_TD + (shares @ v).transpose(1, 2).flatten(2).view(-1, SIZE)


def _run_attention(rank: int, num_ranks: int) -> float:
    torch.manual_seed(0)
    layer, model = _Attention(), SmallModel()
    both = nn.ModuleList([layer, model])
    loss = lambda x_TD: model(checkpoint(layer, x_TD, use_reentrant=False))  # noqa: E731
    batch = (torch.randn(16 * num_ranks, SIZE),)
    with fresh_graphs():
        got = take_result(compile_step(loss, 2, inner="inductor")(*batch), both)
    both.forward = loss  # type: ignore[assignment]
    wanted = run_uncompiled(both, batch, num_microbatches=2)
    pairs = zip((got[0], *got[1]), (wanted[0], *wanted[1]), strict=True)
    return max(relative_error(*pair) for pair in pairs)


def test_checkpointed_attention_has_the_gradients_of_uncompiled_attention(run_ranks) -> None:
    assert max(run_ranks(_run_attention, 2)) < 1e-5
