"""A strategy records its spans in the order of its simulated tasks."""

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import LayerShape
from halley.cost.hardware import H200, Predictor
from halley.cost.simulate import simulate
from halley.strategies.registry import build_strategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import SIZES, LayerCase, local_experts_of, make_tokens


CPU = torch.device("cpu")
CASE = LayerCase(num_tokens_W=(40, 40))
# The recorder and the simulator both have these spans: experts in forward, and every wait.
COMPARED = ("dispatch", "experts", "combine", "restore")


def _record(rank: int, num_ranks: int, name: str, num_chunks: int) -> list[str]:
    recorder = Recorder(CPU, rank=rank)
    strategy = build_strategy(
        name, dist.group.WORLD, recorder=recorder, device=CPU, num_chunks=num_chunks
    )
    x_TD, routing, grad_TD = make_tokens(CASE, rank)
    strategy.forward(x_TD, routing, local_experts_of(CASE, rank)).backward(grad_TD)
    return [span.name for span in recorder.collect() if not span.name.startswith("route")]


def _simulate(name: str, num_chunks: int) -> list[str]:
    """Return the simulated compute stream: each task, after the waits for its inputs."""
    shape = LayerShape(
        num_tokens=40,
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["intermediate_size"],
        num_experts=CASE.num_experts,
        top_k=CASE.top_k,
        ep_size=2,
    )
    predictor = Predictor(H200)
    strategy = build_strategy(name, None, recorder=Recorder(CPU), device=CPU, num_chunks=num_chunks)
    tasks = strategy.tasks(shape, predictor)
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
    x_TD, routing, grad_TD = make_tokens(case, 0)
    experts = local_experts_of(case, 0)
    with torch.no_grad():
        strategy.forward(x_TD, routing, experts)
    assert [span.name for span in recorder.collect()] == ["fused_experts"]
    strategy.forward(x_TD, routing, experts).backward(grad_TD)
    assert [span.name for span in recorder.collect()] == ["fused_experts"]
