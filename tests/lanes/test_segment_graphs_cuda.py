"""Steps whose segments are CUDA graphs have the bits of steps without: over NCCL.

pytest tests/lanes/test_segment_graphs_cuda.py
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from halley.distributed.mesh import build_groups
from halley.lanes import compile_step
from halley.lanes.executor import can_capture
from tests.compiler.model_case import fresh_graphs
from tests.gpus import NUM_GPUS, device_of, needs_gpu
from tests.lanes.lane_case import build_gpt2, is_equal, make_batch, take_result
from tests.rank_pool import RunRanks


pytestmark = needs_gpu

NUM_MEASURED = 3  # steps one after another, before the plan


def _run_steps(rank: int, num_ranks: int) -> dict[str, Any]:
    device = device_of(rank)
    groups = build_groups(num_ranks, device_type="cuda")
    groups = replace(groups, ep=dist.new_group(backend="nccl"))
    model = build_gpt2("switch", groups, num_layers=4).to(device)
    batch = [each.to(device) for each in make_batch(rank, batch_size=4)]
    other = [each.to(device) for each in make_batch(rank + 7, batch_size=4)]
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        run = lambda batch: take_result(step(*batch), model)  # noqa: E731
        before = [run(batch), run(other), run(batch)]
        assert step.plan is not None
        captured = [run(each) for each in (batch, other, batch)]
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
    }


def test_captured_segments_have_the_bits_of_eager_ones(run_ranks: RunRanks) -> None:
    for found in run_ranks(_run_steps, min(NUM_GPUS, 2), timeout_s=240.0):
        assert found["captured"] == [True] * NUM_MEASURED
        assert found["moved"] == [True, True]
        assert found["changed"]
        assert found["num_captured"] > 10
