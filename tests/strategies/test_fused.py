"""The fused strategy against the reference, with buffers that several layers share."""

import dataclasses
import gc
import re

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts
from halley.fused.buffer_cache import Workspaces
from halley.fused.buffers import Workspace, token_capacity
from halley.interpreter import sanitizer
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    SIZES,
    LayerCase,
    expected,
    local_experts_of,
    make_tokens,
)


CPU = torch.device("cpu")
FORMS = [pytest.param(True, id="fused"), pytest.param(False, id="unfused")]


def _build(workspaces: Workspaces, *, fused: bool = True) -> FusedStrategy:
    return FusedStrategy(workspaces, recorder=Recorder(CPU, enabled=False), fused=fused)


def _group(num_ranks: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if num_ranks > 1 else None


def _output(strategy: FusedStrategy, case: LayerCase, rank: int) -> torch.Tensor:
    x_TD, routing, _ = make_tokens(case, rank)
    with torch.no_grad():
        return strategy.forward(x_TD, routing, local_experts_of(case, rank))


def _check_case(strategy: FusedStrategy, case: LayerCase, rank: int) -> None:
    error = relative_error(_output(strategy, case, rank), expected(case, rank)["y"])
    assert error <= RELATIVE_TOLERANCE[case.dtype], f"y is off by {error:.2e} for {case}"


def _check(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    workspaces = Workspaces(_group(num_ranks), CPU)
    strategy = _build(workspaces)
    for case in cases:
        _check_case(strategy, case, rank)
    workspaces.close()


def test_values_by_top_k(run_ranks: RunRanks) -> None:
    """Each top-k is a shape class of its own, all in the same heap."""
    cases = [
        LayerCase(num_tokens_W=(7, 12), num_experts=16, top_k=top_k, dtype=dtype)
        for top_k, dtype in [
            (1, torch.float32),
            (2, torch.bfloat16),
            (4, torch.float32),
            (8, torch.float16),
        ]
    ]
    run_ranks(_check, 2, cases)


def test_values_by_tokens_and_experts(run_ranks: RunRanks) -> None:
    cases = [LayerCase(num_tokens_W=tokens, seed=2) for tokens in [(0, 9), (9, 0), (0, 0), (1, 0)]]
    for activation in ("swiglu", "gelu"):
        for dropped in (0.0, 0.4, 1.0):
            case = LayerCase(num_tokens_W=(9, 6), activation=activation, dropped=dropped)
            cases.append(case)
    run_ranks(_check, 2, cases)


def _run_in_subgroups(rank: int, num_ranks: int, case: LayerCase) -> None:
    """Ranks 0 and 2, and 1 and 3, form a group each, with different tokens."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    mine = dataclasses.replace(case, seed=case.seed + rank % 2)
    workspaces = Workspaces(group, CPU)
    _check_case(_build(workspaces), mine, rank // 2)
    workspaces.close()
    dist.destroy_process_group(group)


def test_any_subgroup(run_ranks: RunRanks) -> None:
    run_ranks(_run_in_subgroups, 4, LayerCase(num_tokens_W=(8, 5)))


def _grow(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategy = _build(workspaces)
    # Fewer, more on both, many more on one rank alone, and few again.
    for seed, tokens in enumerate([(9, 7), (3, 0), (12, 14), (0, 90), (130, 1), (2, 2)]):
        _check_case(strategy, LayerCase(num_tokens_W=tokens, seed=seed), rank)
    (workspace,) = workspaces.all()
    # 14 asked for 64, 90 for 128, 130 for 192.
    assert workspace.context().send_buffer.local.shape == (
        2,
        token_capacity(130),
        SIZES["hidden_size"],
    )
    assert token_capacity(130) == 192
    assert workspace.layout.max_tokens == 256  # for which kernels are compiled
    heap_bytes = workspace.heap.num_bytes
    assert heap_bytes == workspace.symmetric_bytes  # what was outgrown was given back
    workspaces.close()


def test_tokens_beyond_max_tokens_on_one_rank(run_ranks: RunRanks) -> None:
    run_ranks(_grow, 2)


def test_first_buffers_hold_max_tokens() -> None:
    workspaces = Workspaces(None, CPU, max_tokens=100)
    _check_case(_build(workspaces), LayerCase(num_tokens_W=(8,)), 0)
    assert [w.context().send_buffer.local.shape[1] for w in workspaces.all()] == [100]


def test_rows_beyond_capacity() -> None:
    """A plan with more rows than the scratch holds runs again; the scratch stays grown."""
    workspaces = Workspaces(None, CPU)
    strategy = _build(workspaces)
    case = LayerCase(num_tokens_W=(40,), top_k=4)
    _check_case(strategy, case, 0)
    (workspace,) = workspaces.all()
    workspace.rows_RD = workspace.rows_RD[:16]
    _check_case(strategy, dataclasses.replace(case, seed=1), 0)
    assert workspace.row_capacity >= 160


def _run_layers(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategies = [_build(workspaces, fused=fused) for fused in (True, False, True)]
    wide = LayerCase(num_tokens_W=(8, 21), top_k=4)
    narrow = LayerCase(num_tokens_W=(30, 2), num_experts=4, top_k=1, dtype=torch.bfloat16)
    for seed in range(2):
        for strategy in strategies:
            for case in (wide, narrow):
                _check_case(strategy, dataclasses.replace(case, seed=seed), rank)
    shapes = [workspace.shape for workspace in workspaces.all()]
    assert [(s.num_experts, s.top_k) for s in shapes] == [(8, 4), (4, 1)]
    first, _ = workspaces.all()
    assert first.epoch == 6
    workspaces.close()


def test_layers_of_two_shapes_share_workspaces(run_ranks: RunRanks) -> None:
    run_ranks(_run_layers, 2)


def test_size_of_a_plan_is_predicted_from_the_same_layer() -> None:
    """Alternating layers with different loads: each one gets memory for its own load."""
    workspaces = Workspaces(None, CPU)
    strategy = _build(workspaces)
    cases = [LayerCase(num_tokens_W=(40,), dropped=dropped) for dropped in (0.0, 0.9)]
    layers = [local_experts_of(case, 0) for case in cases]
    for _ in range(2):
        for case, experts in zip(cases, layers, strict=True):
            x_TD, routing, _ = make_tokens(case, 0)
            strategy.forward(x_TD, routing, experts)
    (workspace,) = workspaces.all()
    many, few = (workspace.predict_size(experts.up_LGD).num_rows for experts in layers)
    assert few < many
    assert (
        workspace.predict_size(torch.zeros(1)).num_rows == few
    )  # a layer that never ran: the last plan of any layer


def _run_out_of_memory(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU, timeout_s=60)
    strategy = _build(workspaces)
    case = LayerCase(num_tokens_W=(8, 5))

    def fail(self: Workspace, num_rows: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("pretended")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Workspace, "_make_rows", fail)
        with pytest.raises(MemoryError, match=r"rank 1 of 2 has no \d+ bytes .*pretended"):
            _output(strategy, case, rank)
    assert workspaces.all() == []
    _check_case(strategy, case, rank)  # once there is room
    workspaces.close()


def test_out_of_memory_on_one_rank_is_an_error_on_all(run_ranks: RunRanks) -> None:
    run_ranks(_run_out_of_memory, 2)


def _leave_alone(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategy = _build(workspaces)
    case = LayerCase(num_tokens_W=(8, 5))
    _check_case(strategy, case, rank)  # without a short timeout, because the machine may be busy
    for workspace in workspaces.all():
        workspace.timeout_s = 0.5
    if rank == 1:
        return
    text = r"rank 0: rank 1 did not publish its routing \(plan\) within 0.5 s"
    for _ in range(2):  # it stays broken
        with pytest.raises(RuntimeError, match=text):
            _output(strategy, case, rank)
    with pytest.raises(RuntimeError, match=text):
        workspaces.check()
    raise ValueError("seen")


def test_missing_rank_is_named_in_the_error(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="ValueError: seen"):
        run_ranks(_leave_alone, 2)
    run_ranks(_check, 2, [LayerCase(num_tokens_W=(8, 5))])  # in new processes


def _differ(rank: int, num_ranks: int) -> None:
    strategy = _build(Workspaces(dist.group.WORLD, CPU))
    case = LayerCase(num_tokens_W=(8, 5), top_k=2 + rank)
    with pytest.raises(ValueError, match=r"^top_k \(2 on rank 0, 3 on rank 1\) must be the same "):
        _output(strategy, case, rank)


def test_ranks_that_run_different_layers(run_ranks: RunRanks) -> None:
    run_ranks(_differ, 2)


def test_last_reference_frees_the_memory() -> None:
    gc.collect()
    before = dict(sanitizer._registered)
    strategy = _build(Workspaces(None, CPU))
    _check_case(strategy, LayerCase(num_tokens_W=(8,)), 0)
    assert len(sanitizer._registered) == len(before) + 4  # the four symmetric buffers
    del strategy
    gc.collect()
    assert sanitizer._registered == before


def test_closed_workspaces_are_made_again() -> None:
    workspaces = Workspaces(None, CPU)
    strategy = _build(workspaces)
    for _ in range(2):
        _check_case(strategy, LayerCase(num_tokens_W=(8,)), 0)
        workspaces.close()
        assert workspaces.all() == []


def _experts(
    hidden_size: int = 16, intermediate_size: int = 16, dtype: torch.dtype = torch.float32
) -> Experts:
    return Experts(
        up_LGD=torch.zeros(4, 2 * intermediate_size, hidden_size, dtype=dtype),
        down_LDF=torch.zeros(4, hidden_size, intermediate_size, dtype=dtype),
    )


_PLAIN = _experts()


@pytest.mark.parametrize(
    ("experts", "top_k", "problem"),
    [
        (_PLAIN, 2, ""),
        (dataclasses.replace(_PLAIN, up_bias_LG=torch.zeros(4, 32)), 2, r"expert_bias \(true\)"),
        (_experts(dtype=torch.float64), 2, r"dtype \(torch.float64\) must be one of"),
        (_experts(hidden_size=18), 2, r"hidden_size \(18\) must be a multiple of 4"),
        (
            _experts(intermediate_size=12, dtype=torch.bfloat16),
            2,
            r"intermediate_size \(12\) must be a multiple of 8",
        ),
        (_PLAIN, 65, r"top_k \(65\) must be at most 64"),
        (_experts(hidden_size=4112), 2, r"hidden_size \(4112\) must be at most 4096"),
        (
            dataclasses.replace(_PLAIN, down_LDF=torch.zeros(4, 16, 16).transpose(1, 2)),
            2,
            "must be contiguous",
        ),
        (
            dataclasses.replace(_PLAIN, down_LDF=torch.zeros(1025)[1:].view(4, 16, 16)),
            2,
            r"down_LDF \(at 0x\w+\) must begin on a multiple of 16 bytes",
        ),
    ],
)
def test_find_problem_names_unsupported_layers(experts: Experts, top_k: int, problem: str) -> None:
    found = _build(Workspaces(None, CPU)).find_problem(experts, top_k=top_k)
    assert re.search(problem, found) if problem else not found


def test_missing_peer_access_names_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halley.symm_mem.cpu.peer_access", lambda group, device: "on Mars")
    with pytest.raises(RuntimeError, match=r"on Mars; the strategies sequential and chunked need"):
        _check_case(_build(Workspaces(None, CPU)), LayerCase(num_tokens_W=(8,)), 0)


@pytest.mark.parametrize("sizes", [{"max_tokens": -1}, {"timeout_s": 0.0}])
def test_sizes_of_workspaces(sizes: dict[str, float]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=name):
        Workspaces(None, CPU, **sizes)  # pyright: ignore[reportArgumentType]


def test_unknown_save_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"save \(nothing\) must be one of all, inputs, recompute"):
        FusedStrategy(Workspaces(None, CPU), recorder=Recorder(CPU), save="nothing")  # pyright: ignore[reportArgumentType]
