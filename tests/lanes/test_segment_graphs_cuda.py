"""Steps whose segments are CUDA graphs have the bits of steps without: over NCCL.

GEMMs that leave SMs free may have other bits, so one test runs without reserved SMs.

pytest tests/lanes/test_segment_graphs_cuda.py
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.cost.simulate import NO_CONTENTION, Contention
from halley.distributed.mesh import build_groups
from halley.lanes import compile_step, lane_schedule, lane_step
from halley.lanes.allocations import Allocations, record_allocations
from halley.lanes.cut import Item
from halley.lanes.executor import Executor
from halley.lanes.segment_graphs import SegmentGraphs, can_capture, share_memory
from halley.tools.layer_case import relative_error
from tests.compiler.model_case import fresh_graphs
from tests.gpus import NUM_GPUS, device_of, needs_gpu
from tests.lanes.lane_case import Result, build_gpt2, is_equal, make_batch, take_result
from tests.rank_pool import RunRanks


pytestmark = needs_gpu

NUM_MEASURED = 4  # steps one after another, before the plan; graphs repeat in the last one


def _run_steps(rank: int, num_ranks: int, contention: Contention) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_step, "measure_group_contention", lambda *_: contention)
        patch.setattr(lane_schedule, "_MIN_GAIN", 0.0)  # two lanes, however small their gain is
        return _compare_steps(rank, num_ranks)


def _compare_steps(rank: int, num_ranks: int) -> dict[str, Any]:
    device = device_of(rank)
    groups = build_groups(num_ranks, device_type="cuda")
    groups = replace(groups, ep=dist.new_group(backend="nccl"))
    model = build_gpt2("switch", groups, num_layers=4).to(device)
    batch = [each.to(device) for each in make_batch(rank, batch_size=4)]
    other = [each.to(device) for each in make_batch(rank + 7, batch_size=4)]
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        run = lambda batch: take_result(step(*batch), model)  # noqa: E731
        before = [run(each) for each in (batch, other, batch, other)]
        assert step.plan is not None
        captured = [run(each) for each in (batch, other, batch, other)]
        num_lent = len(step._last._executor._lent)  # type: ignore[union-attr]
        step(*batch)
        accumulated = run(batch)
        with torch.no_grad():
            for parameter in model.parameters():  # other addresses: the graphs must be made again
                parameter.data = parameter.clone()
        moved = [run(other), run(batch)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        changed = run(batch)
        fresh = compile_step(model, 2, inner="eager")
        wanted = take_result(fresh(*batch), model)
        items = [can_capture(item) for item in step._last.items]  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group(groups.ep)
    return {
        "captured": [is_equal(*pair) for pair in zip(captured, before, strict=True)],
        "moved": [is_equal(moved[0], before[1]), is_equal(moved[1], before[0])],
        "changed": is_equal(changed, wanted) and not is_equal(changed, before[0]),
        "num_captured": sum(items),
        "repeated": is_equal(captured[0], captured[2]) and not is_equal(captured[0], captured[1]),
        "num_lent": num_lent,
        "accumulated": max(
            relative_error(twice, 2 * once)
            for twice, once in zip(accumulated[1], captured[2][1], strict=True)
        ),
        "error": max(map(relative_error, *(_tensors(each[0]) for each in (captured, before)))),
        "sm_margins": step.plan.sm_margins,
    }


def _tensors(result: Result) -> list[torch.Tensor]:
    return [result[0], *result[1]]


def test_captured_segments_have_the_bits_of_eager_ones(run_ranks: RunRanks) -> None:
    for found in run_ranks(_run_steps, min(NUM_GPUS, 2), NO_CONTENTION, timeout_s=240.0):
        assert found["captured"] == [True] * NUM_MEASURED
        assert found["moved"] == [True, True]
        assert found["changed"]
        assert found["num_captured"] > 10
        # Most ``.grad`` have the memory of a graph's result. They outlive the next steps, whose
        # graphs write there (``captured`` above), and the next step adds to them.
        assert found["num_lent"] > 10
        assert found["accumulated"] < 1e-6


def test_gemms_that_leave_sms_free_give_the_same_values(run_ranks: RunRanks) -> None:
    contention = Contention(sm_margin=4, grouped_sm_margin=8)
    for found in run_ranks(_run_steps, min(NUM_GPUS, 2), contention, timeout_s=240.0):
        assert found["sm_margins"] == (4, 8)
        assert found["repeated"]
        assert found["error"] < 1e-4


def _find_pools(rank: int, num_ranks: int) -> tuple[int, list[list[int]]]:
    """Return the predicted bytes of the graphs' pool, and its large pieces in two captures."""
    device = device_of(rank)
    groups = build_groups(num_ranks, device_type="cuda")
    groups = replace(groups, ep=dist.new_group(backend="nccl"))
    sizes = {"hidden_size": 256, "seq_len": 256}
    model = build_gpt2("switch", groups, num_layers=4, **sizes).to(device)
    batch = [each.to(device) for each in make_batch(rank, batch_size=16, seq_len=256)]
    found: list[list[int]] = []
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        for _ in range(NUM_MEASURED):
            step(*batch)
        for _ in range(2):
            step(*batch)
            found.append(
                [
                    segment["total_size"]
                    for segment in torch.cuda.memory_snapshot()
                    if segment["device"] == device.index
                    if segment["segment_pool_id"] != (0, 0) and segment["total_size"] > 2**21
                ]
            )
            with torch.no_grad():
                for parameter in model.parameters():  # other addresses: the graphs are made again
                    parameter.data = parameter.clone()
    assert step.plan is not None
    dist.barrier()
    dist.destroy_process_group(groups.ep)
    return step.plan.graph_bytes, found


