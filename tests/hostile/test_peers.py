"""If a rank differs, skips a pass, stops or dies, the others end with an error that names it."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.distributed.peers import compare_ranks, rank_and_size
from halley.distributed.watchdog import EXIT_LOST_PEER
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.registry import build_strategy
from tests.hostile.peer_rank import BAD_RANK, BAD_STEP, TIMES, Ends, Fault, run_jobs
from tests.rank_pool import RunRanks


CPU = torch.device("cpu")
COLLECTIVE = ("sequential", "chunked", "all_gather", "functional", "auto")
# A property that differs on rank 1 of 3, strategies that compare it, and the error.
DIFFERENCES = (
    ("hidden_size", 32, (*COLLECTIVE, "fused"), "hidden_size (16 on ranks 0 and 2, 32 on rank 1)"),
    ("num_local", 4, (*COLLECTIVE, "fused"), "num_experts (6 on ranks 0 and 2, 12 on rank 1)"),
    (
        *("dtype", torch.bfloat16, (*COLLECTIVE[:-1], "fused")),
        "dtype (torch.float32 on ranks 0 and 2, torch.bfloat16 on rank 1)",
    ),
    ("dtype", torch.bfloat16, ("auto",), "element_bytes (4 on ranks 0 and 2, 2 on rank 1)"),
    ("top_k", 1, (*COLLECTIVE[1:3], "auto", "fused"), "top_k (2 on ranks 0 and 2, 1 on rank 1)"),
    ("tp_size", 3, (*COLLECTIVE, "fused"), "tp_size (1 on ranks 0 and 2, 3 on rank 1)"),
    (
        *("strategy", "functional", ("sequential",)),
        "strategy (sequential on ranks 0 and 2, functional on rank 1) must be the same on all "
        "ranks that run an MoE layer together",
    ),
)


def _layer(
    strategy: str,
    *,
    hidden_size: int = 16,
    num_local: int = 2,
    top_k: int = 2,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Run one layer of that strategy in the default group."""
    recorder = Recorder(CPU, enabled=False)
    built = build_strategy(
        strategy, dist.group.WORLD, recorder=recorder, device=CPU, tp_size=tp_size
    )
    experts = Experts(
        up_LGD=torch.ones(num_local, 32, hidden_size, dtype=dtype),
        down_LDF=torch.ones(num_local, hidden_size, 16, dtype=dtype),
    )
    idx_TK = torch.arange(top_k).expand(3, top_k).contiguous()
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=torch.ones(3, top_k))
    return built.forward(torch.ones(3, hidden_size, dtype=dtype), routing, experts)


def _run_different_layers(rank: int, num_ranks: int) -> list[str]:
    """Return the error of this rank for each difference and strategy."""
    errors: list[str] = []
    for name, value, strategies, _ in DIFFERENCES:
        for strategy in strategies:
            given: dict[str, Any] = {"strategy": strategy}
            if rank == BAD_RANK:
                given[name] = value
            with pytest.raises(ValueError, match="must be the same") as caught:
                _layer(**given)
            errors.append(str(caught.value))
    return errors


def test_ranks_that_differ_get_one_error_before_any_collective(run_ranks: RunRanks) -> None:
    first, *others = run_ranks(_run_different_layers, 3)
    assert others == [first] * 2
    wanted = [error for _, _, strategies, error in DIFFERENCES for _ in strategies]
    for error, want in zip(first, wanted, strict=True):
        assert want in error


def _miss_one_comparison(rank: int, num_ranks: int) -> str:
    group = dist.new_group()  # a group that no other test uses
    if rank == BAD_RANK:
        return ""
    assert isinstance(group, dist.ProcessGroup)
    store = group.get_group_store()
    before = store.timeout  # pyright: ignore[reportAttributeAccessIssue]
    store.set_timeout(0.3 * before / before.total_seconds())
    try:
        with pytest.raises(RuntimeError, match="did not come") as caught:
            compare_ranks("an MoE layer", {"hidden_size": 16}, group=group)
    finally:
        store.set_timeout(before)
    return str(caught.value)


def test_rank_that_meets_no_new_layer_is_named_on_the_others(run_ranks: RunRanks) -> None:
    errors_W = run_ranks(_miss_one_comparison, 3)
    for rank in (0, 2):
        assert errors_W[rank] == (
            f"rank {rank}: rank 1 did not come to the first call of an MoE layer within 0.3 s: all "
            "ranks of a group must run the same layers, in the same order"
        )


def _run_passes_in_another_order(rank: int, num_ranks: int) -> str:
    """Run two layers forward; then rank 1 runs a third forward, and the others a backward."""
    strategy = AllToAllStrategy(dist.group.WORLD, recorder=Recorder(CPU))
    x_TD = torch.ones(3, 16, requires_grad=True)
    experts = Experts(up_LGD=torch.ones(2, 32, 16), down_LDF=torch.ones(2, 16, 16))
    idx_TK = torch.zeros(3, 1, dtype=torch.int64)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=torch.ones(3, 1))
    total = sum(strategy.forward(x_TD, routing, experts).sum() for _ in range(2))
    assert isinstance(total, torch.Tensor)
    third = partial(strategy.forward, x_TD, routing, experts)
    run = third if rank == BAD_RANK else total.backward
    with pytest.raises(RuntimeError, match="different passes") as caught:
        run()
    return str(caught.value)


