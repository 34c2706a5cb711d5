"""Mistakes in the protocol: each gives a wrong result, or a failed wait, in a seeded schedule.

These tests measure the other tests. Schedules that find every mistake are good evidence that
kernels without a failure in the same schedules are right. There is a mistake for each flag, counter
and half of a buffer on which kernels wait, on the side that signals or on the side that waits.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from itertools import chain

import pytest
import torch

from halley.fused.kernels import (
    combine,
    combine_gemm,
    dispatch_plan,
    fetch,
    partial_sums,
    peer,
    routing_exchange,
    send_buffer,
)
from halley.interpreter.switch import INTERPRETED
from tests.fused.kernel_case import (
    SMALL_CONFIG,
    Gradients,
    KernelCase,
    assert_close,
    expected_gradients,
    expected_outputs,
    make_dy,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank, SavedCall
from tests.fused.kernel_world import run_forward, run_world
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="mutates interpreted kernels")

MAX_SEEDS = 48  # tried for each mutation; a rank that is far ahead occurs with one seed of eight
LIMIT_S = 30.0  # time limit of waits for mutations that make no wait fail
SHORT_S = 0.3  # time limit of waits for mutations whose flag or row never arrives
NOT_WRITTEN = 1e6  # replaces NaN, which is not equal to itself

# Many CTAs that fetch few rows at once. Rank 0 has no tokens in the first call.
FORWARD = KernelCase(
    num_tokens_CW=((0, 13), (18, 20)),
    config=replace(SMALL_CONFIG, num_programs=6, fetch_elements=128),
)
BLOCKS = replace(FORWARD, block_slots=8)  # several tasks publish and copy
# All tokens go to rank 0: rank 1 without tokens waits for no rank and runs ahead to the next call.
AHEAD = replace(FORWARD, num_tokens_CW=((13, 0), (20, 18), (9, 0), (3, 7)), load="one-hot", top_k=1)
# Two CTAs copy the rows of rank 1. All its tokens go to rank 0, so that rank 1 has few rows to
# multiply and runs ahead to the next pass.
BACKWARD = KernelCase(
    num_tokens_CW=((4, 18), (3, 0)),
    load="one-hot",
    block_slots=64,
    config=replace(
        SMALL_CONFIG,
        num_programs=3,
        up=replace(SMALL_CONFIG.up, block_k=64),
        # Two parts make up the gradient of a routing weight.
        down_grad=replace(SMALL_CONFIG.down_grad, block_n=16, block_k=64),
        up_grad=replace(SMALL_CONFIG.up_grad, block_k=64),
    ),
)

_ALL_DONE = """{}, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:"""
_FIRST_DONE = _ALL_DONE.replace("== num_tasks - 1", ">= 0")
_COUNT_ROWS = """
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")
"""
_FETCH_LOOP = "    for start in range(0, HIDDEN_SIZE, COLUMNS):\n"
_COUNTED = "(chunk * LAYOUT.num_groups + group_of(expert, LAYOUT)) * _MAX_RUN + columns"
_TELL_CALL = """\
    if tl.program_id(0) == 0:
        for peer in range(LAYOUT.num_ranks):
            theirs = peer_ptr(routing_ptrs_W, peer, routing)
            tl.store(call_in_use(theirs, rank, epoch, LAYOUT), call)
"""
_SIGNAL_ALL = "        signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)\n"
_SPREAD = "    if SPREAD_WEIGHTS:\n"
_WAIT_IF_LAST = "    if is_last:\n        _wait_for_all("
_COUNT_ZEROED = """\
        arrived = plan + LAYOUT.tile_arrived + begin // LAYOUT.block_m
        tl.atomic_add(arrived, end - begin, sem="release", scope="gpu")
"""
_ZERO_LOOP = "    for first in range(begin, end, ROWS):\n"
_SEND_WEIGHT_GRADIENTS = """\
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        task, dweight_RJ, plan, dweight_ptrs_W, combine_tokens, rank,
                        LAYOUT, NUM_SUMMANDS, ROWS,
                    )  # fmt: skip
"""
_COUNT_SENT = """\
            count_sent(chunk, chunk_tasks, plan, routing, routing_ptrs_W, rank, epoch, LAYOUT)
