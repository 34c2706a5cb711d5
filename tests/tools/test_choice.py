"""Sizes of the buffers of fused by hand; test_doctor.py has the choice of "auto" on two ranks."""

import torch

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import build_groups
from halley.fused.buffer_cache import Workspaces
from halley.strategies.registry import build_strategy
from halley.tools.choice import measure_buffers
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks


CASE = LayerCase(model=find_model("tiny"), num_tokens=64, dtype=torch.float32)


def _measure_buffers(rank: int, num_ranks: int) -> dict[str, float]:
    groups = build_groups(0, device_type="cpu")
    workspaces = Workspaces(groups.ep, CPU)
    strategy = build_strategy(
        "fused", groups.ep, recorder=Recorder(CPU, enabled=False), device=CPU,
        workspaces=workspaces,
    )  # fmt: skip
    outputs_of(strategy, make_tensors(CASE, groups, device=CPU), backward=False)
    (buffers,) = [measure_buffers(each) for each in workspaces.all()]
    workspaces.close()
    destroy(groups)
    return buffers


def test_buffers_of_fused_on_two_ranks(run_ranks: RunRanks) -> None:
    """Tiny: 128 floats a token, 8 experts on 2 ranks, 2 experts a token; 32 tokens are a block."""
    buffers, other = run_ranks(_measure_buffers, 2)
    assert buffers == other
    # In words: header, 10 columns of 2 blocks padded to 32, packed, weights.
    record = 16 + 32 + 128 + 128
    routing = 4 * (16 + 2 * 64 + 16 + 16 + 16 + 2 * 2 * record)
    send, combine, weight_grads = 2 * 64 * 128 * 4, 2 * 64 * 128 * 4, 2 * 64 * 2 * 4
    rows = (128 * 5 // 4 + 4 * 16) * 128 * 4
    assert 0 < buffers.pop("plan_mib") < 1
    assert buffers == {
        "routing_mib": routing / 2**20,
        "send_mib": send / 2**20,
        "combine_mib": combine / 2**20,
        "weight_grads_mib": weight_grads / 2**20,
        "symm_mib": (routing + send + combine + weight_grads) / 2**20,
        "rows_mib": rows / 2**20,
    }
