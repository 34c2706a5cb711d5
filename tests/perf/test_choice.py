"""What auto makes of a layer: the same on all ranks, with buffers as worked out by hand."""

import dataclasses

import pytest
import torch

from halley.core.models import find_model
from halley.moe.parallel import ParallelGroups, build_groups
from halley.perf.choice import FusedBuffers, LayerChoice, choose_strategy
from halley.perf.layer_case import LayerCase
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks


CASE = LayerCase(model=find_model("tiny"), num_tokens=64, dtype=torch.float32)
FAR = "ranks 0 and 1 are on different hosts, a and b"


def _choose(rank: int, num_ranks: int) -> LayerChoice:
    groups = build_groups(0, device_type="cpu")
    choice = choose_strategy(CASE, groups=groups, device=CPU)
    destroy(groups)
    return choice


def test_choice_on_two_ranks(run_ranks: RunRanks) -> None:
    """Tiny: 128 floats a token, 8 experts on 2 ranks, 2 experts a token; 32 tokens are a block."""
    choice, other = run_ranks(_choose, 2)
    assert choice == other
    assert (choice.model, choice.num_tokens, choice.num_ranks) == ("tiny", 64, 2)
    assert choice.dtype == "float32"
    assert choice.access_problem == ""
    assert list(choice.times_us) == ["sequential", "chunked", "fused"]
    assert choice.strategy == min(choice.times_us, key=lambda name: choice.times_us[name])
    assert f"{choice.strategy} is fastest of sequential " in choice.reason
    # In words: header, 10 columns of 2 blocks padded to 32, packed, weights.
    record = 16 + 32 + 128 + 128
    mailbox = 4 * (16 + 2 * 64 + 16 + 16 + 16 + 2 * 2 * record)
    stages, home, weights_home = 2 * 64 * 128 * 4, 2 * 64 * 128 * 4, 2 * 64 * 2 * 4
    rows = (128 * 5 // 4 + 4 * 16) * 128 * 4
    assert choice.buffers is not None
    got = dataclasses.asdict(choice.buffers)
    assert 0 < got.pop("plan_mib") < 1
    assert got == {
        "mailbox_mib": mailbox / 2**20,
        "stage_mib": stages / 2**20,
        "home_mib": home / 2**20,
        "weights_home_mib": weights_home / 2**20,
        "symm_mib": (mailbox + stages + home + weights_home) / 2**20,
        "rows_mib": rows / 2**20,
    }


def test_ranks_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("halley.strategies.auto", "halley.perf.choice"):
        monkeypatch.setattr(f"{module}.peer_access", lambda group, device: FAR)
    choice = choose_strategy(CASE, groups=ParallelGroups(), device=CPU)
    assert (choice.strategy, choice.access_problem, choice.buffers) == ("chunked", FAR, None)
    assert choice.times_us == {}
    assert choice.reason.endswith(f"as the fused kernels cannot run here: {FAR}")


def test_biases_that_are_left_out_are_told() -> None:
    moe = dataclasses.replace(CASE.model.moe, expert_bias=True)
    case = dataclasses.replace(CASE, model=dataclasses.replace(CASE.model, moe=moe), num_tokens=4)
    choice = choose_strategy(case, groups=ParallelGroups(), device=CPU)
    assert choice.reason.endswith("without the experts' biases, with which fused cannot run")
    assert isinstance(choice.buffers, FusedBuffers)
