"""Runs with replicas of experts: equal losses, equal replicas, and checkpoints by expert."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from halley.core.config import RunConfig
from halley.core.placement import ExpertPlacement, read_counts, save_placements
from halley.train.step import build_run, train_step
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SIGMOID,
    SMALL,
    built,
    change_training,
    go_on_in_a_copy,
    losses_of,
    make_config,
    make_world,
    train_on_ranks,
    write_text,
)


# Placements of the two MoE layers of the small model, on two ranks and on four.
ON_TWO = [((0, 1, 3, 5, 6), (0, 2, 3, 4, 7)), ((1, 3, 5, 7), (0, 2, 4, 6))]
ON_FOUR = [((0, 1, 2), (0, 1, 3), (0, 1, 4), (5, 6, 7)), ((0, 7), (1, 6), (2, 5), (3, 4))]
NUM_STEPS = 6


def _place(config: RunConfig, layers: list, *, name: str = "placement.json") -> RunConfig:
    """Return a configuration with a placement file for each layer, written beside its text."""
    assert config.data.path is not None
    path = Path(config.data.path).with_name(name)
    save_placements(path, [ExpertPlacement(num_experts=8, experts_WL=each) for each in layers])
    return dataclasses.replace(config, placement=str(path))


def _take_steps(
    rank: int, num_ranks: int, config: RunConfig, num_steps: int = NUM_STEPS
) -> tuple[list[float], list[float], dict[tuple[str, int], list[torch.Tensor]]]:
    """Train; return losses, gradient norms, and this rank's tensors of each expert at the end.

    That is its weights, and the optimizer's moments if it has any, by parameter and expert.
    """
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        results = [train_step(run, step) for step in range(num_steps)]
        held: dict[tuple[str, int], list[torch.Tensor]] = {}
        for name, module in run.optimizer.experts.items():
            master = run.optimizer.masters[name]
            moments = run.optimizer.torch_optimizer.state[master]
            tensors = [master, *(m for m in moments.values() if m.ndim)]
            for place, expert in enumerate(module.expert_ids):
                held[name, expert] = [tensor[place].detach().clone() for tensor in tensors]
    return [r.loss for r in results], [r.grad_norm for r in results], held


def _check_equal_replicas(by_rank: list[dict[tuple[str, int], list[torch.Tensor]]]) -> int:
    """Check that ranks have the same bits of an expert; return the number of pairs of replicas."""
    num_pairs = 0
    first: dict[tuple[str, int], list[torch.Tensor]] = {}
    for held in by_rank:
        for key, tensors in held.items():
            if key in first:
                num_pairs += 1
                for mine, theirs in zip(tensors, first[key], strict=True):
                    assert torch.equal(mine, theirs), key
            first.setdefault(key, tensors)
    return num_pairs


@pytest.mark.parametrize(
    ("ep_size", "layers", "num_pairs", "changes"),
    [
        # Number of parameters times copies beyond the first, in the "ep" and in the "edp" group.
        (2, ON_TWO, 2 * (18 * 2 - 16), {"num_microbatches": 2, "activation_checkpointing": True}),
        (4, ON_FOUR, 2 * 4, {"dtype": "bfloat16"}),
    ],
    ids=["two copies, accumulated, checkpointed", "bfloat16"],
)
def test_the_curve_is_that_without_placement(
    run_ranks: RunRanks, tmp_path: Path, ep_size: int, layers: list, num_pairs: int, changes: dict
) -> None:
    text = write_text(tmp_path)
    config = make_config(text, optimizer=ADAMW, ep_size=ep_size, num_steps=NUM_STEPS, **changes)
    plain = run_ranks(_take_steps, 4, config)
    placed = run_ranks(_take_steps, 4, _place(config, layers))
    rtol = 0.01 if changes.get("dtype") == "bfloat16" else 1e-6
    for got, want in zip(placed, plain, strict=True):
        assert got[0] == pytest.approx(want[0], rel=rtol)
        assert got[1] == pytest.approx(want[1], rel=10 * rtol)
    assert plain[0][0][-1] < plain[0][0][0] - 0.1
    assert _check_equal_replicas([held for _, _, held in placed]) == num_pairs


def test_replicas_stay_equal_where_three_copies_are_summed(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """An all-reduce over three copies rounds differently at different places of its buffer."""
    config = make_config(write_text(tmp_path), ep_size=2, num_steps=4)
    apart = ((0, 1, 2, 3, 4), (3, 4, 5, 6, 7))
    placed = run_ranks(_take_steps, 6, _place(config, [apart]), 4)
    assert _check_equal_replicas([held for _, _, held in placed]) == 2 * 2 * (10 * 3 - 8)


def test_a_run_goes_on_under_another_placement(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A run resumes with the same placement, another on fewer ranks, none, and a first one."""
    text = write_text(tmp_path)
    config = make_config(text, model=SIGMOID, optimizer=ADAMW, num_steps=6, every_steps=3)
    plain = dataclasses.replace(config, output=str(tmp_path / "plain"))
    placed = _place(config, ON_FOUR)
    for each in (plain, placed):
        assert run_ranks(train_on_ranks, 4, each) == [list(range(1, 7))] * 4
        shutil.rmtree(Path(each.output, "checkpoints", "step-00000006"))
    losses = losses_of(plain)
    assert losses_of(placed) == pytest.approx(losses, rel=1e-6)

    assert go_on_in_a_copy(run_ranks, placed, placed, 4) == losses_of(placed)
    on_two = _place(config, ON_TWO, name="two.json")
    for old, new, num_ranks in (
        (placed, change_training(on_two, num_microbatches=2), 2),
        (placed, change_training(config, num_microbatches=4), 1),
        (plain, placed, 4),
    ):
        got = go_on_in_a_copy(run_ranks, old, new, num_ranks)
        assert got == pytest.approx(losses, rel=1e-6)


def test_a_checkpoint_holds_an_expert_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = _place(make_config(write_text(tmp_path), num_steps=1), ON_FOUR)
    run_ranks(train_on_ranks, 4, config)
    path = Path(config.output, "checkpoints", "step-00000001")
    metadata = FileSystemReader(path).read_metadata()
    for layer in (0, 1):
        name = f"parameters.layers.{layer}.mlp.experts.down_proj"
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        assert stored.size == (8, 16, 8)
        assert sorted(chunk.offsets[0] for chunk in stored.chunks) == list(range(8))
        assert sum(index.fqn == name for index in metadata.storage_data) == 8


def test_counts_of_a_run_are_written_with_its_checkpoints(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = make_config(write_text(tmp_path), num_steps=5, every_steps=3, num_microbatches=2)
    run_ranks(train_on_ranks, 2, config)
    path = Path(config.output, "counts.json")
    table = json.loads(path.read_text())
    assert (table["first_step"], table["last_step"]) == (4, 5)
    # 2 steps and ranks, microbatches, sequences of 16 tokens, 2 experts each, in both layers
    assert [sum(counts) for counts in read_counts(path)] == [2 * 2 * 2 * 2 * 16 * 2] * 2


def test_a_placement_for_other_sizes_is_named(tmp_path: Path) -> None:
    config = make_config(write_text(tmp_path))
    with pytest.raises(ValueError, match=r"json\) must be for ep_size 1 and is for 2 ranks"):
        build_run(_place(config, ON_TWO), make_world())
    dense = dataclasses.replace(SMALL, num_dense_layers=1, dense_intermediate_size=8)
    with pytest.raises(ValueError, match=r"json\) must have 1 layers, the model's MoE layers"):
        build_run(_place(dataclasses.replace(config, model=dense), ON_TWO), make_world())