"""

MUTATIONS = {
    "published: set by the first task": Mutation(
        dispatch_plan.plan_kernel,
        ((_ALL_DONE.format("PUBLISHED"), _FIRST_DONE.format("PUBLISHED")),),
        case=BLOCKS,
        timeout_s=SHORT_S,
        first_seed=3,
    ),
    "published: set to the next epoch": Mutation(
        peer.signal_all,
        (("rank, epoch)\n", "rank, epoch + 1)\n"),),
        case=FORWARD,
        timeout_s=SHORT_S,
        first_seed=2,
    ),
    "published: count waits for the last epoch": Mutation(
        routing_exchange.count_task,
        (("wait(flag, epoch,", "wait(flag, epoch - 1,"),),
        case=FORWARD,
        first_seed=8,
    ),
    "records: one half for all passes": Mutation(
        routing_exchange.record_of,
        (("(epoch % 2) * LAYOUT.num_ranks + source", "source + epoch * 0"),),
        case=AHEAD,
        first_seed=59,
    ),
    "rows_ready: set by the first task": Mutation(
        dispatch_plan.plan_kernel,
        ((_ALL_DONE.format("ROWS_COPIED"), _FIRST_DONE.format("ROWS_COPIED")),),
        case=BLOCKS,
        timeout_s=SHORT_S,
        first_seed=3,
    ),
    "COUNTED: the first column lays out the rest": Mutation(
        routing_exchange.count_task,
        (("before % 65536 == num_columns - 1", "before >= 0"),),
        case=FORWARD,
    ),
    "PLANNED: place waits for the last epoch": Mutation(
        dispatch_plan.plan_kernel,
        (("wait(planned, epoch,", "wait(planned, epoch - 1,"),),
        case=FORWARD,
    ),
    "tile_arrived: rows counted before they are stored": Mutation(
        fetch._fetch_task,
        ((_COUNT_ROWS, ""), (_FETCH_LOOP, f"{_COUNT_ROWS}{_FETCH_LOOP}")),
        case=FORWARD,
        first_seed=13,
    ),
    "chunk_done: tiles counted before they are stored": Mutation(
        combine_gemm._second_gemm_run,
        (
            (
                "    row = tile * BLOCK_M",
                f"    row = tile * BLOCK_M\n    _count_tiles({_COUNTED}, plan, LAYOUT)",
            ),
            (f"return {_COUNTED}", "return 0"),
        ),
        case=FORWARD,
        first_seed=9,
    ),
    "chunk_done: the last group of a token is not awaited": Mutation(
        combine._groups_of_task,
        (("(has, group + 1, 0)", "(has, group, 0)"),),
        case=FORWARD,
        first_seed=11,
    ),
    "exits: the last CTA of one launch zeroes the counters": Mutation(
        peer.exits_last,
        (("== num_exits - 1", "== tl.num_programs(0) - 1"),),
        case=FORWARD,
        timeout_s=SHORT_S,
        first_seed=9,
    ),
    "sums_ready: set by the first task of a chunk": Mutation(
        partial_sums.count_sent,
        ((" == num_tasks - 1:", " >= 0:"),),
        case=FORWARD,
        first_seed=7,
    ),
    "sums_ready: polled for the last epoch": Mutation(
        partial_sums.sums_are_ready,
        ((">= epoch", ">= epoch - 1"),),
        case=FORWARD,
        first_seed=1,
    ),
    "backward: published set by the first CTA": Mutation(
        send_buffer.publish_rows_kernel,
        (("    is_last =", f"    if before == 0:\n{_SIGNAL_ALL}    is_last ="),),
        case=BACKWARD,
        first_seed=8,
    ),
    "backward: published set before the call": Mutation(
        send_buffer.publish_rows_kernel,
        ((_TELL_CALL, ""), (_SPREAD, f"{_TELL_CALL}{_SPREAD}")),
        case=BACKWARD,
        first_seed=11,
    ),
    "backward: the first CTA waits": Mutation(
        send_buffer.publish_rows_kernel,
        ((_WAIT_IF_LAST, _WAIT_IF_LAST.replace("is_last", "tl.program_id(0) == 0")),),
        case=BACKWARD,
        timeout_s=SHORT_S,
        first_seed=10,
    ),
    "call_in_use: one half for all passes": Mutation(
        routing_exchange.call_in_use,
        (("(epoch % 2) * LAYOUT.num_ranks", "0"),),
        case=BACKWARD,
        first_seed=4,
    ),
    "zero rows: counted before they are stored": Mutation(
        fetch._zero_task,
        (
            (_COUNT_ZEROED, ""),
            (_ZERO_LOOP, f"    if end > begin:\n{_COUNT_ZEROED}{_ZERO_LOOP}"),
        ),
        case=BACKWARD,
        first_seed=7,
    ),
    "weight gradients: sent after the flags": Mutation(
        combine.combine_kernel,
        ((_SEND_WEIGHT_GRADIENTS, ""), (_COUNT_SENT, _COUNT_SENT + _SEND_WEIGHT_GRADIENTS)),
        case=BACKWARD,
        first_seed=3,
    ),
}


def _outputs(
    case: KernelCase,
    *,
    seed: int = 0,
    timeout_s: float = LIMIT_S,
    fused: bool = True,
    mutate: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Run all calls forward; return the outputs. Odd seeds run fewer CTAs at once."""
    mutate()
    starve, resident = 0.05 * (seed % 2), 2 if seed % 2 else 4
    outputs = run_forward(
        case, fused=fused, seed=seed, resident=resident, starve=starve, timeout_s=timeout_s
    )
    return list(chain.from_iterable(outputs))


def _save(rank: KernelRank, *, call: int) -> SavedCall:
    """Run the part of a call that its backward needs."""
    x_TD, routing = make_tokens(rank.case, rank.rank, call=call)
    rows = rank.make_rows(rank.make_plan(x_TD, routing))
    rank.dispatch_gemm(rows)
    rank.check()
    return SavedCall(plan=rank.plan, rows=rows, routing=routing)


