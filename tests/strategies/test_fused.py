"""The fused strategy against the reference, with buffers that several layers share."""

import dataclasses
import gc
import itertools
import re

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts
from halley.fused.buffers import Workspaces
from halley.fused.kernels.layout import EPOCH
from halley.interpreter import registered_memory
from halley.strategies.fused import FusedStrategy
from halley.symm_mem import heap
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    SIZES,
    LayerCase,
    assert_close,
    build,
    expected,
    make_inputs,
)


def _output(strategy: FusedStrategy, case: LayerCase, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return strategy.forward(*make_inputs(case, rank))


def _check_case(strategy: FusedStrategy, case: LayerCase, rank: int) -> None:
    got_TD = _output(strategy, case, rank)
    assert_close(got_TD, expected(case, rank)["y"], f"y: {case}", dtype=case.dtype)


def _check(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategy = build(workspaces)
    for case in cases:
        _check_case(strategy, case, rank)
    workspaces.close()


def test_values_without_gradients(run_ranks: RunRanks) -> None:
    """Each top-k and dtype has buffers of its own, all in the same workspaces."""
    cases = [
        LayerCase(num_tokens_W=(7, 12), num_experts=2, top_k=1, activation="gelu"),
        LayerCase(num_tokens_W=(7, 5), num_experts=8, top_k=8, dtype=torch.float16),
        LayerCase(num_tokens_W=(9, 6), num_experts=4, dropped=0.4, dtype=torch.bfloat16),
        LayerCase(num_tokens_W=(9, 6), num_experts=2, dropped=1.0),
        LayerCase(num_tokens_W=(1, 0), num_experts=2, seed=2),
        LayerCase(num_tokens_W=(0, 0), num_experts=2, seed=2),
    ]
    run_ranks(_check, 2, cases)


def _grow(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategy = build(workspaces)
    # Many more tokens on one rank alone, then on the other, and few again.
    for seed, tokens in enumerate([(3, 1), (0, 90), (130, 1), (2, 2)]):
        _check_case(strategy, LayerCase(num_tokens_W=tokens, num_experts=2, seed=seed), rank)
    (workspace,) = workspaces.all()
    # The capacity is 64 tokens for 3, 128 for 90, 192 for 130.
    assert workspace.context().send_buffer.local.shape == (2, 192, SIZES["hidden_size"])
    assert workspace.layout.max_tokens == 256  # for which kernels are compiled
    heap_bytes = workspace.heap.num_bytes
    assert heap_bytes == workspace.symmetric_bytes  # the smaller buffers were freed
    workspaces.close()


def test_buffers_grow_for_more_tokens_on_one_rank(run_ranks: RunRanks) -> None:
    run_ranks(_grow, 2)


def test_first_buffers_hold_max_tokens() -> None:
    workspaces = Workspaces(None, CPU, max_tokens=100)
    _check_case(build(workspaces), LayerCase(num_tokens_W=(8,)), 0)
    assert [w.context().send_buffer.local.shape[1] for w in workspaces.all()] == [100]


def test_plan_with_more_rows_than_predicted_runs_again() -> None:
    workspaces = Workspaces(None, CPU)
    strategy = build(workspaces)
    case = LayerCase(num_tokens_W=(40,), top_k=4)
    _check_case(strategy, case, 0)
    (workspace,) = workspaces.all()
    sizes = workspace.plan_sizes
    sizes.last = sizes.last._replace(num_rows=16)
    _check_case(strategy, dataclasses.replace(case, seed=1), 0)
    assert sizes.last.num_rows >= 160


def _run_layers(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategies = [build(workspaces, fused=fused) for fused in (True, False, True)]
    wide = LayerCase(num_tokens_W=(8, 5), num_experts=6, top_k=3)
    narrow = LayerCase(num_tokens_W=(9, 2), num_experts=4, top_k=1, dtype=torch.bfloat16)
    for seed, strategy in enumerate(strategies):
        for case in (wide, narrow):
            _check_case(strategy, dataclasses.replace(case, seed=seed), rank)
    shapes = [workspace.shape for workspace in workspaces.all()]
    assert [(s.num_experts, s.top_k) for s in shapes] == [(6, 3), (4, 1)]
    first, _ = workspaces.all()
    assert first.counters[EPOCH.value] == 3
    workspaces.close()


def test_layers_of_two_shapes_share_workspaces(run_ranks: RunRanks) -> None:
    run_ranks(_run_layers, 2)


def test_size_of_a_plan_is_predicted_from_the_same_layer() -> None:
    """Two layers with different loads alternate; each one gets memory for its own load."""
    workspaces = Workspaces(None, CPU)
    strategy = build(workspaces)
    cases = [LayerCase(num_tokens_W=(40,), dropped=dropped) for dropped in (0.0, 0.9)]
    layers = [make_inputs(case, 0) for case in cases]
    for inputs in layers * 2:
        strategy.forward(*inputs)
    (workspace,) = workspaces.all()
    many, few = (workspace.plan_sizes.predict(inputs.experts.up_LGD).num_rows for inputs in layers)
    assert few < many
    # For a layer that never ran, the prediction is the last plan of any layer.
    assert workspace.plan_sizes.predict(torch.zeros(1)).num_rows == few


def _run_out_of_memory(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU, timeout_s=60)
    strategy = build(workspaces)
    case = LayerCase(num_tokens_W=(8, 5))

    map_memory, calls = heap._map, itertools.count()

    def fail(path: str, num_bytes: int) -> torch.Tensor:
        if next(calls) == 3:  # of the second buffer: each maps the memory of two ranks
            raise torch.OutOfMemoryError("pretended")
        return map_memory(path, num_bytes)

    before = dict(registered_memory)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(heap, "_map", fail)
        with pytest.raises(MemoryError, match=r"rank 1 of 2 has no \d+ bytes .*pretended"):
            _output(strategy, case, rank)
    assert workspaces.all() == []
    assert len(registered_memory) == len(before)  # the first buffer is free again
    _check_case(strategy, case, rank)  # with memory again
    workspaces.close()


def test_out_of_memory_on_one_rank_is_an_error_on_all(run_ranks: RunRanks) -> None:
    run_ranks(_run_out_of_memory, 2)


def _lose_rank_1(rank: int, num_ranks: int) -> None:
    workspaces = Workspaces(dist.group.WORLD, CPU)
    strategy = build(workspaces)
    case = LayerCase(num_tokens_W=(8, 5))
    _check_case(strategy, case, rank)  # with the default timeout: the machine may be busy
    for workspace in workspaces.all():
        workspace.timeout_s = 0.5
    if rank == 1:
        return
    text = r"rank 0: rank 1 did not publish its routing \(plan\) within 0.5 s"
    for _ in range(2):  # later calls raise the same error
        with pytest.raises(RuntimeError, match=text):
            _output(strategy, case, rank)
    with pytest.raises(RuntimeError, match=text):
        workspaces.check()
    raise ValueError("seen")


def test_missing_rank_is_named_in_the_error(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="ValueError: seen"):
        run_ranks(_lose_rank_1, 2)
    run_ranks(_check, 2, [LayerCase(num_tokens_W=(8, 5))])  # in new processes


def _differ(rank: int, num_ranks: int) -> None:
    strategy = build(Workspaces(dist.group.WORLD, CPU))
    case = LayerCase(num_tokens_W=(8, 5), top_k=2 + rank)
    with pytest.raises(ValueError, match=r"^top_k \(2 on rank 0, 3 on rank 1\) must be the same "):
        _output(strategy, case, rank)


def test_ranks_with_different_layers_raise_an_error(run_ranks: RunRanks) -> None:
    run_ranks(_differ, 2)


def test_last_reference_frees_the_memory() -> None:
    gc.collect()
    before = dict(registered_memory)
    strategy = build(Workspaces(None, CPU))
    _check_case(strategy, LayerCase(num_tokens_W=(8,)), 0)
    assert len(registered_memory) == len(before) + 4  # the four symmetric buffers
    del strategy
    gc.collect()
    assert registered_memory == before


def test_closed_workspaces_allocate_again() -> None:
    workspaces = Workspaces(None, CPU)
    strategy = build(workspaces)
    for _ in range(2):
        _check_case(strategy, LayerCase(num_tokens_W=(8,)), 0)
        workspaces.close()
        assert workspaces.all() == []


def _experts(
    hidden: int = 16, inner: int = 16, dtype: torch.dtype = torch.float32, **changes: torch.Tensor
) -> Experts:
    up_LGD = torch.zeros(4, 2 * inner, hidden, dtype=dtype)
    down_LDF = torch.zeros(4, hidden, inner, dtype=dtype)
    return dataclasses.replace(Experts(up_LGD=up_LGD, down_LDF=down_LDF), **changes)


_STRIDED = torch.zeros(4, 16, 16).transpose(1, 2)
_UNALIGNED = torch.zeros(1025)[1:].view(4, 16, 16)
_ALIGNMENT = r"down_LDF \(at 0x\w+\) must begin on a multiple of 16 bytes"


@pytest.mark.parametrize(
    ("experts", "top_k", "problem"),
    [
        (_experts(), 2, "^$"),
        (_experts(up_bias_LG=torch.zeros(4, 32)), 2, r"expert_bias \(true\)"),
        (_experts(dtype=torch.float64), 2, r"dtype \(torch.float64\) must be one of"),
        (_experts(18), 2, r"hidden_size \(18\) must be a multiple of 4"),
        (_experts(16, 12, torch.bfloat16), 2, r"intermediate_size \(12\) must be a multiple of 8"),
        (_experts(), 65, r"top_k \(65\) must be at most 64"),
        (_experts(4112), 2, r"hidden_size \(4112\) must be at most 4096"),
        (_experts(down_LDF=_STRIDED), 2, "must be contiguous"),
        (_experts(down_LDF=_UNALIGNED), 2, _ALIGNMENT),
    ],
)
def test_find_problem_names_unsupported_layers(experts: Experts, top_k: int, problem: str) -> None:
    assert re.search(problem, build(Workspaces(None, CPU)).find_problem(experts, top_k=top_k))


def test_missing_peer_access_names_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halley.symm_mem.heap.peer_access", lambda group, device: "on Mars")
    with pytest.raises(RuntimeError, match=r"on Mars; the strategies sequential and chunked need"):
        _check_case(build(Workspaces(None, CPU)), LayerCase(num_tokens_W=(8,)), 0)


@pytest.mark.parametrize("sizes", [{"max_tokens": -1}, {"timeout_s": 0.0}, {"max_load": 0.5}])
def test_wrong_size_of_workspaces_is_named(sizes: dict[str, float]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=name):
        Workspaces(None, CPU, **sizes)  # pyright: ignore[reportArgumentType]


def test_unknown_save_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"save \(nothing\) must be one of all, inputs, recompute"):
        FusedStrategy(Workspaces(None, CPU), recorder=Recorder(CPU), save="nothing")  # pyright: ignore[reportArgumentType]
