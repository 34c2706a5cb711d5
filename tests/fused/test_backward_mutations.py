"""Mistakes in the backward protocol: each must give wrong gradients in one of a few schedules.

Forward runs without the mistake. Then, with the mistake, the plan of call 0 is dispatched three
times, and the backward passes of call 1 and call 0 run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain

import pytest
import torch

from halley.fused.kernels import (
    combine,
    dispatch,
    fetch,
    partial_sums,
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
    make_dy,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank, SavedCall
from tests.fused.kernel_world import run_world
from tests.fused.mutation import Mutation, apply


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="mutates interpreted kernels")

NUM_SEEDS = 3
MAX_SEEDS = 48  # tried for each mutation; a rank that is far ahead occurs with one seed of eight
NOT_WRITTEN = 1e6  # replaces NaN, which is not equal to itself
SHORT_S = 0.3  # time limit of waits for mutations whose flag or row never arrives
# Two CTAs copy the rows of rank 1. All its tokens go to rank 0, so that rank 1 has few rows to
# multiply and runs ahead to the next pass.
CASE = KernelCase(
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

_COPY_ROWS = """\
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        copy_rows(first, x_TD, send_buffer_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
"""
_TELL_CALL = """\
    if tl.program_id(0) == 0:
        for peer in range(LAYOUT.num_ranks):
            theirs = peer_ptr(routing_ptrs_W, peer, routing)
            tl.store(call_in_use(theirs, rank, epoch, LAYOUT), call)
"""
_SIGNAL_ALL = "        signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)\n"
_SPREAD = "    if SPREAD_WEIGHTS:\n"
_WAIT = "    if is_last:\n        _wait_for_all("
_COUNT_ZEROED = """\
        arrived = plan + LAYOUT.tile_arrived + begin // LAYOUT.block_m
        tl.atomic_add(arrived, end - begin, sem="release", scope="gpu")
"""
_ZERO_LOOP = "    for first in range(begin, end, ROWS):\n"
_SEND_WEIGHT_GRADIENTS = """\
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        nth, dweight_RC, plan, dweight_ptrs_W, combine_tokens, rank,
                        LAYOUT, NUM_SUMMANDS, ROWS,
                    )  # fmt: skip
"""
_COUNT_SENT = """\
            count_sent(chunk, chunk_tasks, plan, routing, routing_ptrs_W, rank, epoch, LAYOUT)