def _passes(
    case: KernelCase,
    *,
    seed: int = 0,
    timeout_s: float = LIMIT_S,
    fused: bool = True,
    mutate: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Run two calls forward, then ``mutate``, then passes that reuse their plans.

    The plan of call 0 is dispatched three times; then the backward passes of both calls run. Even
    seeds run one CTA of a launch at a time. Returns the gradients of call 0 and of call 1, then the
    dispatched rows, of one rank after another.
    """

    def run(rank: KernelRank) -> list[torch.Tensor]:
        first, second = (_save(rank, call=call) for call in range(2))
        rank.heap.barrier()
        if rank.rank == 0:
            mutate()
        rank.heap.barrier()
        rank.plan = first.plan
        rows_RD: list[torch.Tensor] = []
        for scale in (2.0, 4.0, 1.0):
            first.rows = rank.make_rows(len(first.rows.x_RD))
            rank.publish_rows(make_tokens(case, rank.rank)[0] * scale, None)
            rank.dispatch_gemm(first.rows, fused=fused)
            rows_RD.append(first.rows.x_RD.nan_to_num(NOT_WRITTEN))
        of_second = rank.backward(make_dy(case, rank.rank, call=1), second, fused=fused)
        of_first = rank.backward(make_dy(case, rank.rank), first, fused=fused)
        return [*vars(of_first).values(), *vars(of_second).values(), *rows_RD]

    resident = 4 if seed % 2 else 1
    by_rank = run_world(case, run, seed=seed, resident=resident, starve=0.1, timeout_s=timeout_s)
    return list(chain.from_iterable(by_rank))


@cache
def _right_results(case: KernelCase) -> list[torch.Tensor]:
    """Return the results of the unfused kernels, after a comparison with the reference."""
    if case != BACKWARD:
        results = _outputs(case, fused=False)
        wanted = list(chain.from_iterable(expected_outputs(case)))
        compared = results
    else:
        results = _passes(case, fused=False)
        names = [field.name for field in fields(Gradients)]
        first, second = (expected_gradients(case, call=call) for call in range(2))
        wanted = [
            getattr(gradients, name)
            for of_first, of_second in zip(first, second, strict=True)
            for gradients in (of_first, of_second)
            for name in names
        ]
        num_results, num_compared = len(results) // case.num_ranks, 2 * len(names)
        compared = [r for i, r in enumerate(results) if i % num_results < num_compared]
    for value, reference in zip(compared, wanted, strict=True):
        assert_close(value, reference)
    return results


def _is_right(
    case: KernelCase,
    seed: int,
    *,
    timeout_s: float,
    mutate: Callable[[], object] = lambda: None,
) -> bool:
    run = _passes if case == BACKWARD else _outputs
    results = run(case, seed=seed, timeout_s=timeout_s, mutate=mutate)
    return all(map(torch.equal, results, _right_results(case)))


def _find_seed(
    mutate: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    case: KernelCase,
    timeout_s: float,
    first_seed: int = 0,
) -> int | None:
    """Return the first seed with wrong results, or with a failed wait."""
    _right_results(case)  # before the mutation
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        with monkeypatch.context() as patch:
            try:
                right = _is_right(
                    case, seed, timeout_s=timeout_s, mutate=lambda patch=patch: mutate(patch)
                )
            except (IndexError, RuntimeError):  # a bad address, or a wait that times out
                right = False
        if not right:
            return seed
    return None


@pytest.mark.parametrize(("case", "seed"), [(FORWARD, 9), (BLOCKS, 3), (AHEAD, 59), (BACKWARD, 8)])
def test_unmutated_kernels_are_right_with_the_short_limit(case: KernelCase, seed: int) -> None:
    """So a mutation that fails with this limit is a mistake.

    With seed 8 one CTA of a launch runs at a time: no CTA waits for a CTA that has not begun.
    """
    assert _is_right(case, seed, timeout_s=SHORT_S)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    seed = _find_seed(
        lambda patch: apply(mutation, patch),
        monkeypatch,
        case=mutation.case,
        timeout_s=mutation.timeout_s,
        first_seed=mutation.first_seed,
    )
    assert seed is not None, f"{name} shows with none of {MAX_SEEDS} seeds"


def test_one_half_of_the_send_buffer_for_all_passes_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        for kernel, half in (
            (send_buffer.publish_rows_kernel, "(epoch % 2)"),
            (fetch.fetch_kernel, "(tl.load(plan + LAYOUT.summary + PASS) % 2)"),
        ):
            same_half = half.replace("% 2", "* 0")
            apply(Mutation(kernel, ((half, same_half),), case=BACKWARD), patch)
        patch.setattr(KernelRank, "clear_buffers", lambda rank: None)

    seed = _find_seed(mutate, monkeypatch, case=BACKWARD, timeout_s=LIMIT_S, first_seed=0)
    assert seed is not None
