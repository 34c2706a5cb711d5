"""Tasks of layers: their order, their durations, and the number of chunks chosen from them."""

import dataclasses

import pytest

from halley.core.types import LayerShape
from halley.cost.hardware import H200, Hardware, Predictor
from halley.cost.simulate import Task, makespan_us, simulate
from halley.strategies.all_gather import all_gather_tasks
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.fused import fused_tasks


SHAPE = LayerShape(
    num_tokens=8192,
    hidden_size=4096,
    intermediate_size=14336,
    num_experts=32,
    top_k=2,
    ep_size=4,
)
# A link that takes no time, and a link so slow that communication takes most of the time.
FREE = dataclasses.replace(H200, link_bytes_per_s=1e30, link_latency_us=0.0)
SLOW = dataclasses.replace(H200, link_bytes_per_s=60e9)


def _tasks(num_chunks: int, hardware: Hardware = H200) -> list[Task]:
    return all_to_all_tasks(SHAPE, Predictor(hardware), num_chunks=num_chunks)


def test_tasks_of_one_chunk() -> None:
    tasks = _tasks(1)
    assert [(task.stream, task.name, task.needs) for task in tasks] == [
        ("compute", "route", ()),
        ("compute", "gather", ("route",)),
        ("comm", "dispatch.0", ("gather",)),
        ("compute", "experts.0", ("dispatch.0",)),
        ("comm", "combine.0", ("experts.0",)),
        ("compute", "restore", ("combine.0",)),
        ("compute", "restore.backward", ("restore",)),
        ("comm", "combine.backward.0", ("restore.backward",)),
        ("compute", "experts.backward.0", ("combine.backward.0",)),
        ("comm", "dispatch.backward.0", ("experts.backward.0",)),
        ("compute", "gather.backward", ("dispatch.backward.0",)),
    ]
    # Each task needs the one before, so no task overlaps another.
    assert makespan_us(tasks) == pytest.approx(sum(task.duration_us for task in tasks))


def test_backward_tasks_mirror_forward_tasks() -> None:
    names = [task.name for task in _tasks(3) if "." in task.name]
    middle = names.index("restore.backward")
    forward, backward = names[:middle], names[middle + 1 : -1]
    assert [n for n in forward if n.startswith("dispatch")] == [f"dispatch.{c}" for c in range(3)]
    assert forward[3:] == [f"{n}.{c}" for c in range(3) for n in ("experts", "combine")]
    assert backward[:3] == [f"combine.backward.{c}" for c in (2, 1, 0)]
    want = [f"{n}.backward.{c}" for c in (2, 1, 0) for n in ("experts", "dispatch")]
    assert backward[3:] == want


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunks_exchange_all_rows_together(num_chunks: int) -> None:
    # 3/4 of 16384 rows of 8192 bytes leave the rank, four times in forward and backward.
    tasks = _tasks(num_chunks)
    comm_us = sum(task.duration_us for task in tasks if task.stream == "comm")
    wire_us = 4 * 0.75 * 16384 * 8192 / H200.link_bytes_per_s * 1e6
    assert comm_us == pytest.approx(wire_us + 4 * num_chunks * H200.link_latency_us)
    assert len([task for task in tasks if task.stream == "comm"]) == 4 * num_chunks


def test_duration_of_the_experts_by_hand() -> None:
    # Two GEMMs of 16384 rows: with 4096 x 28672, and with 14336 x 4096; twice that backward.
    flops = 2 * 16384 * 4096 * (28672 + 14336)
    gemm_us = flops / H200.gemm_flops_per_s * 1e6 + 2 * H200.launch_us
    moved = 16384 * 2 * (2 * 28672 + 3 * 14336 + 4 * 4096)
    forward_us = gemm_us + moved / H200.memory_bytes_per_s * 1e6
    durations = {task.name: task.duration_us for task in _tasks(1)}
    assert durations["experts.0"] == pytest.approx(forward_us)
    assert durations["experts.backward.0"] == pytest.approx(2 * forward_us)


def test_next_chunk_is_exchanged_while_one_computes() -> None:
    spans = {span.name: span for span in simulate(_tasks(4))}
    for c in range(3):
        assert spans[f"dispatch.{c + 1}"].start_us == spans[f"dispatch.{c}"].end_us
        assert spans[f"dispatch.{c + 1}"].start_us < spans[f"experts.{c}"].end_us
        assert spans[f"combine.{c}"].start_us < spans[f"experts.{c + 1}"].end_us
    assert makespan_us(_tasks(4)) < makespan_us(_tasks(1))


def test_chunks_are_chosen_for_slow_communication_only() -> None:
    assert choose_num_chunks(SHAPE, Predictor(FREE)) == 1
    assert choose_num_chunks(dataclasses.replace(SHAPE, ep_size=1), Predictor(H200)) == 1
    predictor = Predictor(SLOW)
    chosen = choose_num_chunks(SHAPE, predictor)
    assert chosen > 1
    times_us = {n: makespan_us(_tasks(n, SLOW)) for n in (1, 2, 3, 4, 6, 8)}
    assert times_us[chosen] == min(times_us.values())
    assert times_us[chosen] < 0.9 * times_us[1]
    for num_experts in (4, 8, 12):  # on 4 ranks; a chunk has at least one local expert
        shape = dataclasses.replace(SHAPE, num_experts=num_experts)
        assert 1 <= choose_num_chunks(shape, predictor) <= num_experts // 4


def _fused(*, fused: bool, shape: LayerShape = SHAPE, hardware: Hardware = H200) -> list[Task]:
    return fused_tasks(shape, Predictor(hardware), chunk_columns=2048, fused=fused)


