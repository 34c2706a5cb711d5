"""Mistakes in the forward protocol: each must give wrong outputs in one of a few seeded schedules.

These tests measure the other tests: schedules that find every mistake are good evidence that
kernels without a failure in the same schedules are right.
"""

from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch

from halley.fused.kernels import (
    combine,
    combine_gemm,
    dispatch,
    dispatch_plan,
    fetch,
    partial_sums,
    peer,
    routing_exchange,
)
from halley.interpreter.switch import INTERPRETED
from tests.fused.kernel_case import SMALL_CONFIG, KernelCase, assert_close, expected_outputs
from tests.fused.kernel_world import run_forward
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="mutates interpreted kernels")

NUM_SEEDS = 3
MAX_SEEDS = 24  # tried for each mutation; a rank that is far ahead occurs with one seed of six
SHORT_S = 0.3  # time limit of waits for mutations whose flag or row never arrives
# Many CTAs that fetch few rows at once. Rank 0 has no tokens in the first call.
CASE = KernelCase(
    num_tokens_CW=((0, 13), (18, 20)),
    config=replace(SMALL_CONFIG, num_programs=6, fetch_elements=128),
)
# All tokens go to rank 0: rank 1 without tokens waits for no rank and runs ahead to the next call.
AHEAD = replace(CASE, num_tokens_CW=((13, 0), (20, 18), (9, 0), (3, 7)), load="one-hot", top_k=1)


_PUBLISH = "            publish_task(\n"
_SIGNAL_ALL = "            signal_all(LAYOUT.{}, epoch, rank, routing, routing_ptrs_W, LAYOUT)\n"
_COPY = "            copy_rows(row,"
_ALL_DONE = """{}, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:"""
_FIRST_DONE = """{}, 1, sem="acq_rel", scope="sys")
            if before >= 0:"""
_COUNT_ROWS = """
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")
"""
_COUNTED = "(chunk * LAYOUT.num_groups + group_of(expert, LAYOUT)) * _MAX_RUN + columns"
_FETCH_LOOP = "    for start in range(0, HIDDEN_SIZE, COLUMNS):\n"

