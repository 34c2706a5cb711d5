"""Faults in the protocol: each gives a wrong result, or a failed wait, in a seeded schedule.

These tests measure the other tests. Schedules that find every fault are good evidence that kernels
without a failure in the same schedules are right. There is a fault for each wait, for each flag or
counter on which kernels wait, and for each half of a buffer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
import torch

from halley.fused.kernels.layout import (
    COMBINE_EXITS,
    COMBINE_TICKET,
    COUNTED,
    NUM_COPIES,
    PLANNED,
    PUBLISHED,
    ROWS_COPIED,
)
from halley.interpreter import INTERPRETED
from tests.fused.faults import Fault, counter, flags, inject, plan, ticket
from tests.fused.kernel_case import SMALL_CONFIG, KernelCase, make_dy, make_tokens
from tests.fused.kernel_rank import KernelRank, run_world


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="injects faults into interpreted kernels")

MAX_SEEDS = 48  # tried for each fault; a rank that is far ahead occurs with one seed of eight
SHORT_S = 0.3  # time limit of waits for faults whose flag or row never arrives
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


_published = flags("published", lambda layout: layout.num_ranks)
_rows_ready = flags("rows_ready", lambda layout: layout.num_ranks)
_sums_ready = flags("sums_ready", lambda layout: layout.num_ranks * layout.max_chunks)
_call_in_use = flags("call_in_use", lambda layout: 2 * layout.num_ranks)
_records = flags("records", lambda layout: 2 * layout.num_ranks * layout.record_words)
_tile_arrived = plan("tile_arrived", lambda layout: layout.max_tiles)
_chunk_done = plan("chunk_done", lambda layout: layout.max_chunks * layout.num_groups)
_chunk_sent = plan("chunk_sent", lambda layout: layout.max_chunks)


def _earlier(rank: KernelRank, found: Any) -> Any:
    """A poll for epoch n ends at n - 1, and one for a count of tiles or rows when one is left."""
    return found + 1


def _at_once(rank: KernelRank, found: Any) -> Any:
    """A poll ends at once."""
    return found + 1000


def _last_task(rank: KernelRank, found: Any) -> int:
    """Every task of publishing or copying is the last one."""
    num_tokens = rank.num_tokens
    return max(1, -(-num_tokens // min(16, rank.layout.block_tokens))) - 1


def _last_column(rank: KernelRank, found: Any) -> int:
    """Every task that counts a column is the last one, and all others have counted."""
    return (rank.layout.num_columns - 1) * 65537


def _last_cta(rank: KernelRank, found: Any) -> int:
    return rank.case.config.num_programs - 1


def _last_of_chunk(rank: KernelRank, found: Any) -> int:
    """Every combine task is the last one of its chunk."""
    num_copies = rank.plan[rank.layout.summary + NUM_COPIES.value]
    return int(num_copies) // rank.layout.task_rows - 1


def _last_exit(rank: KernelRank, found: Any) -> Any:
    """The last CTA of the first launch of a pair is the last one of both."""
    config = rank.case.config
    num_first = config.num_programs * config.down.per_sm
    num_second = config.num_programs * (config.combiners_beside + config.combiners_after)
    return num_first + num_second - 1 if found == num_first - 1 else found


FAULTS = {
    "published: set by the first task": Fault(
        at=counter(PUBLISHED), answer=_last_task, case=BLOCKS, timeout_s=SHORT_S
    ),
    "published: set to the next epoch": Fault(
        at=_published, within="signal", write=lambda n: n + 1, case=FORWARD, timeout_s=SHORT_S
    ),
    "published: count waits for the last epoch": Fault(
        at=_published, within="count_task", answer=_earlier, case=FORWARD
    ),
    "records: one half for all passes": Fault(
        at=_records, as_first_half=True, case=AHEAD, first_seed=31
    ),
    "rows_ready: set by the first task": Fault(
        at=counter(ROWS_COPIED), answer=_last_task, case=BLOCKS, timeout_s=SHORT_S, first_seed=15
    ),
    "rows_ready: the plan waits for the last epoch": Fault(
        at=_rows_ready, within="_wait_for_rows", answer=_earlier, case=FORWARD, first_seed=3
    ),
    "COUNTED: the first column lays out the rest": Fault(
        at=counter(COUNTED), answer=_last_column, case=FORWARD
    ),
    "PLANNED: place waits for the last epoch": Fault(
        at=counter(PLANNED), within="wait", answer=_earlier, case=FORWARD
    ),
    "tile_arrived: rows counted before they are stored": Fault(
        at=lambda rank: rank.rows.x_RD,
        within="_fetch_task",
        until=_tile_arrived,
        case=FORWARD,
        first_seed=3,
    ),
    "tile_arrived: the GEMM does not wait": Fault(
        at=_tile_arrived, within="wait", answer=_at_once, case=FORWARD, first_seed=1
    ),
    "chunk_done: tiles counted before they are stored": Fault(
        at=lambda rank: rank.rows.z_RD, until=_chunk_done, case=FORWARD
    ),
    "chunk_done: the combine does not wait": Fault(
        at=_chunk_done, within="poll", answer=_at_once, case=FORWARD, first_seed=3
    ),
    "exits: the last CTA of one launch zeroes the counters": Fault(
        at=ticket(COMBINE_EXITS), answer=_last_exit, case=FORWARD, timeout_s=SHORT_S
    ),
    "sums_ready: set by the first task of a chunk": Fault(
        at=_chunk_sent, answer=_last_of_chunk, case=FORWARD, first_seed=1
    ),
    "sums_ready: set before the sums are stored": Fault(
        at=lambda rank: rank.combine_buffer.local, until=ticket(COMBINE_TICKET), case=FORWARD
    ),
    "sums_ready: polled for the last epoch": Fault(
        at=_sums_ready, within="sums_are_ready", answer=_earlier, case=FORWARD, first_seed=3
    ),
    "sums_ready: awaited for the last epoch": Fault(
        at=_sums_ready, within="wait_for_sums", answer=_earlier, case=FORWARD
    ),
    "backward: published set by the first CTA": Fault(
        at=counter(PUBLISHED), answer=_last_cta, case=BACKWARD
    ),
    "backward: published set before the call": Fault(
        at=_call_in_use, until=counter(PUBLISHED), case=BACKWARD, first_seed=11
    ),
    "backward: published awaited for the last epoch": Fault(
        at=_published, within="_wait_and_compare_calls", answer=_earlier, case=BACKWARD
    ),
    "call_in_use: one half for all passes": Fault(
        at=_call_in_use, as_first_half=True, case=BACKWARD
    ),
    "send buffer: one half for all passes": Fault(
        at=lambda rank: rank.send_buffer.local, as_first_half=True, case=BACKWARD
    ),
    "zero rows: counted before they are stored": Fault(
        at=lambda rank: rank.rows.x_RD,
        within="_zero_task",
        until=_tile_arrived,
        case=BACKWARD,
        first_seed=1,
    ),
    "weight gradients: sent after the flags": Fault(
        at=lambda rank: rank.dweight_buffer.local,
        until=ticket(COMBINE_TICKET),
        case=BACKWARD,
        first_seed=3,
    ),
}


def _outputs(rank: KernelRank, *, fused: bool, begin: Callable[[KernelRank], None]) -> list[Any]:
    """Run all calls forward; return the outputs."""
    begin(rank)
    rank.heap.barrier()
    return [rank.forward(call=call, fused=fused)[0] for call in range(len(rank.case.num_tokens_CW))]


def _passes(rank: KernelRank, *, fused: bool, begin: Callable[[KernelRank], None]) -> list[Any]:
    """Run two calls forward, then ``begin``, then passes that reuse their plans.

    The plan of call 0 is dispatched three times; then the backward passes of both calls run.
    Returns the gradients of call 0 and of call 1, then the dispatched rows.
    """
    case = rank.case
    first, second = (rank.dispatch(call=call) for call in range(2))
    rank.check()
    rank.heap.barrier()
    begin(rank)
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


def _run(
    case: KernelCase,
    *,
    seed: int = 0,
    timeout_s: float = 30.0,
    fused: bool = True,
    begin: Callable[[KernelRank], None] = lambda rank: None,
) -> list[torch.Tensor]:
    """Return the results of all ranks. Some seeds run fewer CTAs of a launch at once than others.

    ``begin`` is called on each rank before the passes in which a fault may occur.
    """
    if case == BACKWARD:
        run, resident, starve = _passes, 4 if seed % 2 else 1, 0.1
    else:
        run, resident, starve = _outputs, 2 if seed % 2 else 4, 0.05 * (seed % 2)
    call = partial(run, fused=fused, begin=begin)
    schedule: Any = {"seed": seed, "resident": resident, "starve": starve, "timeout_s": timeout_s}
    return list(chain.from_iterable(run_world(case, call, **schedule)))


@cache
def _right_results(case: KernelCase) -> list[torch.Tensor]:
    """Return the results of the unfused kernels; test_backward.py compares them with autograd."""
    return _run(case, fused=False)


def _is_right(fault: Fault, seed: int, patch: pytest.MonkeyPatch) -> bool:
    """Return whether the results are right although the interpreter makes the mistake."""
    ranks: list[KernelRank] = []

    def begin(rank: KernelRank) -> None:
        if not ranks:
            inject(fault, ranks, patch)
        ranks.append(rank)

    try:
        results = _run(fault.case, seed=seed, timeout_s=fault.timeout_s, begin=begin)
    except (IndexError, RuntimeError):  # a bad address, or a wait that times out
        return False
    return all(map(torch.equal, results, _right_results(fault.case)))


@pytest.mark.parametrize(("case", "seed"), [(FORWARD, 9), (BLOCKS, 3), (AHEAD, 59), (BACKWARD, 8)])
def test_results_without_a_fault_are_right_with_the_short_limit(
    case: KernelCase, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a fault that fails with this limit is a mistake.

    With seed 8 one CTA of a launch runs at a time: no CTA waits for a CTA that has not begun.
    """
    fault = Fault(at=_published, answer=lambda _, found: found, case=case, timeout_s=SHORT_S)
    assert _is_right(fault, seed, monkeypatch)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    _right_results(fault.case)  # before the fault
    if name.startswith("send buffer"):
        monkeypatch.setattr(KernelRank, "clear_buffers", lambda rank: None)
    for seed in range(fault.first_seed, fault.first_seed + MAX_SEEDS):
        with monkeypatch.context() as patch:
            if not _is_right(fault, seed, patch):
                return
    pytest.fail(f"{name} shows with none of {MAX_SEEDS} seeds")