def test_pool_of_graphs_is_one_piece_and_is_freed(run_ranks: RunRanks) -> None:
    for num_bytes, pools in run_ranks(_find_pools, min(NUM_GPUS, 2), timeout_s=240.0):
        piece = -(-num_bytes // 2**21) * 2**21
        assert piece > 2**26
        for pieces in pools:
            # Other pieces are a workspace of cuBLAS for each capture of this process. A prediction
            # that is too small gives a piece for each tensor that has no place.
            assert [each for each in pieces if each > 2**26] == [piece]
            assert len({each for each in pieces if each != piece}) <= 1


def test_allocations_are_recorded_in_order_unless_a_user_records_them() -> None:
    def call(args: list[Any]) -> list[Any]:
        temporary = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        result = torch.empty(2**21, dtype=torch.uint8, device="cuda")
        del temporary
        return [result, args[0]]

    args = [torch.empty(1, device="cuda")]
    wanted = Allocations(events=[(0, 2**20), (1, 2**21), (0, 0)], owners=[1, -1])
    assert record_allocations(call, [*args])[1] == wanted
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(context=None)
    try:
        assert record_allocations(call, [*args])[1] is None
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def _fail_captures(rank: int, num_ranks: int) -> tuple[list[bool], list[str]]:
    """Return whether each step has the bits of the first one, and all warnings."""
    device = device_of(rank)
    groups = build_groups(num_ranks, device_type="cuda")
    groups = replace(groups, ep=dist.new_group(backend="nccl"))
    model = build_gpt2("switch", groups, num_layers=2).to(device)
    batch = [each.to(device) for each in make_batch(rank, batch_size=4)]
    capture = SegmentGraphs.capture
    num_captures = 0

    def fail(_values: list[Any]) -> list[Any]:
        raise RuntimeError("injected")

    def capture_some(graphs: Any, call: Any, values: Any, fixed: Any, *, kept: Any) -> Any:
        nonlocal num_captures
        num_captures += 1
        # Attention without a graph has results on the CPU, and its backward reads them.
        is_attention = any(
            isinstance(value, torch.Tensor) and not value.is_cuda for value in call([*values])
        )
        fails = is_attention or num_captures % 3 == 0
        return capture(graphs, fail if fails else call, values, fixed, kept=kept)

    with (
        fresh_graphs(),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patch.setattr(lane_step, "measure_group_contention", lambda *_: NO_CONTENTION)
        patch.setattr(lane_schedule, "_MIN_GAIN", 0.0)
        patch.setattr(SegmentGraphs, "capture", capture_some)
        step = compile_step(model, 2, inner="eager")
        results = [take_result(step(*batch), model) for _ in range(NUM_MEASURED + 2)]
    dist.barrier()
    dist.destroy_process_group(groups.ep)
    return [is_equal(each, results[0]) for each in results], [str(each.message) for each in caught]


def test_segment_whose_capture_fails_runs_without_a_graph(run_ranks: RunRanks) -> None:
    for equal, texts in run_ranks(_fail_captures, min(NUM_GPUS, 2), timeout_s=240.0):
        assert equal == [True] * (NUM_MEASURED + 2)
        for reason in ("injected", "an input of shape () is on cpu"):
            assert any(f"without a CUDA graph: {reason}" in text for text in texts)


def test_cpu_tensors_are_no_part_of_a_graph() -> None:
    torch.mm(*torch.ones(2, 2, 2, device="cuda"))  # a capture cannot create cuBLAS's handle
    graphs = SegmentGraphs(0)

    def call(_values: list[Any]) -> list[Any]:
        return [torch.ones((), device="cuda"), torch.tensor(7)]

    with pytest.raises(RuntimeError, match=r"^an input of shape \(\) is on cpu$"):
        graphs.capture(call, [torch.tensor(7)], [False], kept=[False, False])
    replay, _ = graphs.capture(call, [], [], kept=[False, False])
    first = replay([])
    del first
    others = [torch.tensor(1) for _ in range(100)]  # get the memory of freed tensors
    found = [each.item() for each in replay([])]
    del others
    assert found == [1, 7]


def test_graphs_that_run_again_have_their_inputs_still() -> None:
    torch.mm(*torch.ones(2, 2, 2, device="cuda"))  # a capture cannot create cuBLAS's handle
    num_runs = torch.zeros(1, device="cuda")

    def double(values: list[Any]) -> list[Any]:
        return [2 * values.pop()]

    def compute_loss(values: list[Any]) -> list[Any]:
        num_runs.add_(1)
        tripled = 3 * values.pop()  # frees the input, unless someone keeps it
        return [(tripled + 1).mean()]  # the sum would get the memory of the input

    items = [
        Item(kind="segment", inputs=("x",), outputs=("y",), is_static=True),
        Item(kind="segment", inputs=("y",), outputs=("loss",), needs=(0,), is_static=True),
    ]
    executor = Executor(
        items,
        [double, compute_loss],
        [(0, 0), (0, 1)],
        loss="loss",
        captures=True,
    )
    recorder = Recorder("cuda", enabled=False)
    found: list[tuple[float, float]] = []
    for step in range(3):
        x = torch.full((2**20,), float(step), device="cuda")
        (loss,) = executor.run([{"x": x}], [], recorder=recorder, num_repeats=3)
        found.append((loss.item(), num_runs.item()))
    assert found == [(1.0, 1.0), (7.0, 5.0), (13.0, 9.0)]


def test_shared_memory_is_written_by_its_owner_and_keeps_the_layout() -> None:
    owner = torch.arange(12.0, device="cuda").view(3, 4)
    shared = share_memory(owner[1:].t())
    assert torch.equal(shared, owner[1:].t())
    assert (shared.stride(), shared.storage_offset()) == ((1, 4), 4)
    owner[2, 3] = -1.0
    assert shared[3, 1] == -1.0
    assert share_memory(3) == 3
