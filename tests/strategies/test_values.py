"""Strategies on collectives equal the reference, with every gradient, on 1, 2 and 4 ranks."""

import dataclasses
import gc
import time

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.ops.exchange import Exchange
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.strategies.layer_case import LayerCase, expected, run_forward


CPU = torch.device("cpu")
STRATEGIES = ("sequential", "chunked", "all_gather")  # the fused ones have their own files


def run_layer(
    rank: int, case: LayerCase, strategy: str, *, num_chunks: int = 0, group=None
) -> dict[str, torch.Tensor]:
    """Run one layer on one rank; return its output and gradients by the names of ``expected``."""
    recorder = Recorder(CPU, enabled=False)
    layer = build_strategy(
        strategy,
        group,
        recorder=recorder,
        device=CPU,
        tp_size=case.tp_size,
        num_chunks=num_chunks,
    )
    call = run_forward(layer.forward, case, rank)
    call.y_TD.backward(call.grad_TD)
    return call.values()


def check_layer(
    rank: int, num_ranks: int, case: LayerCase, strategy: str, num_chunks: int = 0
) -> None:
    group = dist.group.WORLD if num_ranks > 1 else None
    got = run_layer(rank, case, strategy, num_chunks=num_chunks, group=group)
    tolerance = RELATIVE_TOLERANCE[case.dtype]
    for name, want in expected(case, rank).items():
        error = relative_error(got[name], want)
        assert error <= tolerance, f"{name} is off by {error:.2e} on rank {rank}"


def _tokens(num_ranks: int) -> tuple[int, ...]:
    return tuple(7 + 5 * rank for rank in range(num_ranks))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("top_k", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (8, torch.bfloat16)]
)
def test_values_by_top_k(run_ranks, strategy, num_ranks, top_k, dtype):
    case = LayerCase(num_tokens_W=_tokens(num_ranks), num_experts=16, top_k=top_k, dtype=dtype)
    run_ranks(check_layer, num_ranks, case, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("skew", "top_k"), [("zipf:1.5", 2), ("one-hot", 1), ("empty-expert", 2)])
def test_values_by_skew(run_ranks, strategy, skew, top_k):
    case = LayerCase(num_tokens_W=_tokens(4), top_k=top_k, skew=skew, seed=1)
    run_ranks(check_layer, 4, case, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_tokens_W", [(0, 9), (9, 0), (0, 0), (1, 0), (5, 0, 3, 0)], ids=str)
def test_values_where_ranks_have_no_tokens(run_ranks, strategy, num_tokens_W):
    case = LayerCase(num_tokens_W=num_tokens_W, seed=2)
    run_ranks(check_layer, len(num_tokens_W), case, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("num_ranks", "tp_size", "activation"), [(2, 2, "swiglu"), (4, 2, "gelu"), (4, 4, "swiglu")]
)
def test_values_where_ranks_share_experts(run_ranks, strategy, num_ranks, tp_size, activation):
    case = LayerCase(
        num_tokens_W=(0, *_tokens(num_ranks - 1)),
        tp_size=tp_size,
        top_k=3,
        skew="zipf:1.2",
        dropped=0.2,
        activation=activation,
        seed=5,
    )
    run_ranks(check_layer, num_ranks, case, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("activation", "bias", "dropped"),
    [("swiglu", True, 0.4), ("gelu", True, 0.0), ("gelu", False, 0.4), ("swiglu", False, 1.0)],
)
def test_values_by_expert(run_ranks, strategy, activation, bias, dropped):
    case = LayerCase(
        num_tokens_W=(11, 6), activation=activation, bias=bias, dropped=dropped, seed=3
    )
    run_ranks(check_layer, 2, case, strategy)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_values_by_number_of_chunks(run_ranks, num_chunks):
    case = LayerCase(num_tokens_W=(11, 6), skew="zipf:1.0", seed=4)
    run_ranks(check_layer, 2, case, "chunked", num_chunks)


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
    """Ranks 0 and 2 form a group, and ranks 1 and 3, with different tokens."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    mine = dataclasses.replace(case, seed=case.seed + rank % 2)
    group_rank = rank // 2
    got = run_layer(group_rank, mine, strategy, group=group)
    for name, want in expected(mine, group_rank).items():
        error = relative_error(got[name], want)
        assert error <= RELATIVE_TOLERANCE[torch.float32], f"{name} is off by {error:.2e}"
    dist.destroy_process_group(group)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_in_subgroups(run_ranks, strategy):
    run_ranks(_run_in_subgroups, 4, LayerCase(num_tokens_W=(8, 5)), strategy)


def _run_several_shapes(rank: int, num_ranks: int, strategy: str) -> None:
    for seed, tokens in enumerate([(3, 30), (64, 1), (0, 5), (17, 17)]):
        check_layer(rank, num_ranks, LayerCase(num_tokens_W=tokens, seed=seed), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_of_several_shapes_in_a_row(run_ranks, strategy):
    run_ranks(_run_several_shapes, 2, strategy)


def _count_exchanges() -> int:
    return sum(type(item) is Exchange for item in gc.get_objects())


def _count_leftovers(rank: int, num_ranks: int, case: LayerCase, strategy: str) -> int:
    """Return the number of exchanges that a finished layer leaves to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        run_layer(rank, case, strategy, num_chunks=2, group=dist.group.WORLD)
        end = time.monotonic() + 2.0  # threads of the group may hold the last ones for a moment
        while (count := _count_exchanges()) and time.monotonic() < end:
            time.sleep(0.01)
        return count
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_finished_layer_leaves_no_reference_cycle(run_ranks, strategy):
    """A reference cycle through the graph would keep activations alive until a collection."""
    assert run_ranks(_count_leftovers, 2, LayerCase(num_tokens_W=(8, 5)), strategy) == [0, 0]