"""

MUTATIONS = {
    "publish: flags before rows": Mutation(
        send_buffer.publish_rows_kernel,
        ((_COPY_ROWS, ""), (_SPREAD, f"{_COPY_ROWS}{_SPREAD}")),
        first_seed=21,
    ),
    "publish: the first CTA sets the flags": Mutation(
        send_buffer.publish_rows_kernel,
        (("    is_last =", f"    if before == 0:\n{_SIGNAL_ALL}    is_last ="),),
        first_seed=8,
    ),
    "publish: flags before the call": Mutation(
        send_buffer.publish_rows_kernel,
        ((_TELL_CALL, ""), (_SPREAD, f"{_TELL_CALL}{_SPREAD}")),
        first_seed=11,
    ),
    "publish: one half for the call of all passes": Mutation(
        routing_exchange.call_in_use, (("(epoch % 2) * LAYOUT.num_ranks", "0"),)
    ),
    "publish: counter is not zeroed": Mutation(
        send_buffer.publish_rows_kernel,
        (("        tl.store(counters + PUBLISHED, 0)\n", ""),),
        timeout_s=SHORT_S,
    ),
    "publish: the first CTA waits": Mutation(
        send_buffer.publish_rows_kernel,
        ((_WAIT, _WAIT.replace("is_last", "tl.program_id(0) == 0")),),
        timeout_s=SHORT_S,
    ),
    "publish: does not wait": Mutation(
        send_buffer._wait_for_all, (("wait(flag, epoch,", "wait(flag, 0,"),)
    ),
    "publish: stale epoch": Mutation(
        send_buffer._wait_for_all, (("wait(flag, epoch,", "wait(flag, epoch - 1,"),)
    ),
    "publish: waits for rank 0 only": Mutation(
        send_buffer._wait_for_all, (("published + peer", "published + 0 * peer"),)
    ),
    "zero rows: counted before they are stored": Mutation(
        fetch._zero_task,
        (
            (_COUNT_ZEROED, ""),
            (_ZERO_LOOP, f"    if end > begin:\n{_COUNT_ZEROED}{_ZERO_LOOP}"),
        ),
        first_seed=1,
    ),
    "zero rows: not counted": Mutation(fetch._zero_task, ((_COUNT_ZEROED, ""),), timeout_s=SHORT_S),
    "dispatch: tiles do not wait for zero rows": Mutation(
        dispatch.arrived_gemm_kernel,
        (("need += num_zero_rows(num_rows, ZERO_MULTIPLE)", "need += 0"),),
        first_seed=1,
    ),
    "dispatch: fetch tickets are not zeroed": Mutation(
        fetch.count_exit,
        (("        tl.store(tickets + FETCH_TICKET, 0)\n", ""),),
        timeout_s=SHORT_S,
    ),
    "combine: gradients of weights after the flags": Mutation(
        combine.combine_kernel,
        ((_SEND_WEIGHT_GRADIENTS, ""), (_COUNT_SENT, _COUNT_SENT + _SEND_WEIGHT_GRADIENTS)),
        first_seed=33,
    ),
    "combine: gradients of weights with the last chunk": Mutation(
        combine.combine_kernel,
        (("if chunk == 0:\n", "if chunk == num_chunks - 1:\n"),),
        first_seed=5,
    ),
    "sum: does not wait": Mutation(
        partial_sums.wait_for_sums, (("wait(flag, epoch,", "wait(flag, 0,"),)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Results of one rank's passes.

    Attributes:
        rows_RD: fetched rows, one tensor for each dispatch.
        gradients: one for each call.
    """

    rows_RD: list[torch.Tensor]
    gradients: list[Gradients]


def _forward(rank: KernelRank, *, call: int) -> SavedCall:
    """Run the part of a call that its backward needs."""
    x_TD, routing = make_tokens(rank.case, rank.rank, call=call)
    rows = rank.make_rows(rank.make_plan(x_TD, routing))
    rank.dispatch_gemm(rows)
    rank.check()
    return SavedCall(plan=rank.plan, rows=rows, routing=routing)


def _run(
    case: KernelCase,
    seed: int,
    *,
    timeout_s: float = 30.0,
    fused: bool = True,
    mutate: Callable[[], object] = lambda: None,
) -> list[Passes]:
    """Return the results of all ranks; even seeds run one CTA of a launch at a time."""

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
            rank.publish_rows(make_tokens(case, rank.rank)[0] * scale, None)
            rank.dispatch_gemm(first.rows, fused=fused)
            rows_RD.append(first.rows.x_RD.nan_to_num(NOT_WRITTEN))
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
    """Return the results of the unfused kernels, after a comparison with the reference."""
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
    """Return the first seed with wrong gradients, or with a failed wait."""
    _right_passes(case)  # before the mutation
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


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_unmutated_kernels_are_right_with_every_seed(seed: int) -> None:
    """The short time limit fails no right kernel, so a mutation that fails with it is a mistake."""
    assert _is_right(CASE, seed, timeout_s=SHORT_S)


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
    assert seed is not None, f"{name} shows with none of {MAX_SEEDS} seeds"


def test_one_half_of_the_send_buffer_for_all_passes_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        for kernel, half in (
            (send_buffer.publish_rows_kernel, "(epoch % 2)"),
            (fetch.fetch_kernel, "(tl.load(plan + LAYOUT.summary + PASS) % 2)"),
        ):
            none = half.replace("% 2", "* 0")
            apply(Mutation(kernel, ((half, none),)), patch)
        patch.setattr(KernelRank, "clear_buffers", lambda rank: None)

    assert _seed_that_shows(mutate, monkeypatch, case=CASE, timeout_s=30.0) is not None
