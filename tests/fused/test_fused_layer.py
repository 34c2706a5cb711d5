"""The whole layer in many schedules: same bits fused and unfused, the values of the reference."""

from dataclasses import replace

import pytest
import torch

from halley.core.reference import moe_reference
from halley.core.types import Routing
from halley.symm_mem.heap import SymmTensor
from tests.fused.kernel_case import (
    KernelCase,
    assert_close,
    expected_outputs,
    make_experts,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank
from tests.fused.kernel_world import run_forward, run_world


TWO = KernelCase(num_tokens_CW=((20, 13),))
CASES = {
    "two ranks": TWO,
    "three ranks": replace(TWO, num_tokens_CW=((20, 13, 8),), num_experts=6),
    "four ranks": replace(TWO, num_tokens_CW=((8, 12, 5, 9),), num_experts=4),
    "skewed": replace(TWO, load="zipf:1.2", num_experts=8, top_k=3),
    "empty expert": replace(TWO, load="empty-expert"),
    "one takes all": replace(TWO, load="one-hot", top_k=1),
    "no tokens": replace(TWO, num_tokens_CW=((0, 18, 7),), num_experts=3),
    "dropped": replace(TWO, dropped=0.4),
    "odd sizes": replace(TWO, hidden_size=68, intermediate_size=36),
    "gelu": replace(TWO, activation="gelu"),
    "bfloat16": replace(TWO, dtype=torch.bfloat16, load="std:0.05"),
    "float16": replace(TWO, dtype=torch.float16, activation="gelu"),
    "five calls": replace(TWO, num_tokens_CW=((9, 13), (2, 0), (16, 1), (0, 5), (7, 7))),
    "calls without tokens": replace(
        TWO, num_tokens_CW=((5, 0, 4), (0, 0, 0), (0, 9, 0)), num_experts=3
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_bits(name: str) -> None:
    case = CASES[name]
    reference, unfused = expected_outputs(case), run_forward(case, fused=False)
    for rank, outputs in enumerate(unfused):
        for call, y_TD in enumerate(outputs):
            assert_close(y_TD, reference[rank][call], f"rank {rank}, call {call}")
    seed = list(CASES).index(name)  # a schedule of its own
    fused = run_forward(case, fused=True, seed=seed, starve=0.02 * (seed % 2))
    for outputs, wanted in zip(fused, unfused, strict=True):
        for y_TD, wanted_TD in zip(outputs, wanted, strict=True):
            assert torch.equal(y_TD, wanted_TD), f"seed {seed}"


@pytest.mark.parametrize(("up", "down", "chunk_columns"), [(2, 3, 64), (3, 2, 128)])
def test_tiles_made_in_runs(up: int, down: int, chunk_columns: int) -> None:
    """Runs that end with a row of tiles, with a chunk, or in their midst, give the same bits."""
    config = replace(
        TWO.config,
        up=replace(TWO.config.up, run=up),
        down=replace(TWO.config.down, run=down),
        chunk_columns=chunk_columns,
    )
    one_by_one = replace(TWO, hidden_size=260, intermediate_size=76)
    wanted = run_forward(one_by_one, fused=False)
    for fused in (False, True):
        in_runs = run_forward(replace(one_by_one, config=config), fused=fused, seed=up)
        for outputs, others in zip(in_runs, wanted, strict=True):
            assert torch.equal(outputs[0], others[0])


def test_sums_that_load_all_rows_at_once() -> None:
    case = replace(CASES["skewed"], config=replace(TWO.config, combine_rows=8, combine_stages=1))
    wanted = run_forward(CASES["skewed"], fused=False)
    for outputs, others in zip(run_forward(case, seed=1), wanted, strict=True):
        assert torch.equal(outputs[0], others[0])


@pytest.mark.parametrize("resident", [1, 2, 8])
def test_any_number_of_resident_programs(resident: int) -> None:
    """However few run at a time, none of them waits for one that has not begun."""
    case = replace(TWO, config=replace(TWO.config, num_programs=6))
    outputs = run_forward(case, seed=resident, resident=resident)
    for y, wanted in zip(outputs, expected_outputs(case), strict=True):
        assert_close(y[0], wanted[0])


def _borrow(tensor: SymmTensor, like: SymmTensor) -> SymmTensor:
    """Return the beginning of a symmetric tensor in the shape of another."""
    start = tensor.local.view(-1)[: like.local.numel()]
    return SymmTensor(local=start.view(like.local.shape), ptrs_W=tensor.ptrs_W)


def test_layers_of_several_sizes_share_one_memory() -> None:
    large = replace(TWO, hidden_size=72, intermediate_size=40, max_tokens=20)
    small = replace(TWO, num_tokens_CW=((11, 20),), activation="gelu", max_tokens=20, seed=5)

    def run(first: KernelRank) -> list[torch.Tensor]:
        second = KernelRank(first.heap, small)
        second.routing_buffer, second.counters = first.routing_buffer, first.counters
        second.combine_buffer = _borrow(first.combine_buffer, second.combine_buffer)
        outputs = []
        for call in range(5):
            layer = (first, second)[call % 2]
            outputs.append(layer.forward(*make_tokens(layer.case, layer.rank)))
        return outputs

    wanted = [expected_outputs(large), expected_outputs(small)]
    for rank, outputs in enumerate(run_world(large, run, seed=3)):
        for call, y_TD in enumerate(outputs):
            assert_close(y_TD, wanted[call % 2][rank][0], f"rank {rank}, call {call}")


def test_weights_that_do_not_sum_to_one_and_negative_ones() -> None:
    def routed(rank: int) -> tuple[torch.Tensor, Routing]:
        x_TD, routing = make_tokens(TWO, rank)
        weights_TK = routing.topk_weights_TK * -3.0 + rank
        return x_TD, Routing(topk_idx_TK=routing.topk_idx_TK, topk_weights_TK=weights_TK)

    outputs = run_world(TWO, lambda rank: rank.forward(*routed(rank.rank)))
    for rank, y_TD in enumerate(outputs):
        assert_close(y_TD, moe_reference(*routed(rank), make_experts(TWO)))
