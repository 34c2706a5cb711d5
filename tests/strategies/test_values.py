"""Strategies on collectives equal the reference, with all gradients, on 1, 2 and 4 ranks."""

import dataclasses
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.ops.exchange import Exchange
from halley.strategies.registry import build_strategy
from tests.strategies.layer_case import CPU, LayerCase, check_values, train


STRATEGIES = ("sequential", "chunked", "all_gather")  # fused strategies have their own files

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def run_layer(
    rank: int, case: LayerCase, strategy: str, *, num_chunks: int = 0, group=None
) -> dict[str, torch.Tensor]:
    """Run one layer on one rank; return its output and gradients by the names of ``expected``."""
    sizes: dict[str, Any] = {"tp_size": case.tp_size, "num_chunks": num_chunks}
    recorder = Recorder(CPU, enabled=False)
    layer = build_strategy(strategy, group, recorder=recorder, device=CPU, **sizes)
    return train(layer.forward, case, rank)


def check_layers(rank: int, num_ranks: int, cases: list[LayerCase], strategy: str) -> None:
    """Compare output and gradients of each case with the reference."""
    group = dist.group.WORLD if num_ranks > 1 else None
    for case in cases:
        check_values(run_layer(rank, case, strategy, group=group), case, rank)


@each_strategy
@pytest.mark.parametrize(
    ("num_tokens_W", "top_k", "dtype"),
    [((7,), 2, torch.float32), ((7, 12), 8, torch.bfloat16), ((7, 12, 17, 22), 1, torch.bfloat16)],
    ids=["one rank", "2 ranks", "4 ranks"],
)
def test_values_by_number_of_ranks(run_ranks, strategy, num_tokens_W, top_k, dtype):
    case = LayerCase(num_tokens_W=num_tokens_W, num_experts=16, top_k=top_k, dtype=dtype)
    run_ranks(check_layers, len(num_tokens_W), [case], strategy)


@each_strategy
def test_values_by_skew_and_kind_of_expert(run_ranks, strategy):
    """Uneven loads, ranks without tokens, dropped slots, biases, both activations."""
    cases = [
        LayerCase(num_tokens_W=(7, 12), skew="zipf:1.5", bias=True, dropped=0.4, seed=1),
        LayerCase(num_tokens_W=(7, 12), skew="one-hot", top_k=1, activation="gelu", bias=True),
        LayerCase(num_tokens_W=(7, 12), skew="empty-expert", activation="gelu", dropped=0.4),
        LayerCase(num_tokens_W=(11, 6), dropped=1.0, seed=3),
        LayerCase(num_tokens_W=(0, 9), seed=2),
        LayerCase(num_tokens_W=(1, 0), seed=2),
        LayerCase(num_tokens_W=(0, 0), seed=2),
    ]
    run_ranks(check_layers, 2, cases, strategy)


@each_strategy
@pytest.mark.parametrize(
    ("num_tokens_W", "activation"),
    [((0, 7), "swiglu"), ((0, 7, 12, 17), "gelu")],
    ids=["2 ranks", "4 ranks"],
)
def test_values_where_ranks_share_experts(run_ranks, strategy, num_tokens_W, activation):
    sizes: dict[str, Any] = {"num_tokens_W": num_tokens_W, "tp_size": 2, "top_k": 3, "seed": 5}
    case = LayerCase(activation=activation, skew="zipf:1.2", dropped=0.2, **sizes)
    run_ranks(check_layers, len(num_tokens_W), [case], strategy)


def _run_both(rank: int, num_ranks: int, case: LayerCase) -> None:
    group = dist.group.WORLD
    want = run_layer(rank, case, "sequential", group=group)
    for num_chunks in (0, 2, 3, 4):
        got = run_layer(rank, case, "chunked", num_chunks=num_chunks, group=group)
        for name, value in want.items():
            assert torch.equal(got[name], value), f"{name} with {num_chunks} chunks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunked_equals_sequential_bit_for_bit(run_ranks, dtype):
    case = LayerCase(num_tokens_W=(40, 23), skew="zipf:1.0", top_k=3, bias=True, dtype=dtype)
    run_ranks(_run_both, 2, case)


def _run_in_subgroups(rank: int, num_ranks: int, case: LayerCase, strategy: str) -> None:
    """Run the case in two groups at once: ranks 0 and 2, ranks 1 and 3, with different tokens."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    mine = dataclasses.replace(case, seed=case.seed + rank % 2)
    group_rank = rank // 2
    check_values(run_layer(group_rank, mine, strategy, group=group), mine, group_rank)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("strategy", ["chunked", "all_gather", "fused"])
def test_values_in_subgroups(run_ranks, strategy):
    run_ranks(_run_in_subgroups, 4, LayerCase(num_tokens_W=(8, 5)), strategy)


def _count_leftovers(rank: int, num_ranks: int, case: LayerCase, strategy: str) -> int:
    """Return the number of exchanges that a finished layer leaves to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        run_layer(rank, case, strategy, num_chunks=2, group=dist.group.WORLD)
        end = time.monotonic() + 2.0  # threads of gloo may hold the last exchanges for a moment
        count = 1
        while count and time.monotonic() < end:
            time.sleep(0.01)
            count = sum(type(item) is Exchange for item in gc.get_objects())
        return count
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["sequential", "chunked"])
def test_finished_layer_leaves_no_reference_cycle(run_ranks, strategy):
    """A reference cycle through the graph would keep activations alive until a collection."""
    assert run_ranks(_count_leftovers, 2, LayerCase(num_tokens_W=(8, 5)), strategy) == [0, 0]