# All tokens go to expert 0, so rank 0 has 40 rows of it, in 3 tiles, and some of expert 1.
OVERFLOW = KernelCase(num_tokens_CW=((20, 20),), num_experts=4, load="one-hot")
MAX_ROWS = 32

_overflow_rows = flags("overflow_rows", lambda layout: layout.num_ranks)


OVERFLOW_FAULTS = {
    "no flags": Fault(
        at=_sums_ready, within="_signal_overflow", write=lambda epoch: None, case=OVERFLOW
    ),
    "number of rows after rows_ready": Fault(at=_overflow_rows, until=_rows_ready, case=OVERFLOW),
}


def _all_report(seed: int, ranks: list[KernelRank]) -> bool:
    def run(rank: KernelRank) -> str:
        ranks.append(rank)
        rank.heap.barrier()
        num_rows = rank.make_plan(*make_tokens(OVERFLOW, rank.rank), max_rows=MAX_ROWS)
        rows = rank.make_rows(num_rows)
        rank.dispatch_gemm(rows)
        rank.gemm_combine(rows)
        try:
            rank.check()
        except RuntimeError as error:
            return str(error)
        return ""

    errors = run_world(OVERFLOW, run, seed=seed, timeout_s=SHORT_S)
    return all(
        text.startswith(f"rank {rank}: the experts of rank 0 got ")
        for rank, text in enumerate(errors)
    )


def test_all_ranks_report_an_overflow() -> None:
    assert _all_report(1, [])


@pytest.mark.parametrize("name", OVERFLOW_FAULTS)
def test_fault_of_an_overflow_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(MAX_SEEDS):
        ranks: list[KernelRank] = []
        with monkeypatch.context() as patch:
            inject(OVERFLOW_FAULTS[name], ranks, patch)
            if not _all_report(seed, ranks):
                return
    pytest.fail(f"{name} shows with none of {MAX_SEEDS} seeds")
