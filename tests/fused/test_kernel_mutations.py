"""Mistakes in the protocol of the kernels: each must show in one of a few seeded schedules.

That the schedules find them is the ground on which the same schedules may say that the kernels are
right.
"""

from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch

from halley.fused.kernels import (
    combine,
    combine_tiles,
    count,
    dispatch_gemm,
    fetch,
    gemm_combine,
    home,
    peer,
    publish,
)
from halley.fused.kernels import dispatch_plan as plan
from halley.interpreter.switch import INTERPRETED
from tests.fused.kernel_case import SMALL_KNOBS, KernelCase, assert_close, expected_outputs
from tests.fused.kernel_world import run_forward
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="mutates interpreted kernels")

NUM_SEEDS = 6
MOST_SEEDS = 24  # until a mutation shows; one that needs a rank far ahead shows in one of six
SHORT_S = 0.3  # where a mistake means that something never comes
# Programs begin one after another and fetch few rows at once. Rank 0 has no tokens at first.
CASE = KernelCase(
    num_tokens_CW=((0, 13), (18, 20)),
    knobs=replace(SMALL_KNOBS, num_programs=6, fetch_elements=128),
)
# All go to rank 0: rank 1 without tokens waits for nobody and runs ahead into the next call.
AHEAD = replace(CASE, num_tokens_CW=((13, 0), (20, 18), (9, 0), (3, 7)), load="one-hot", top_k=1)


_ROUTE = "            route_task(\n"
_RAISE_FLAGS = "            raise_flags(LAYOUT.{}, epoch, rank, words, words_ptrs_W, LAYOUT)\n"
_STAGE = "            stage_rows(row,"
_ALL_DONE = """{}, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:"""
_FIRST_DONE = """{}, 1, sem="acq_rel", scope="sys")
            if before >= 0:"""
_SOURCE = "origin // LAYOUT.max_tokens"
_COUNT_ROWS = """
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")
"""
_COUNTED = "(chunk * LAYOUT.num_groups + group_of(expert, LAYOUT)) * _MAX_RUN + columns"
_FETCH_LOOP = "    for start in range(0, HIDDEN_SIZE, COLUMNS):\n"

