"""Mistakes in the protocol of backward: each must show in one of a few seeded schedules.

Forward runs without them. What runs with them are passes on its plans: some dispatches, then a
backward on another plan and one on the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain

import pytest
import torch

from halley.fused.kernels import dispatch_gemm, fetch, gemm_combine, home, publish, stage
from halley.interpreter.switch import INTERPRETED
from tests.fused.kernel_case import (
    SMALL_KNOBS,
    Gradients,
    KernelCase,
    assert_close,
    expected_gradients,
    make_dy,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank, Tape
from tests.fused.kernel_world import run_world
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="mutates interpreted kernels")

NUM_SEEDS = 6
MOST_SEEDS = 48  # until a mutation shows; one that needs a rank far ahead shows in one of eight
NOTHING = 1e6  # in place of NaN, where nothing was written
SHORT_S = 0.3  # where a mistake means that something never comes
# Two programs stage the rows of rank 1. All its tokens go to rank 0, so that it has few rows to
# multiply and runs ahead, into the second call without anything to wait for but stages.
CASE = KernelCase(
    num_tokens_CW=((4, 18), (3, 0)),
    load="one-hot",
    block_slots=64,
    knobs=replace(
        SMALL_KNOBS,
        num_programs=3,
        up=replace(SMALL_KNOBS.up, block_k=64),
        # Two parts make up the gradient of a routing weight.
        down_grad=replace(SMALL_KNOBS.down_grad, block_n=16, block_k=64),
        up_grad=replace(SMALL_KNOBS.up_grad, block_k=64),
    ),
)

_STAGE_ROWS = """\
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        stage_rows(first, x_TD, stage_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
"""
_TELL_CALL = """\
    if tl.program_id(0) == 0:
        for peer in range(LAYOUT.num_ranks):
            tl.store(call_of(peer_ptr(words_ptrs_W, peer, words), rank, epoch, LAYOUT), call)
"""
_RAISE_FLAGS = "        raise_flags(LAYOUT.arrived, epoch, rank, words, words_ptrs_W, LAYOUT)\n"
_SPREAD = "    if SPREAD:\n"
_WAIT = "    if is_last:\n        _wait_for_all("
_COUNT_CLEARED = """\
        arrived = plan + LAYOUT.tile_arrived + begin // LAYOUT.block_m
        tl.atomic_add(arrived, end - begin, sem="release", scope="gpu")
"""
_CLEAR_LOOP = "    for first in range(begin, end, ROWS):\n"
_SEND_WEIGHT_GRADIENTS = """\
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        which, dweight_RC, plan, weights_home_ptrs_W, home_tokens, rank,
                        LAYOUT, NUM_PARTS, ROWS,
                    )  # fmt: skip
"""
_COUNT_SENT = """\
            count_sent(chunk, tasks_a_chunk, plan, words, words_ptrs_W, rank, epoch, LAYOUT)
"""

MUTATIONS = {
    "stage: flags before rows": Mutation(
        function=stage.stage_kernel,
        edits=((_STAGE_ROWS, ""), (_SPREAD, f"{_STAGE_ROWS}{_SPREAD}")),
        first_seed=21,
    ),
    "stage: the first to have staged raises the flags": Mutation(
        function=stage.stage_kernel,
        edits=(("    is_last =", f"    if before == 0:\n{_RAISE_FLAGS}    is_last ="),),
        first_seed=8,
    ),
    "stage: flags before the call is told": Mutation(
        function=stage.stage_kernel,
        edits=((_TELL_CALL, ""), (_SPREAD, f"{_TELL_CALL}{_SPREAD}")),
        first_seed=11,
    ),
    "stage: one half for the call of all passes": Mutation(
        function=publish.call_of, edits=(("(epoch % 2) * LAYOUT.num_ranks", "0"),)
    ),
    "stage: mark is not zeroed": Mutation(
        function=stage.stage_kernel,
        edits=(("        tl.store(marks + PUBLISHED, 0)\n", ""),),
        timeout_s=SHORT_S,
    ),
    "stage: the first program waits": Mutation(
        function=stage.stage_kernel,
        edits=((_WAIT, _WAIT.replace("is_last", "tl.program_id(0) == 0")),),
        timeout_s=SHORT_S,
    ),
    "stage: does not wait": Mutation(
        function=stage._wait_for_all, edits=(("wait(flag, epoch,", "wait(flag, 0,"),)
    ),
    "stage: stale epoch": Mutation(
        function=stage._wait_for_all, edits=(("wait(flag, epoch,", "wait(flag, epoch - 1,"),)
    ),
    "stage: waits for rank 0 only": Mutation(
        function=stage._wait_for_all, edits=(("arrived + peer", "arrived + 0 * peer"),)
    ),
    "stage: weights in the order of the other list": Mutation(
        function=stage._spread_weights, edits=(("LAYOUT.sum_slot", "LAYOUT.fetch_slot"),)
    ),
    "clear: counted before it is stored": Mutation(
        function=fetch.clear_task,
        edits=(
            (_COUNT_CLEARED, ""),
            (_CLEAR_LOOP, f"    if end > begin:\n{_COUNT_CLEARED}{_CLEAR_LOOP}"),
        ),
        first_seed=1,
    ),
    "clear: not counted": Mutation(
        function=fetch.clear_task, edits=((_COUNT_CLEARED, ""),), timeout_s=SHORT_S
    ),
    "dispatch: tiles wait for as many as there are rows": Mutation(
        function=dispatch_gemm.multiply_arrived_kernel,
        edits=(("need += rows_to_clear(num_rows, CLEAR)", "need += 0"),),
        first_seed=1,
    ),
    "dispatch: fetch tickets are not zeroed": Mutation(
        function=dispatch_gemm._reset,
        edits=(("    tl.store(tickets + _FETCH_TICKET, 0)\n", ""),),
        timeout_s=SHORT_S,
    ),
    "combine: gradients of weights after the flags": Mutation(
        function=gemm_combine.combine_kernel,
        edits=((_SEND_WEIGHT_GRADIENTS, ""), (_COUNT_SENT, _COUNT_SENT + _SEND_WEIGHT_GRADIENTS)),
        first_seed=27,
    ),
    "combine: gradients of weights with the last chunk": Mutation(
        function=gemm_combine.combine_kernel,
        edits=(("if chunk == 0:\n", "if chunk == num_chunks - 1:\n"),),
        first_seed=1,
    ),
    "home: gradients of weights in the wrong order": Mutation(
        function=home._take_weight_gradients, edits=(("k > other", "k < other"),)
    ),
    "home: does not wait": Mutation(
        function=home.wait_for_chunk, edits=(("wait(flag, epoch,", "wait(flag, 0,"),)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What comes out of one rank's passes.

    Attributes:
        rows_RD: the rows of each dispatch.
        gradients: a call each.
    """

    rows_RD: list[torch.Tensor]
    gradients: list[Gradients]