MUTATIONS = {
    "no wait": Mutation(
        peer.wait,
        (
            ("while (value < target) & healthy:", "while False:"),
            ("return value >= target", "return True"),
        ),
    ),
    "publish: flags before routing": Mutation(
        dispatch_plan.plan_kernel, ((_PUBLISH, _SIGNAL_ALL.format("published") + _PUBLISH),)
    ),
    "publish: the first task sets the flags": Mutation(
        dispatch_plan.plan_kernel,
        ((_ALL_DONE.format("PUBLISHED"), _FIRST_DONE.format("PUBLISHED")),),
        case=replace(CASE, block_slots=8),
        timeout_s=SHORT_S,
        first_seed=1,
    ),
    "copy: the first task sets the flags": Mutation(
        dispatch_plan.plan_kernel,
        ((_ALL_DONE.format("ROWS_COPIED"), _FIRST_DONE.format("ROWS_COPIED")),),
        case=replace(CASE, block_slots=8),
        timeout_s=SHORT_S,
        first_seed=3,
    ),
    "copy: flags before rows": Mutation(
        dispatch_plan.plan_kernel,
        ((_COPY, _SIGNAL_ALL.format("rows_ready") + _COPY),),
        first_seed=9,
    ),
    "copy: the launch ends before all ranks have copied": Mutation(
        dispatch_plan._wait_for_rows, (("range(LAYOUT.num_ranks)", "range(0)"),), first_seed=5
    ),
    "copy: waits for rank 0 only": Mutation(
        dispatch_plan._wait_for_rows,
        (("LAYOUT.rows_ready + peer", "LAYOUT.rows_ready + peer * 0"),),
        first_seed=5,
    ),
    "publish: flags of the next epoch": Mutation(
        peer.signal_all,
        (("rank, epoch)\n", "rank, epoch + 1)\n"),),
        timeout_s=SHORT_S,
        first_seed=1,
    ),
    "publish: one half for the records of all passes": Mutation(
        routing_exchange.record_of,
        (("(epoch % 2) * LAYOUT.num_ranks + source", "source + epoch * 0"),),
        case=AHEAD,
        first_seed=59,
    ),
    "plan: stale epoch": Mutation(
        routing_exchange.count_task, (("wait(flag, epoch,", "wait(flag, epoch - 1,"),)
    ),
    "plan: waits for its own flag only": Mutation(
        routing_exchange.count_task, (("LAYOUT.published + peer", "LAYOUT.published + rank"),)
    ),
    "plan: the first column lays out the rest": Mutation(
        routing_exchange.count_task, (("before % 65536 == num_columns - 1", "before >= 0"),)
    ),
    "plan: places before the offsets are known": Mutation(
        dispatch_plan.plan_kernel, (("wait(planned, epoch,", "wait(planned, epoch - 1,"),)
    ),
    "plan: counters are not zeroed": Mutation(
        dispatch_plan.plan_kernel,
        (("tl.store(counters + TICKET, 0)", "tl.store(counters + TICKET, 1)"),),
        timeout_s=SHORT_S,
    ),
    "dispatch: tiles do not wait": Mutation(
        dispatch.arrived_gemm_kernel, (("wait(arrived, need,", "wait(arrived, 0,"),), first_seed=29
    ),
    "dispatch: the first row of a tile is enough": Mutation(
        dispatch.arrived_gemm_kernel, (("wait(arrived, need,", "wait(arrived, 1,"),), first_seed=21
    ),
    "dispatch: rows counted before they are stored": Mutation(
        fetch._fetch_task,
        ((_COUNT_ROWS, ""), (_FETCH_LOOP, f"{_COUNT_ROWS}{_FETCH_LOOP}")),
        first_seed=13,
    ),
    "dispatch: rows counted for the next tile": Mutation(
        fetch._fetch_task,
        (("row_RK // LAYOUT.block_m", "(row_RK + 1) // LAYOUT.block_m"),),
        timeout_s=SHORT_S,
    ),
    "combine: tiles counted before they are stored": Mutation(
        combine_gemm._multiply_run,
        (
            (
                "    row = tile * BLOCK_M",
                f"    row = tile * BLOCK_M\n    _count_tiles({_COUNTED}, plan, LAYOUT)",
            ),
            (f"return {_COUNTED}", "return 0"),
        ),
        first_seed=5,
    ),
    "combine: one tile too few": Mutation(
        combine._count_ready, ((">= need", ">= need - 1"),), first_seed=3
    ),
    "combine: sums do not wait for the last group of a token": Mutation(
        combine._groups_of_task, (("(has, group + 1, 0)", "(has, group, 0)"),), first_seed=5
    ),
    "combine: tiles counted for the first group": Mutation(
        combine_gemm._multiply_run, ((" + group_of(expert, LAYOUT)", ""),), timeout_s=SHORT_S
    ),
    "combine: the first task of a chunk sets the flags": Mutation(
        partial_sums.count_sent, ((" == num_tasks - 1:", " >= 0:"),), first_seed=3
    ),
    "dispatch: the last CTA of one launch zeroes the counters": Mutation(
        fetch.count_exit,
        (("before == num_exits - 1", "before == tl.num_programs(0) - 1"),),
        timeout_s=SHORT_S,
    ),
    "combine: the last CTA of one launch zeroes the counters": Mutation(
        combine_gemm.count_exit,
        (("before == num_exits - 1", "before == tl.num_programs(0) - 1"),),
        timeout_s=SHORT_S,
    ),
    "combine: flags of the next epoch": Mutation(
        partial_sums.count_sent, (("+ chunk, epoch)", "+ chunk, epoch + 1)"),)
    ),
    "combine: flags on rank 0 only": Mutation(
        partial_sums.count_sent,
        (("peer_ptr(routing_ptrs_W, peer,", "peer_ptr(routing_ptrs_W, 0 * peer,"),),
        timeout_s=SHORT_S,
    ),
    "sum: does not wait": Mutation(
        partial_sums.wait_for_sums, (("wait(flag, epoch,", "wait(flag, 0,"),)
    ),
    "sum: waits for rank 0 only": Mutation(
        partial_sums.wait_for_sums,
        (("LAYOUT.sums_ready + peer *", "LAYOUT.sums_ready + 0 * peer *"),),
        first_seed=1,
    ),
    "sum: looks for the flag of the last epoch": Mutation(
        partial_sums.sums_are_ready, ((">= epoch", ">= epoch - 1"),), first_seed=1
    ),
}


def _run(case: KernelCase, seed: int, *, timeout_s: float = 30.0) -> list[torch.Tensor]:
    """Return the outputs of all ranks and calls; odd seeds run fewer CTAs at once."""
    outputs = run_forward(
        case,
        seed=seed,
        resident=2 if seed % 2 else 4,
        starve=0.05 * (seed % 2),
        timeout_s=timeout_s,
    )
    return list(chain.from_iterable(outputs))


@cache
def _right_outputs(case: KernelCase) -> list[torch.Tensor]:
    """Return the outputs of the unfused kernels, after a comparison with the reference."""
    outputs = list(chain.from_iterable(run_forward(case, fused=False)))
    for y_TD, wanted_TD in zip(outputs, chain.from_iterable(expected_outputs(case)), strict=True):
        assert_close(y_TD, wanted_TD)
    return outputs


def _is_right(case: KernelCase, seed: int, *, timeout_s: float = 30.0) -> bool:
    outputs = _run(case, seed, timeout_s=timeout_s)
    return all(map(torch.equal, outputs, _right_outputs(case)))


def _is_caught(mutation: Mutation, seed: int) -> bool:
    try:
        return not _is_right(mutation.case or CASE, seed, timeout_s=mutation.timeout_s)
    except (IndexError, RuntimeError):  # a bad address, or a wait that times out
        return True


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_unmutated_kernels_are_right_with_every_seed(seed: int) -> None:
    """The short time limit fails no right kernel, so a mutation that fails with it is a mistake."""
    assert _is_right(CASE, seed, timeout_s=SHORT_S)
    assert _is_right(AHEAD, seed, timeout_s=SHORT_S)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    _right_outputs(mutation.case or CASE)  # before the mutation
    apply(mutation, monkeypatch)
    seeds = range(mutation.first_seed, mutation.first_seed + MAX_SEEDS)
    caught = (_is_caught(mutation, seed) for seed in seeds)
    assert any(caught), f"{name} shows with none of {MAX_SEEDS} seeds"
