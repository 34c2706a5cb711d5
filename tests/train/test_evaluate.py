"""The evaluation loss equals the loss of the same tokens, on any number of ranks and by passes."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from halley.core.config import RunConfig
from halley.moe.dense import next_token_loss
from halley.train.evaluate import evaluate
from halley.train.step import train_step
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    SMALL,
    built,
    change_training,
    checkpoint_of,
    losses_of,
    make_config,
    read_metrics,
    train_here,
    train_on_ranks,
    write_text,
)


WINDOW = 17  # sequences of 16 tokens


def _config(folder: Path, *, num_windows: int = 9, **data: int) -> RunConfig:
    """Return a small run that evaluates on a text of ``num_windows`` windows and 3 more bytes."""
    text = write_text(folder)
    held_out = folder / "held_out.txt"
    held_out.write_bytes(text.read_bytes()[::-1][: num_windows * WINDOW + 3])
    config = make_config(text)
    data_config = dataclasses.replace(config.data, eval_path=str(held_out), **data)
    return dataclasses.replace(config, data=data_config)


def _evaluate(rank: int, num_ranks: int, config: RunConfig) -> float:
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        return evaluate(run)


@pytest.mark.parametrize(
    ("num_windows", "eval_batches", "num_used"),
    [(9, 3, 6), (9, 16, 8), (1, 16, 1)],  # of batches of 2 windows, except the last case
)
def test_the_loss_is_the_mean_over_the_first_windows(
    tmp_path: Path, num_windows: int, eval_batches: int, num_used: int
) -> None:
    config = _config(tmp_path, num_windows=num_windows, eval_batches=eval_batches)
    text = torch.tensor(list(Path(config.data.eval_path).read_bytes()))
    windows = text[: num_used * WINDOW].reshape(num_used, WINDOW)
    with built(config, rank=0, num_ranks=1) as run:
        train_step(run, 0)
        got = evaluate(run)
        assert got == evaluate(run)
        with torch.no_grad():
            want = next_token_loss(run.model(windows[:, :-1]).logits_BSV, windows[:, 1:])
        assert got == pytest.approx(want.item(), rel=1e-6)
        assert len(run.recorder.collect()) > 0  # only the spans of the training step
        evaluate(run)
        assert run.recorder.collect() == []


def test_two_ranks_have_the_loss_of_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Eight windows are four batches of one rank and two batches of two ranks."""
    config = _config(tmp_path)
    alone = _evaluate(0, 1, config)
    assert run_ranks(_evaluate, 2, config) == [pytest.approx(alone, rel=1e-6)] * 2


def _build_with_own_text(rank: int, num_ranks: int, config: RunConfig, key: str) -> str:
    data = dataclasses.replace(config.data, **{key: f"{getattr(config.data, key)}.{rank}"})
    config = dataclasses.replace(config, data=data)
    with (
        pytest.raises(ValueError, match="must be the same") as caught,
        built(config, rank=rank, num_ranks=num_ranks),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_ranks_with_different_text_are_named(run_ranks: RunRanks, tmp_path: Path, key: str) -> None:
    """With an incomplete copy, rank 1 would draw other windows, or wait in an evaluation."""
    config = _config(tmp_path)
    path = Path(getattr(config.data, key))
    sizes = [path.stat().st_size, path.stat().st_size - 40]
    for rank, size in enumerate(sizes):
        path.with_name(f"{path.name}.{rank}").write_bytes(path.read_bytes()[:size])
    first, second = run_ranks(_build_with_own_text, 2, config, key)
    assert first == second
    rule = rf"tokens of data\.{key} \({sizes[0]}, checksum \w+ on rank 0, {sizes[1]}, checksum"
    assert re.match(rf"{rule} \w+ on rank 1\) must be the same on all ranks", first)


def test_a_run_reports_the_loss_every_few_steps_and_at_its_end(tmp_path: Path) -> None:
    config = change_training(_config(tmp_path, eval_every=2), num_steps=5)
    train_here(config)
    rows = read_metrics(config)
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5]
    assert all(0.0 < row["eval_loss"] < 6.0 for row in rows if "eval_loss" in row)
    without = dataclasses.replace(config.data, eval_path="")
    plain = dataclasses.replace(config, data=without, output=str(tmp_path / "plain"))
    train_here(plain)
    assert losses_of(plain) == losses_of(config)  # an evaluation changes no training step
    assert not any("eval_loss" in row for row in read_metrics(plain))


def test_passes_and_microbatches_change_no_evaluation(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A compiled step of two microbatches, then the eager evaluation, on two ranks."""
    config = _config(tmp_path, eval_every=1)
    config = dataclasses.replace(
        config, strategy="functional", model=dataclasses.replace(SMALL, num_layers=1)
    )
    config = change_training(config, num_steps=2, num_microbatches=2)
    found: list[list[float]] = []
    for passes in ("none", "wgrad"):
        run = dataclasses.replace(config, passes=passes, output=str(tmp_path / passes))
        run_ranks(train_on_ranks, 2, run, timeout_s=120.0)
        found.append([row["eval_loss"] for row in read_metrics(run)])
        assert checkpoint_of(run, 2).exists()
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-6)