MUTATIONS = {
    "no wait": Mutation(
        function=peer.wait,
        edits=(
            ("while (value < target) & healthy:", "while False:"),
            ("return value >= target", "return True"),
        ),
    ),
    "publish: flags before data": Mutation(
        function=plan.plan_kernel,
        edits=((_ROUTE, _RAISE_FLAGS.format("arrived") + _ROUTE),),
    ),
    "publish: the first task raises the flags": Mutation(
        function=plan.plan_kernel,
        edits=((_ALL_DONE.format("PUBLISHED"), _FIRST_DONE.format("PUBLISHED")),),
        case=replace(CASE, block_slots=8),
        timeout_s=SHORT_S,
        first_seed=1,
    ),
    "stage: the first task raises the flags": Mutation(
        function=plan.plan_kernel,
        edits=((_ALL_DONE.format("STAGED"), _FIRST_DONE.format("STAGED")),),
        case=replace(CASE, block_slots=8),
        timeout_s=SHORT_S,
        first_seed=3,
    ),
    "stage: flags before rows": Mutation(
        function=plan.plan_kernel,
        edits=((_STAGE, _RAISE_FLAGS.format("staged") + _STAGE),),
        first_seed=7,
    ),
    "stage: the plan ends before": Mutation(
        function=plan._wait_for_rows,
        edits=(("range(LAYOUT.num_ranks)", "range(0)"),),
        first_seed=1,
    ),
    "stage: waits for its own rows only": Mutation(
        function=plan._wait_for_rows,
        edits=(("LAYOUT.staged + peer", "LAYOUT.staged + peer * 0"),),
        first_seed=5,
    ),
    "publish: flags of the next epoch": Mutation(
        function=publish.raise_flags, edits=(("rank, epoch)\n", "rank, epoch + 1)\n"),)
    ),
    "publish: one half of the mailbox": Mutation(
        function=publish.record_of,
        edits=(("(epoch % 2) * LAYOUT.num_ranks + source", "source + epoch * 0"),),
        case=AHEAD,
        first_seed=55,
    ),
    "plan: stale epoch": Mutation(
        function=count.count_task, edits=(("wait(flag, epoch,", "wait(flag, epoch - 1,"),)
    ),
    "plan: waits for its own flag only": Mutation(
        function=count.count_task, edits=(("LAYOUT.arrived + peer", "LAYOUT.arrived + rank"),)
    ),
    "plan: the first column lays out the rest": Mutation(
        function=count.count_task, edits=(("before % 65536 == num_columns - 1", "before >= 0"),)
    ),
    "plan: places before all is laid out": Mutation(
        function=plan.plan_kernel, edits=(("wait(laid_out, epoch,", "wait(laid_out, epoch - 1,"),)
    ),
    "plan: marks are not zeroed": Mutation(
        function=plan.plan_kernel,
        edits=(("tl.store(marks + TICKET, 0)", "tl.store(marks + TICKET, 1)"),),
        timeout_s=SHORT_S,
    ),
    "dispatch: tiles do not wait": Mutation(
        function=dispatch_gemm.multiply_arrived_kernel,
        edits=(("wait(arrived, need,", "wait(arrived, 0,"),),
        first_seed=25,
    ),
    "dispatch: the first row of a tile is enough": Mutation(
        function=dispatch_gemm.multiply_arrived_kernel,
        edits=(("wait(arrived, need,", "wait(arrived, 1,"),),
        first_seed=21,
    ),
    "dispatch: rows counted before they are stored": Mutation(
        function=fetch.fetch_task,
        edits=((_COUNT_ROWS, ""), (_FETCH_LOOP, f"{_COUNT_ROWS}{_FETCH_LOOP}")),
        first_seed=7,
    ),
    "dispatch: rows of the wrong source": Mutation(
        function=fetch.fetch_task,
        edits=((f"stage_ptrs_W + {_SOURCE}", f"stage_ptrs_W + (1 - {_SOURCE})"),),
    ),
    "dispatch: rows counted for the next tile": Mutation(
        function=fetch.fetch_task,
        edits=(("row_RK // LAYOUT.block_m", "(row_RK + 1) // LAYOUT.block_m"),),
        timeout_s=SHORT_S,
    ),
    "dispatch: own rows do not come": Mutation(
        function=fetch.fetch_task,
        edits=(("real = origin >= 0", "real = (origin >= 0) & (task > 0)"),),
        timeout_s=SHORT_S,
    ),
    "combine: tiles counted before they are stored": Mutation(
        function=combine_tiles.multiply_tiles,
        edits=(
            (
                "    row = tile * BLOCK_M",
                f"    row = tile * BLOCK_M\n    count_tiles({_COUNTED}, plan, LAYOUT)",
            ),
            (f"return {_COUNTED}", "return 0"),
        ),
        first_seed=5,
    ),
    "combine: one tile too few": Mutation(
        function=combine_tiles.count_ready, edits=((">= need", ">= need - 1"),)
    ),
    "combine: sums do not wait for their last group": Mutation(
        function=combine_tiles.groups_of_task,
        edits=(("(has, group + 1, 0)", "(has, group, 0)"),),
        first_seed=5,
    ),
    "combine: tiles counted for the first group": Mutation(
        function=combine_tiles.multiply_tiles,
        edits=((" + group_of(expert, LAYOUT)", ""),),
        timeout_s=SHORT_S,
    ),
    "combine: tasks of own sends in the place of others": Mutation(
        function=combine_tiles.nth_task,
        edits=(("num_others + own, within - own", "own, within - own"),),
    ),
    "combine: the first task of a chunk raises the flags": Mutation(
        function=combine.count_sent, edits=((" == num_tasks - 1:", " >= 0:"),)
    ),
    "dispatch: the last of one launch leaves": Mutation(
        function=dispatch_gemm._leave,
        edits=(("before == num_leaving - 1", "before == tl.num_programs(0) - 1"),),
        timeout_s=SHORT_S,
    ),
    "combine: the last of one launch leaves": Mutation(
        function=gemm_combine._leave,
        edits=(("before == num_leaving - 1", "before == tl.num_programs(0) - 1"),),
        timeout_s=SHORT_S,
    ),
    "combine: flags of the next epoch": Mutation(
        function=combine.count_sent, edits=(("+ chunk, epoch)", "+ chunk, epoch + 1)"),)
    ),
    "combine: flags on rank 0 only": Mutation(
        function=combine.count_sent,
        edits=(("peer_ptr(words_ptrs_W, peer,", "peer_ptr(words_ptrs_W, 0 * peer,"),),
        timeout_s=SHORT_S,
    ),
    "combine: sums in the place of the other rank": Mutation(
        function=combine._store_sums, edits=(("((rank * home", "(((1 - rank) * home"),)
    ),
    "home: does not wait": Mutation(
        function=home.wait_for_chunk,
        edits=(("wait(flag, epoch,", "wait(flag, 0,"),),
    ),
    "home: waits for rank 0 only": Mutation(
        function=home.wait_for_chunk,
        edits=(("LAYOUT.home + peer *", "LAYOUT.home + 0 * peer *"),),
    ),
    "home: looks for the last epoch": Mutation(
        function=home.chunk_came,
        edits=((">= epoch", ">= epoch - 1"),),
        first_seed=1,
    ),
}


def _run(case: KernelCase, seed: int, *, timeout_s: float = 30.0) -> list[torch.Tensor]:
    """Return the outputs of all ranks and calls; seeds differ in how programs run, too."""
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
    """Return the outputs of the unfused form, which are those of the reference."""
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
    except (IndexError, RuntimeError):  # an address that is none, a wait without end
        return True


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_unmutated_kernels_are_right_with_every_seed(seed: int) -> None:
    assert _is_right(CASE, seed)
    assert _is_right(AHEAD, seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    _right_outputs(mutation.case or CASE)  # before the mutation
    apply(mutation, monkeypatch)
    seeds = range(mutation.first_seed, mutation.first_seed + MOST_SEEDS)
    caught = (_is_caught(mutation, seed) for seed in seeds)
    assert any(caught), f"{name} shows with none of {MOST_SEEDS} seeds"
