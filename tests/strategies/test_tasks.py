"""Tasks of layers: order, durations, the number of chunks chosen, and the recorded spans."""

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import LayerShape, Task
from halley.cost.hardware import H200, Hardware, Predictor
from halley.cost.simulate import makespan_us, simulate
from halley.strategies.all_gather import all_gather_tasks
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.fused import fused_tasks
from halley.strategies.part_orders import PIPELINES, list_tasks
from halley.strategies.registry import build_strategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import CPU, SIZES, LayerCase, make_inputs, train


CASE = LayerCase(num_tokens_W=(40, 40))
SHAPE = LayerShape(
    num_tokens=8192, hidden_size=4096, intermediate_size=14336, num_experts=32, top_k=2, ep_size=4
)
# A link that takes no time, and a link so slow that communication takes most of the time.
FREE = dataclasses.replace(H200, link_bytes_per_s=1e30, link_latency_us=0.0)
SLOW = dataclasses.replace(H200, link_bytes_per_s=14e9)
FAST = dataclasses.replace(H200, link_bytes_per_s=1e12)
INSTANT_HOST = dataclasses.replace(H200, eager_us=0.0, collective_us=0.0, read_us=0.0)
# A token has two of 32 experts, and a rank has 8: 24 * 23 of 32 * 31 pairs are on other ranks.
PUSH_US = 8192 * 3 * (1 - 24 * 23 / (32 * 31)) * 8192 / (1.1 * H200.link_bytes_per_s) * 1e6


def _gemm_us(inner: int, outer: int) -> float:
    """Return the us of 16384 rows: 8 experts with half a tile more each, and half a wave more."""
    area = (16384 + 8 * 64) * outer + 132 * 128 * 256 / 2
    num_bytes = 2 * (16384 * (inner + outer) + 8 * inner * outer)
    return 1e6 * math.hypot(2 * area * inner / 700e12, num_bytes / 4.3e12) + 6.0


UP_US, DOWN_US = _gemm_us(4096, 28672), _gemm_us(14336, 4096)