def test_tasks_of_the_unfused_kernels() -> None:
    tasks = _fused(fused=False)
    assert [(task.stream, task.name, task.needs) for task in tasks] == [
        ("compute", "publish", ()),
        ("compute", "plan", ("publish",)),
        ("comm", "dispatch.0", ("plan",)),
        ("compute", "up.0", ("dispatch.0",)),
        ("compute", "down.0", ("up.0",)),
        ("comm", "combine.0", ("down.0",)),
        ("compute", "sum.0", ("combine.0",)),
        ("compute", "publish.backward", ("sum.0",)),
        ("comm", "dispatch.backward.0", ("publish.backward",)),
        ("compute", "down.backward.0", ("dispatch.backward.0",)),
        ("compute", "up.backward.0", ("down.backward.0",)),
        ("comm", "combine.backward.0", ("up.backward.0",)),
        ("compute", "sum.backward.0", ("combine.backward.0",)),
        ("compute", "down.weights", ("down.backward.0",)),
        ("compute", "up.weights", ("down.backward.0",)),
    ]
    # All tasks share the compute stream or need the task before, so no task overlaps another.
    assert makespan_us(tasks) == pytest.approx(sum(task.duration_us for task in tasks))


def test_fused_tasks_begin_with_local_rows() -> None:
    tasks = _fused(fused=True)
    needs = {task.name: task.needs for task in tasks}
    assert needs["up.0"] == ("plan",)
    assert [needs[f"up.{rank}"] for rank in (1, 2, 3)] == [
        (f"dispatch.{rank}",) for rank in (1, 2, 3)
    ]
    assert [name for name in needs if name.startswith("down.") and name[5].isdecimal()] == [
        "down.0",
        "down.1",
    ]
    assert needs["down.1"] == ("up.3",)
    assert needs["combine.1"] == ("down.1",)
    assert needs["publish.backward"] == ("sum.1",)
    assert needs["down.backward.0"] == ("publish.backward",)
    assert [needs[f"down.backward.{rank}"] for rank in (1, 2, 3)] == [
        (f"dispatch.backward.{rank}",) for rank in (1, 2, 3)
    ]
    assert [needs[f"up.backward.{chunk}"] for chunk in (0, 1)] == [("down.backward.3",)] * 2
    assert needs["combine.backward.1"] == ("up.backward.1",)
    assert needs["sum.backward.1"] == ("combine.backward.1",)
    assert needs["down.weights"] == needs["up.weights"] == ("down.backward.3",)
    # Each stream has the same work as in the unfused form, and the whole takes less time.
    unfused = _fused(fused=False)
    for stream in ("compute", "comm"):
        work_us = [sum(t.duration_us for t in ts if t.stream == stream) for ts in (tasks, unfused)]
        assert work_us[0] == pytest.approx(work_us[1])
    assert makespan_us(tasks) < makespan_us(unfused)


def test_token_crosses_the_link_once_to_each_rank() -> None:
    # A token has two of 32 experts, and a rank has 8: 24 * 23 of 32 * 31 pairs are on other ranks.
    crossings = 8192 * 3 * (1 - 24 * 23 / (32 * 31))
    wire_us = 4 * crossings * 8192 / H200.link_bytes_per_s * 1e6  # dispatch and combine, twice
    for fused in (True, False):
        comm_us = sum(t.duration_us for t in _fused(fused=fused) if t.stream == "comm")
        assert comm_us == pytest.approx(wire_us + 4 * H200.link_latency_us)


def test_durations_of_the_gemms_by_hand() -> None:
    """Each projection has one GEMM of 16384 rows in forward and two in backward."""
    up_us = 2 * 16384 * 4096 * 28672 / H200.gemm_flops_per_s * 1e6 + H200.launch_us
    down_us = 2 * 16384 * 14336 * 4096 / H200.gemm_flops_per_s * 1e6 + H200.launch_us
    for fused in (True, False):
        durations = {task.name: task.duration_us for task in _fused(fused=fused)}
        assert durations["up.weights"] == pytest.approx(up_us)
        assert durations["down.weights"] == pytest.approx(down_us)
        for name, gemm_us in (("down", down_us), ("up.backward", up_us)):
            parts = [f"{name}.{chunk}" for chunk in range(2 if fused else 1)]
            assert sum(durations[part] for part in parts) == pytest.approx(gemm_us)
        # In addition, received rows are copied: 16384 rows of 8192 bytes, read and written.
        expand_us = 2 * 16384 * 8192 / H200.memory_bytes_per_s * 1e6
        for name, gemm_us in (("up", up_us), ("down.backward", down_us)):
            parts = [f"{name}.{rank}" for rank in range(4 if fused else 1)]
            assert sum(durations[part] for part in parts) == pytest.approx(gemm_us + expand_us)


def test_fused_tasks_of_a_single_rank() -> None:
    alone = dataclasses.replace(SHAPE, ep_size=1)
    names = [task.name for task in _fused(fused=True, shape=alone)]
    assert names[:3] == ["publish", "plan", "up.0"]


def test_all_gather_copies_each_token_to_every_rank() -> None:
    predictor = Predictor(H200)
    tasks = {task.name: task for task in all_gather_tasks(SHAPE, predictor)}
    crossing = SHAPE.num_tokens * (SHAPE.ep_size - 1) * SHAPE.hidden_size * SHAPE.itemsize
    for name in ("dispatch", "combine", "combine.backward", "dispatch.backward"):
        assert tasks[name].duration_us == predictor.all_to_all_us(crossing)
    assert makespan_us(list(tasks.values())) == pytest.approx(
        sum(task.duration_us for task in tasks.values())
    )