def _forward(rank: KernelRank, *, call: int) -> Tape:
    """Run a call as far as its backward needs it."""
    x_TD, routing = make_tokens(rank.case, rank.rank, call=call)
    rows = rank.make_rows(rank.make_plan(x_TD, routing))
    rank.dispatch_gemm(rows)
    rank.check()
    return Tape(plan=rank.plan, rows=rows, routing=routing)


def _run(
    case: KernelCase,
    seed: int,
    *,
    timeout_s: float = 30.0,
    fused: bool = True,
    mutate: Callable[[], object] = lambda: None,
) -> list[Passes]:
    """Return what comes out of all ranks; seeds differ in how programs run, too."""

    def run(rank: KernelRank) -> Passes:
        first, second = (_forward(rank, call=call) for call in range(2))
        rank.heap.barrier()
        if rank.rank == 0:
            mutate()
        rank.heap.barrier()
        rank.plan = first.plan
        rows_RD: list[torch.Tensor] = []
        for scale in (2.0, 4.0, 1.0):
            first.rows = rank.make_rows(len(first.rows.x_RD))
            rank.stage_again(make_tokens(case, rank.rank)[0] * scale, None)
            rank.dispatch_gemm(first.rows, fused=fused)
            rows_RD.append(first.rows.x_RD.nan_to_num(NOTHING))
        of_second = rank.backward(make_dy(case, rank.rank, call=1), second, fused=fused)
        of_first = rank.backward(make_dy(case, rank.rank), first, fused=fused)
        return Passes(rows_RD=rows_RD, gradients=[of_first, of_second])

    return run_world(
        case,
        run,
        seed=seed,
        resident=4 if seed % 2 else 1,
        starve=0.1,
        timeout_s=timeout_s,
    )


@cache
def _right_passes(case: KernelCase) -> list[Passes]:
    """Return what comes out of the unfused form, which is what the reference gives."""
    by_rank = _run(case, 0, fused=False)
    for call in range(2):
        for passes, wanted in zip(by_rank, expected_gradients(case, call=call), strict=True):
            for field in fields(Gradients):
                value = getattr(passes.gradients[call], field.name)
                assert_close(value, getattr(wanted, field.name), field.name)
    return by_rank


def _is_right(
    case: KernelCase,
    seed: int,
    *,
    timeout_s: float = 30.0,
    mutate: Callable[[], object] = lambda: None,
) -> bool:
    by_rank = _run(case, seed, timeout_s=timeout_s, mutate=mutate)
    pairs = zip(*(map(_flatten, passes) for passes in (by_rank, _right_passes(case))), strict=True)
    return all(all(map(torch.equal, got, wanted)) for got, wanted in pairs)


def _flatten(passes: Passes) -> list[torch.Tensor]:
    gradients = chain.from_iterable(vars(of_call).values() for of_call in passes.gradients)
    return [*passes.rows_RD, *gradients]


def _seed_that_shows(
    mutate: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    case: KernelCase,
    timeout_s: float,
    first_seed: int = 0,
) -> int | None:
    """Return the first seed with which gradients are wrong or none come."""
    _right_passes(case)  # before the mutation
    for seed in range(first_seed, first_seed + MOST_SEEDS):
        with monkeypatch.context() as patch:
            try:
                right = _is_right(
                    case, seed, timeout_s=timeout_s, mutate=lambda patch=patch: mutate(patch)
                )
            except (IndexError, RuntimeError):  # an address that is none, a wait without end
                right = False
        if not right:
            return seed
    return None


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_unmutated_kernels_are_right_with_every_seed(seed: int) -> None:
    assert _is_right(CASE, seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    seed = _seed_that_shows(
        lambda patch: apply(mutation, patch),
        monkeypatch,
        case=mutation.case or CASE,
        timeout_s=mutation.timeout_s,
        first_seed=mutation.first_seed,
    )
    assert seed is not None, f"{name} shows with none of {MOST_SEEDS} seeds"


def test_one_stage_for_all_passes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        for kernel, half in (
            (stage.stage_kernel, "(epoch % 2)"),
            (dispatch_gemm.fetch_kernel, "(tl.load(marks + EPOCH) % 2)"),
        ):
            none = half.replace("% 2", "* 0")
            apply(Mutation(function=kernel, edits=((half, none),)), patch)
        patch.setattr(KernelRank, "begin", lambda rank: None)

    assert _seed_that_shows(mutate, monkeypatch, case=CASE, timeout_s=30.0) is not None
