"""Whole runs in this process and on pooled ranks: what they write, and how they go on."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halley.cli.train import read_config
from halley.core.config import RunConfig
from halley.train.data import Corpus
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SETTINGS,
    SIGMOID,
    checkpoint_of,
    losses_of,
    make_config,
    read_metrics,
    train_here,
    train_on_ranks,
    write_text,
)


def test_a_run_writes_its_config_metrics_and_checkpoints(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=5, every_steps=2)
    assert train_here(config) == [1, 2, 3, 4, 5]
    output = Path(config.output)
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoints",
        "config.json",
        "counts.json",
        "metrics.jsonl",
        "run.lock",
    ]
    folders = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000004", "step-00000005"]
    written = json.loads((output / "config.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(config)))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])  # 2 sequences of 16
        assert row["mfu"] is None  # a CPU has no peak rate
        assert 0 <= row["exposed_share"] < 1
    rates = [0.1, 0.2, 0.2, 0.2 * (0.1 + 0.9 * 0.75), 0.2 * (0.1 + 0.9 * 0.25)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)


def test_a_run_that_diverges_ends_and_keeps_its_checkpoints(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=9, every_steps=1)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e30)
    config = dataclasses.replace(config, optimizer=optimizer)
    with pytest.raises(
        RuntimeError, match=r"(loss|grad_norm) \((nan|inf)\) of step \d+ is not fini"
    ):
        train_here(config)
    last = read_metrics(config)[-1]
    assert None in (last["loss"], last["grad_norm"])
    assert not checkpoint_of(config, last["step"]).exists()
    assert checkpoint_of(config, last["step"] - 1).exists()


@pytest.mark.parametrize("num_steps", [3, 2])
def test_a_finished_run_says_so_and_keeps_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int
):
    config = make_config(write_text(tmp_path), num_steps=3)
    train_here(config)
    files = [Path(config.output, name) for name in ("config.json", "metrics.jsonl")]
    before = [file.read_text() for file in files]
    capsys.readouterr()
    shorter = dataclasses.replace(config.train, num_steps=num_steps, log_every=1)
    again = dataclasses.replace(config, train=shorter)
    assert train_here(again) == []
    assert [file.read_text() for file in files] == before
    assert capsys.readouterr().err == (
        f"run ({config.output}) is done already: it is at step 3 of train.num_steps "
        f"({num_steps}); to go on, set train.num_steps above 3\n"
    )


def test_a_run_that_is_not_to_resume_refuses_the_checkpoints_of_another(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=3)
    train_here(config)
    losses = losses_of(config)
    again = dataclasses.replace(config.checkpoint, resume=False)
    with pytest.raises(ValueError, match=r"checkpoint\.resume \(false\) .*step-00000003 is there"):
        train_here(dataclasses.replace(config, checkpoint=again))
    assert losses_of(config) == losses


@pytest.mark.parametrize(
    ("setting", "name", "saved", "num_steps"),
    [
        ("model.moe.top_k=1", "model.moe.top_k (1)", "2", 4),
        ("model.rope_theta=500.0", "model.rope_theta (500.0)", "10000.0", 3),
        ("model.moe.router.kind=sigmoid", "model.moe.router.kind ('sigmoid')", "'softmax'", 4),
        ("optimizer.kind=sgd", "optimizer.kind ('sgd')", "'adamw'", 3),
    ],
)
def test_a_run_does_not_go_on_with_another_model(
    tmp_path: Path, setting: str, name: str, saved: str, num_steps: int
):
    text, output = str(write_text(tmp_path)), str(tmp_path / "run")
    settings = [*SETTINGS, "train.num_steps=3"]
    config = read_config(None, settings, data=text, output=output)
    train_here(config)
    files = [Path(output, name) for name in ("config.json", "metrics.jsonl", "counts.json")]
    before = [file.read_text() for file in files]
    settings = [*settings, setting, f"train.num_steps={num_steps}"]
    other = read_config(None, settings, data=text, output=output)
    with pytest.raises(ValueError, match=r"must be") as caught:
        train_here(other)
    assert str(caught.value) == (
        f"{name} must be {saved}, as in checkpoint {checkpoint_of(config, 3)} from which the run "
        "would go on; with another output it starts anew"
    )
    assert [file.read_text() for file in files] == before


def test_a_run_goes_on_with_other_settings_of_its_training(tmp_path: Path):
    text, output = str(write_text(tmp_path)), str(tmp_path / "run")
    settings = [*SETTINGS, "train.num_steps=3"]
    train_here(read_config(None, settings, data=text, output=output))
    manifest = Path(output, "checkpoints", "step-00000003", "manifest.json")
    older = json.loads(manifest.read_text())
    assert older["notes"]["config"]["model"].pop("num_heads") == 4
    del older["xxh3_128"]
    manifest.write_text(json.dumps(older))  # as version 0.1 wrote it, which lacked the field
    settings += [
        "train.num_steps=5",
        "train.log_every=1",
        "train.dtype=bfloat16",
        "optimizer.learning_rate=0.02",
        "optimizer.beta2=0.99",
        "model.moe.router.balance_coefficient=0.02",
        "strategy=chunked",
        "num_chunks=2",
    ]
    other = read_config(None, settings, data=text, output=output)
    assert train_here(other) == [4, 5]
    written = json.loads(Path(output, "config.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(other)))


def test_metrics_that_a_crash_cut_short_are_written_again(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=6, every_steps=4)
    train_here(config)
    losses = losses_of(config)
    shutil.rmtree(checkpoint_of(config, 6))
    metrics = Path(config.output, "metrics.jsonl")
    metrics.write_text(metrics.read_text()[:-20])
    assert train_here(config) == [5, 6]
    assert losses_of(config) == losses


@pytest.fixture
def trained(run_ranks: RunRanks, tmp_path: Path) -> tuple[RunConfig, list[float]]:
    """Return a run of 8 steps on 4 ranks with ep_size 2, left at step 4, and all its losses."""
    config = make_config(
        write_text(tmp_path),
        model=SIGMOID,
        optimizer=ADAMW,
        ep_size=2,
        num_steps=8,
        every_steps=4,
    )
    assert run_ranks(train_on_ranks, 4, config) == [list(range(1, 9))] * 4
    losses = losses_of(config)
    shutil.rmtree(checkpoint_of(config, 8))
    return config, losses


def test_a_run_goes_on_with_another_ep_size(
    run_ranks: RunRanks, trained: tuple[RunConfig, list[float]], tmp_path: Path
):
    config, losses = trained
    go_on: list[Callable[[RunConfig], object]] = [
        lambda config: run_ranks(train_on_ranks, 4, dataclasses.replace(config, ep_size=1)),
        lambda config: run_ranks(
            train_on_ranks, 4, dataclasses.replace(config, ep_size=4, expert_tp_size=2)
        ),
        lambda config: run_ranks(train_on_ranks, 4, config),
        lambda config: train_here(
            dataclasses.replace(
                config, ep_size=0, train=dataclasses.replace(config.train, num_microbatches=4)
            )
        ),
    ]
    for index, resume in enumerate(go_on):
        output = tmp_path / f"copy{index}"
        shutil.copytree(config.output, output)
        copy = dataclasses.replace(config, output=str(output))
        resume(copy)
        got = losses_of(copy)
        assert got[:4] == losses[:4]
        assert got == pytest.approx(losses, rel=1e-6)
        if index == 2:  # the same ranks
            assert got == losses


def test_a_run_goes_on_behind_what_other_ranks_and_batches_have_read(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config(write_text(tmp_path), num_steps=3)  # of 2 sequences a rank
    run_ranks(train_on_ranks, 2, config)
    read: list[int] = []
    read_window = Corpus.read_window

    def record(corpus: Corpus, index: int) -> np.ndarray:
        read.append(index)
        return read_window(corpus, index)

    monkeypatch.setattr(Corpus, "read_window", record)
    for sizes in ({"num_steps": 5, "batch_size": 3}, {"num_steps": 6, "num_microbatches": 2}):
        train_here(dataclasses.replace(config, train=dataclasses.replace(config.train, **sizes)))
    whole = dataclasses.replace(config.train, num_steps=11)  # of 2 sequences
    goes_on, read[:] = list(read), []
    train_here(dataclasses.replace(config, train=whole, output=str(tmp_path / "whole")))
    assert len(read) == 3 * 2 * 2 + 2 * 3 + 1 * 2 * 2
    assert goes_on == read[12:]


def test_another_order_of_the_text_is_a_warning(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=2)
    train_here(config)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=8))
    longer = dataclasses.replace(config.train, num_steps=3, seed=5)
    with pytest.warns(UserWarning, match="was") as caught:
        assert train_here(dataclasses.replace(config, train=longer)) == [3]
    end = (
        " up to step 2: the order of the text changes, so this epoch repeats some of it and leaves "
        "some out"
    )
    messages = [str(warning.message) for warning in caught]
    assert messages == [f"data.seq_len (8) was 16{end}", f"train.seed (5) was 0{end}"]