def test_ranks_in_different_passes_get_an_error_and_no_wrong_numbers(run_ranks: RunRanks) -> None:
    errors_W = run_ranks(_run_passes_in_another_order, 3)
    assert errors_W == [
        f"rank {rank}: the ranks run different passes of strategy sequential: ranks 0 and 2 in the "
        "backward pass of call 2, rank 1 in the forward pass of call 3; all ranks must run their "
        "layers, forward and backward, in the same order"
        for rank in range(3)
    ]


def _use_a_group_of_others(rank: int, num_ranks: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(ValueError, match="no member") as caught:
        AllToAllStrategy(group, recorder=Recorder(CPU))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no member"):
        rank_and_size(group)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def test_group_without_this_rank_is_refused(run_ranks: RunRanks) -> None:
    error = run_ranks(_use_a_group_of_others, 2)[1]
    assert re.fullmatch(
        r"group \(.*\) must be one that this process belongs to: rank 1 of the default group is no "
        "member",
        error,
    )


def _pass_name(fault: Fault) -> str:
    if fault.strategy == "fused":
        return "a pass of a fused layer"
    direction = "backward" if fault.kind == "skip backward" else "forward"
    return f"the start of the {direction} pass of call {BAD_STEP} of strategy {fault.strategy}"


def _check_text(fault: Fault, ends: Ends, pattern: str) -> None:
    """Compare the error of each rank, in which ``{rank}`` is its rank."""
    for rank, (code, lines) in ends.items():
        assert code in (1, EXIT_LOST_PEER)
        text = re.sub(r"^\w+: (failed on rank \d: )?|, operation \d+", "", "".join(lines))
        assert text == pattern.replace("{rank}", str(rank)), fault


def _check_stuck(fault: Fault, ends: Ends) -> None:
    pattern = (
        "rank {rank} cannot go on, since no rank has begun another operation for "
        f"{TIMES['deadlock_s']:g} s: rank 0 waits in {_pass_name(fault)} (step {BAD_STEP}), "
        f"rank 1 waits in all_reduce of torch.distributed (step {BAD_STEP})"
    )
    _check_text(fault, ends, pattern)


def _check_lost(fault: Fault, ends: Ends) -> None:
    pattern = f"rank {{rank}} lost rank 1 (no heartbeat for 2 s) in step {BAD_STEP}"
    _check_text(fault, ends, pattern)


SKIPS = ("skip forward", "skip backward")


@pytest.mark.parametrize(
    "cases",
    [
        [(kind, name) for kind in SKIPS for name in ("sequential", "chunked")],
        [("skip backward", "fused")],
    ],
)
def test_watchdog_names_the_operations_of_ranks_that_wait_for_each_other(
    tmp_path: Path, cases: list[tuple[str, str]]
) -> None:
    faults = [Fault(kind=kind, strategy=name, watched=True, num_ranks=2) for kind, name in cases]
    for fault, ends in zip(faults, run_jobs(faults, tmp_path), strict=True):
        assert len(ends) == 2
        _check_stuck(fault, ends)


def test_watchdog_names_a_lost_or_stopped_rank(tmp_path: Path) -> None:
    faults = [
        Fault(kind="kill", strategy="sequential", watched=True),
        Fault(kind="stop", strategy="chunked", watched=True),
        Fault(kind="kill", strategy="deduplicated", watched=True),  # each rank is a node
    ]
    for fault, ends in zip(faults, run_jobs(faults, tmp_path), strict=True):
        assert set(ends) == {0, 2}
        _check_lost(fault, ends)


def test_lost_rank_of_a_fused_layer_is_named_and_a_new_run_works(tmp_path: Path) -> None:
    fault = Fault(kind="kill", strategy="fused", watched=True, num_ranks=2)
    (ends,) = run_jobs([fault], tmp_path / "first")
    assert set(ends) == {0}
    _check_lost(fault, ends)
    again = dataclasses.replace(fault, kind="none", watched=False)
    assert run_jobs([again], tmp_path / "again") == [dict.fromkeys(range(2), (0, []))]


def test_without_a_watchdog_the_collective_names_the_rank(tmp_path: Path) -> None:
    kinds = {"kill": "sequential", "stop": "chunked", "skip backward": "sequential"}
    faults = [
        Fault(kind=kind, strategy=strategy, watched=False, timeout_s=2.0)
        for kind, strategy in kinds.items()
    ]
    for fault, ends in zip(faults, run_jobs(faults, tmp_path), strict=True):
        for rank in (0, 2):
            code, lines = ends[rank]
            text = re.sub(r"operation \d+", "operation N", "".join(lines))
            assert code == 1
            assert text.startswith(
                f"RuntimeError: rank {rank} failed in {_pass_name(fault)} (operation N of this "
                "process): rank 1 did not report within 3 s: lost, stopped, or in another "
                "operation; "
            )