def _tasks(num_chunks: int, hardware: Hardware = H200) -> list[Task]:
    return all_to_all_tasks(SHAPE, Predictor(hardware), num_chunks=num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunks_exchange_all_rows_together(num_chunks: int) -> None:
    # Four times, 3/4 of 16384 rows of 8192 bytes leave the rank, after the routing table.
    durations_us = [task.duration_us for task in _tasks(num_chunks) if task.stream == "comm"]
    wire_us = 4 * 0.75 * 16384 * 8192 / H200.link_bytes_per_s * 1e6
    assert sum(durations_us) == pytest.approx(wire_us + len(durations_us) * H200.link_latency_us)
    assert len(durations_us) == 4 * num_chunks + 1


def test_duration_of_the_experts_by_hand() -> None:
    # Two GEMMs of 16384 rows, 6 % slower than Halley's; twice that backward. Reordered rows are
    # read and written twice. The activation has 5 passes over 14336 columns, and 13 in backward.
    column_us = 16384 * 2 / H200.fused_bytes_per_s * 1e6
    durations = {task.name: task.duration_us for task in _tasks(1)}
    for name, num_gemms, num_passes in (("experts.0", 1, 5), ("experts.backward.0", 2, 13)):
        moved_us = column_us * (num_passes * 14336 + 4 * 4096)
        assert durations[name] == pytest.approx(num_gemms * 1.06 * (UP_US + DOWN_US) + moved_us)


def test_host_launches_every_operation() -> None:
    host_us = sum(task.duration_us for task in _tasks(1) if task.stream == "host")
    assert host_us == 76 * H200.eager_us + 5 * H200.collective_us + H200.read_us


def test_next_chunk_is_exchanged_while_one_computes() -> None:
    spans = {span.name: span for span in simulate(_tasks(4, INSTANT_HOST))}
    for c in range(3):
        assert spans[f"dispatch.{c + 1}"].start_us == spans[f"dispatch.{c}"].end_us
        assert spans[f"dispatch.{c + 1}"].start_us < spans[f"experts.{c}"].end_us
        assert spans[f"combine.{c}"].start_us < spans[f"experts.{c + 1}"].end_us
    assert makespan_us(_tasks(4, SLOW)) < makespan_us(_tasks(1, SLOW))


def test_communication_beside_the_experts_slows_them_down() -> None:
    """Two exchanges run beside the experts of an inner chunk, one beside those at the ends."""
    durations = {task.name: task.duration_us for task in _tasks(4, FAST)}
    assert durations["dispatch.0"] < durations["experts.0"] / 2
    added_us = durations["experts.1"] - durations["experts.0"]
    assert added_us == pytest.approx(0.37 * durations["dispatch.0"])


def test_backward_across_nodes_runs_parts_in_reverse_order() -> None:
    """The order last-2: the received halves, then own tokens; backward begins with own tokens."""
    kernels = partial(fused_tasks, chunk_columns=2048, fused=True)
    last = next(each for each in PIPELINES if each.name == "last-2")
    tasks = list_tasks(SHAPE, Predictor(H200), num_nodes=4, inner=kernels, pipeline=last)
    names = [task.name for task in tasks]
    parts = [name.rpartition(".")[2] for name in names if ".part." in name]
    assert list(dict.fromkeys(parts)) == ["0", "1", "2"]
    assert list(dict.fromkeys(reversed(parts))) == ["0", "1", "2"]
    assert [name[-1] for name in names if name.startswith("rail.dispatch.backward")] == ["1", "0"]


def test_chunks_are_chosen_for_slow_communication_only() -> None:
    assert choose_num_chunks(SHAPE, Predictor(FREE)) == 1
    assert choose_num_chunks(dataclasses.replace(SHAPE, ep_size=1), Predictor(H200)) == 1
    chosen = choose_num_chunks(SHAPE, Predictor(SLOW))
    times_us = {n: makespan_us(_tasks(n, SLOW)) for n in (1, 2, 3, 4, 6, 8)}
    assert times_us[chosen] == min(times_us.values())
    assert times_us[chosen] < 0.95 * times_us[1]
    for num_experts in (4, 8, 12):  # on 4 ranks; a chunk has at least one local expert
        shape = dataclasses.replace(SHAPE, num_experts=num_experts)
        assert 1 <= choose_num_chunks(shape, Predictor(SLOW)) <= num_experts // 4


def _fused(*, fused: bool, shape: LayerShape = SHAPE, hardware: Hardware = H200) -> list[Task]:
    return fused_tasks(shape, Predictor(hardware), chunk_columns=2048, fused=fused)


def test_one_chunk_and_unfused_kernels_overlap_nothing() -> None:
    for tasks in (_tasks(1, INSTANT_HOST), _fused(fused=False)):
        assert makespan_us(tasks) == pytest.approx(sum(task.duration_us for task in tasks))


def test_fused_tasks_begin_with_local_rows() -> None:
    tasks = _fused(fused=True)
    needs = {task.name: task.needs for task in tasks}
    want = {
        "up.0": "plan",
        **{f"up.{rank}": f"dispatch.{rank}" for rank in (1, 2, 3)},
        "down.1": "up.3",
        "combine.1": "down.1",
        "publish.backward": "sum.1",
        "down.backward.0": "publish.backward",
        **{f"down.backward.{rank}": f"dispatch.backward.{rank}" for rank in (1, 2, 3)},
        **{f"up.backward.{chunk}": "down.backward.3" for chunk in (0, 1)},
        "combine.backward.1": "up.backward.1",
        "sum.backward.1": "combine.backward.1",
        **{f"{name}.weights": "down.backward.3" for name in ("down", "up")},
    }
    assert {name: needs[name] for name in want} == {name: (need,) for name, need in want.items()}
    assert "down.2" not in needs
    # Communication slows each of four GEMMs beside it, and yet the whole takes less time.
    unfused = _fused(fused=False)
    for stream, more_us in (("compute", 4 * 0.37 * PUSH_US), ("comm", 0.0)):
        work_us = [sum(t.duration_us for t in ts if t.stream == stream) for ts in (tasks, unfused)]
        assert work_us[0] == pytest.approx(work_us[1] + more_us)
    assert makespan_us(tasks) < makespan_us(unfused)


def test_token_crosses_the_link_once_to_each_rank() -> None:
    for fused in (True, False):
        comm_us = sum(t.duration_us for t in _fused(fused=fused) if t.stream == "comm")
        assert comm_us == pytest.approx(4 * PUSH_US)  # dispatch and combine, twice


def test_durations_of_the_gemms_by_hand() -> None:
    """Each projection has one GEMM of 16384 rows in forward and two in backward."""
    for fused in (True, False):
        durations = {task.name: task.duration_us for task in _fused(fused=fused)}
        assert durations.pop("up.weights") == pytest.approx(UP_US)
        assert durations.pop("down.weights") == pytest.approx(DOWN_US)
        copy_us = 2 * 4096 * 8192 / 4.3e6  # first GEMMs also copy the rank's own rows
        first = {"up": UP_US + copy_us, "down.backward": DOWN_US + copy_us}
        for name, gemm_us in {**first, "down": DOWN_US, "up.backward": UP_US}.items():
            found_us = sum(us for task, us in durations.items() if task.rpartition(".")[0] == name)
            assert found_us == pytest.approx(gemm_us + (0.37 * PUSH_US if fused else 0.0))


def test_fused_tasks_of_a_single_rank() -> None:
    names = [task.name for task in _fused(fused=True, shape=dataclasses.replace(SHAPE, ep_size=1))]
    assert names[:3] == ["publish", "plan", "up.0"]


def test_all_gather_copies_each_token_to_every_rank() -> None:
    predictor = Predictor(H200)
    tasks = {task.name: task for task in all_gather_tasks(SHAPE, predictor)}
    crossing = SHAPE.num_tokens * (SHAPE.ep_size - 1) * SHAPE.hidden_size * SHAPE.itemsize
    for name in ("dispatch", "combine", "combine.backward", "dispatch.backward"):
        assert tasks[name].duration_us == predictor.all_to_all_us(crossing)
    total_us = sum(task.duration_us for task in tasks.values())
    assert makespan_us(list(tasks.values())) == pytest.approx(total_us)


# The recorder and the simulator both have these spans: experts in forward, and every wait.
COMPARED = ("dispatch", "experts", "combine", "restore")


def _record(rank: int, num_ranks: int, name: str, num_chunks: int) -> list[str]:
    recorder = Recorder(CPU, rank=rank)
    options: dict[str, Any] = {"recorder": recorder, "device": CPU, "num_chunks": num_chunks}
    train(build_strategy(name, dist.group.WORLD, **options).forward, CASE, rank)
    return [span.name for span in recorder.collect() if not span.name.startswith("route")]


def _simulate(name: str, num_chunks: int) -> list[str]:
    """Return the simulated compute stream: each task, after the waits for its inputs."""
    layer: dict[str, Any] = {"num_experts": CASE.num_experts, "top_k": CASE.top_k}
    shape = LayerShape(num_tokens=40, ep_size=2, **SIZES, **layer)
    strategy = build_strategy(name, None, recorder=Recorder(CPU), device=CPU, num_chunks=num_chunks)
    tasks = strategy.tasks(shape, Predictor(H200))
    streams = {task.name: task.stream for task in tasks}
    starts_us = {span.name: span.start_us for span in simulate(tasks)}
    order: list[str] = []
    for task in sorted(tasks, key=lambda task: starts_us[task.name]):
        if task.stream == "compute":
            order += [f"{need}.wait" for need in task.needs if streams[need] == "comm"]
            order.append(task.name)
    plain = [".".join(part for part in item.split(".") if not part.isdecimal()) for item in order]
    return [item for item in plain if item.startswith(COMPARED) and not item.endswith(".backward")]


@pytest.mark.parametrize(("name", "num_chunks"), [("sequential", 0), ("chunked", 3)])
def test_recorded_order_equals_the_simulated_order(
    run_ranks: RunRanks, name: str, num_chunks: int
) -> None:
    want = _simulate(name, num_chunks)
    assert want.count("dispatch.backward.wait") == max(1, num_chunks)
    for recorded in run_ranks(_record, 2, name, num_chunks):
        assert recorded == want


def test_fused_layer_is_recorded_as_one_span() -> None:
    """Its waits are inside the kernels, in backward as well."""
    recorder = Recorder(CPU)
    strategy = build_strategy("fused", None, recorder=recorder, device=CPU)
    case = LayerCase(num_tokens_W=(5,), num_experts=2)
    with torch.no_grad():
        strategy.forward(*make_inputs(case, 0))
    assert [span.name for span in recorder.collect()] == ["fused_experts"]
    train(strategy.forward, case, 0)
    assert [span.name for span in recorder.collect()] == ["fused_experts"]
