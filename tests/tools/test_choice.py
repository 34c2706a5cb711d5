"""The choice of "auto" for a layer is equal on all ranks; buffer sizes by hand."""

import dataclasses

import torch

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.buffer_cache import Workspaces
from halley.strategies.registry import build_strategy
from halley.tools.choice import FusedBuffers, LayerChoice, choose_strategy, measure_buffers
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks


CASE = LayerCase(model=find_model("tiny"), num_tokens=64, dtype=torch.float32)


def _choose(rank: int, num_ranks: int) -> LayerChoice:
    groups = build_groups(0, device_type="cpu")
    choice = choose_strategy(CASE, groups=groups, device=CPU)
    destroy(groups)
    return choice


def test_choice_on_two_ranks(run_ranks: RunRanks) -> None:
    """On a CPU fused is excluded with a reason: the interpreter would run it for minutes."""
    choice, other = run_ranks(_choose, 2)
    assert choice == other
    assert (choice.model, choice.num_tokens, choice.num_ranks) == ("tiny", 64, 2)
    assert choice.dtype == "float32"
    assert choice.access_problem == ""
    assert list(choice.times_us) == ["sequential", "chunked"]
    assert choice.strategy == min(choice.times_us, key=lambda name: choice.times_us[name])
    assert f"{choice.strategy} is fastest of sequential " in choice.reason
    assert choice.reason.endswith("; not fused: its kernels are interpreted on a CPU")
    assert (choice.buffers, choice.memory) == (None, {})
    assert choice.no_buffers == "its kernels are interpreted on a CPU"


def _measure_buffers(rank: int, num_ranks: int) -> FusedBuffers:
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
    got = dataclasses.asdict(buffers)
    assert 0 < got.pop("plan_mib") < 1
    assert got == {
        "routing_mib": routing / 2**20,
        "send_mib": send / 2**20,
        "combine_mib": combine / 2**20,
        "weight_grads_mib": weight_grads / 2**20,
        "symm_mib": (routing + send + combine + weight_grads) / 2**20,
        "rows_mib": rows / 2**20,
    }


def test_progress_names_each_run_of_a_candidate() -> None:
    """A large layer runs for minutes; the user must see which strategy runs."""
    calls: list[tuple[str, int, int]] = []
    groups = ParallelGroups()
    choice = choose_strategy(
        CASE, groups=groups, device=CPU, on_progress=lambda *words: calls.append(words)
    )
    assert calls[:3] == [
        ("drawing the weights of tiny", 0, 9),
        ("running strategy sequential", 0, 9),
        ("running strategy chunked", 1, 9),
    ]
    assert calls[-1] == (f"running strategy {choice.strategy}", 8, 9)
