"""Runs whose checkpoints are damaged, that are told to end, or that begin anew."""

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from halley.cli.main import main
from halley.cli.train import read_config
from halley.train.trainer import train
from tests.damage import flip_bytes, hash_tree
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SETTINGS,
    checkpoint_of,
    command_line,
    losses_of,
    make_config,
    make_world,
    train_here,
    train_on_ranks,
    truncate,
    write_text,
)


@pytest.mark.filterwarnings("default")
def test_damaged_checkpoints_are_one_line_for_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, output = str(write_text(tmp_path)), str(tmp_path / "run")
    config = read_config(None, [*SETTINGS, "train.num_steps=9"], data=text, output=output)
    argv = command_line(config)
    assert main([*argv, "--nproc=1"]) == 0
    losses = losses_of(config)
    checkpoint_of(config, 9).joinpath("manifest.json").unlink()
    num_bytes = truncate(checkpoint_of(config, 6))
    capsys.readouterr()
    assert main([*argv, "--nproc=1"]) == 0
    assert losses_of(config) == losses
    lines = capsys.readouterr().err.splitlines()
    folder = tmp_path / "run" / "checkpoints"
    assert lines[0] == (
        f"halley: warning: checkpoint {folder}/step-00000009 is damaged: manifest.json is "
        f"missing; checkpoint {folder}/step-00000006 is damaged: __0_0.distcp has {num_bytes} "
        f"bytes instead of {num_bytes + 1}: the run goes on from {folder}/step-00000003, the "
        "newest complete checkpoint"
    )
    assert lines[1].endswith(", resumed after step 3")


def test_damaged_checkpoints_stay_when_the_run_reaches_their_step_again(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=9, every_steps=3, optimizer=ADAMW)
    train_here(config)
    losses = losses_of(config)
    truncate(checkpoint_of(config, 9))
    damaged = hash_tree(checkpoint_of(config, 9))
    with pytest.warns(UserWarning, match=r"step-00000009 is damaged: __0_0\.distcp has"):
        assert train_here(config) == [7, 8, 9]
    assert losses_of(config) == losses
    assert hash_tree(checkpoint_of(config, 9).with_name("step-00000009.replaced-1")) == damaged
    discarded = Path(config.output, "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded] == [7, 8, 9]


def test_a_run_whose_checkpoints_are_all_damaged_ends_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, output = str(write_text(tmp_path)), str(tmp_path / "run")
    config = read_config(None, [*SETTINGS, "train.num_steps=6"], data=text, output=output)
    argv = [*command_line(config), "--nproc=1"]
    assert main(argv) == 0
    losses = losses_of(config)
    flip_bytes(checkpoint_of(config, 3) / "__0_0.distcp", num_bytes=4000)
    (checkpoint_of(config, 6) / ".metadata").unlink()
    before = hash_tree(Path(output), leave_out={"run.lock"})
    capsys.readouterr()
    assert main(argv) == 2
    folder = tmp_path / "run" / "checkpoints"
    assert capsys.readouterr().err == (
        f"halley: error: checkpoint {folder}/step-00000006 is damaged: .metadata is missing; "
        f"checkpoint {folder}/step-00000003 is damaged: __0_0.distcp is damaged: its checksum is "
        f"not that of manifest.json; {folder} must hold a complete checkpoint: put back an intact "
        "copy, or start at step 0 with halley train --restart, which keeps these files\n"
    )
    assert hash_tree(Path(output), leave_out={"run.lock"}) == before
    assert main([*argv, "--restart"]) == 0
    assert losses_of(config) == losses
    assert hash_tree(Path(output, "previous-1")) == before


def test_a_launcher_that_repeats_the_command_restarts_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config(write_text(tmp_path), num_steps=4, every_steps=2)
    train_here(config)
    shutil.rmtree(checkpoint_of(config, 4))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    steps: list[int] = []
    train(config, make_world(), on_step=steps.append, restart=True)
    assert steps == [3, 4]
    assert not Path(config.output, "previous-1").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(tmp_path: Path, number: int):
    whole = make_config(write_text(tmp_path), num_steps=5)
    train_here(whole)
    config = dataclasses.replace(whole, output=str(tmp_path / "stopped"))

    def on_step(step: int) -> None:
        if step == 3:
            signal.raise_signal(number)

    outcome = train(config, make_world(), on_step=on_step)
    assert (outcome.stop_signal, outcome.metrics["step"]) == (number, 3)
    assert checkpoint_of(config, 3).exists()
    assert train_here(config) == [4, 5]
    assert losses_of(config) == losses_of(whole)


def test_a_signal_to_one_rank_ends_all_after_the_same_step(run_ranks: RunRanks, tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=5)
    assert run_ranks(train_on_ranks, 2, config, (1, 2)) == [[1, 2]] * 2
    assert checkpoint_of(config, 2).exists()


def test_a_checkpoint_is_written_once_the_minutes_have_passed(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=4)
    every = dataclasses.replace(config.checkpoint, every_minutes=1e-9)
    train_here(dataclasses.replace(config, checkpoint=every))
    folders = sorted(path.name for path in checkpoint_of(config, 1).parent.iterdir())
    assert folders == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_notes_of_a_wrong_type_are_an_error(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=2)
    train_here(config)
    manifest = checkpoint_of(config, 2) / "manifest.json"
    for name, value, rule in (
        ("num_sequences", "8", "num_sequences ('8') of checkpoint {} must be at least 0"),
        ("config", [1], "config of checkpoint {} must be a table"),
    ):
        table = json.loads(manifest.read_text())
        del table["xxh3_128"]
        text = json.dumps({**table, "notes": {**table["notes"], name: value}})
        shutil.copytree(config.output, tmp_path / name)
        copy = dataclasses.replace(config, output=str(tmp_path / name))
        (checkpoint_of(copy, 2) / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=f"^{re.escape(rule.format(checkpoint_of(copy, 2)))}$"):
            train_here(copy)
