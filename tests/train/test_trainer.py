"""Whole training runs: files that they write, resuming, and ends by damage and signals."""

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from halley.cli.main import main
from halley.core.config import RunConfig
from halley.train import trainer as loop
from halley.train.data import Corpus
from halley.train.trainer import train
from tests.damage import flip_bytes, hash_tree
from tests.hostile.cases import fill, read_cases
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SIGMOID,
    change_manifest,
    change_training,
    checkpoint_of,
    command_line,
    go_on_in_a_copy,
    losses_of,
    make_config,
    make_world,
    read_metrics,
    read_settings,
    train_here,
    train_on_ranks,
    truncate,
    write_text,
)
from tests.train.tokenizer_case import DOCUMENTS, write_documents, write_tokenizer


def test_a_run_writes_its_config_metrics_and_checkpoints(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=5, every_steps=2)
    assert train_here(config) == [1, 2, 3, 4, 5]
    output = Path(config.output)
    files = sorted(path.name for path in output.iterdir())
    assert files == ["checkpoints", "config.json", "counts.json", "metrics.jsonl", "run.lock"]
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
    assert train_here(change_training(config, num_steps=num_steps, log_every=1)) == []
    assert [file.read_text() for file in files] == before
    assert capsys.readouterr().err == (
        f"run ({config.output}) is done already: it is at step 3 of train.num_steps "
        f"({num_steps}); to go on, set train.num_steps above 3\n"
    )


@pytest.mark.parametrize(("setting", "num_steps", "message"), read_cases("resumes"))
def test_a_run_does_not_go_on_with_another_model(
    tmp_path: Path, setting: str, num_steps: int, message: str
):
    config = read_settings(tmp_path, "train.num_steps=3")
    train_here(config)
    files = [Path(config.output, name) for name in ("config.json", "metrics.jsonl", "counts.json")]
    before = [file.read_text() for file in files]
    with pytest.raises(ValueError, match=r"must") as caught:
        train_here(read_settings(tmp_path, setting, f"train.num_steps={num_steps}"))
    assert str(caught.value) == fill(message, {"path": str(checkpoint_of(config, 3))})
    assert [file.read_text() for file in files] == before


def test_a_run_does_not_go_on_with_another_text_or_tokenizer(tmp_path: Path):
    text = write_documents(tmp_path / "text", ".jsonl", [*DOCUMENTS] * 20)
    config = make_config(text, num_steps=2)
    tokenizer = write_tokenizer(tmp_path)
    data = dataclasses.replace(config.data, tokenizer=str(tokenizer))
    config = dataclasses.replace(config, data=data)
    train_here(config)
    longer = change_training(config, num_steps=3)
    end = (
        f"of checkpoint {checkpoint_of(config, 2)} from which the run would go on; with another "
        "output it starts anew"
    )
    as_bytes = dataclasses.replace(longer, data=dataclasses.replace(data, tokenizer=""))
    with pytest.raises(ValueError, match="tokenizer") as caught:
        train_here(as_bytes)
    assert str(caught.value) == f"data.path ('{text}') must give the tokenizer {end}"
    other = write_tokenizer(tmp_path / "text", vocabulary={"<unk>": 0, "a": 1})
    renamed = dataclasses.replace(longer, data=dataclasses.replace(data, tokenizer=str(other)))
    with pytest.raises(ValueError, match="tokenizer") as caught:
        train_here(renamed)
    assert str(caught.value) == f"data.tokenizer ('{other}') must give the tokenizer {end}"
    write_documents(tmp_path / "text", ".jsonl", [*DOCUMENTS[1:]] * 20)
    with pytest.raises(ValueError, match="text") as caught:
        train_here(longer)
    assert str(caught.value) == f"data.path ('{text}') must give the text {end}"
    moved = write_documents(tmp_path / "moved", ".jsonl", [*DOCUMENTS] * 20)
    elsewhere = dataclasses.replace(longer, data=dataclasses.replace(data, path=str(moved)))
    assert train_here(elsewhere) == [3]


def test_a_run_goes_on_from_text_to_its_tokens_with_the_same_batches(tmp_path: Path):
    text = write_documents(tmp_path / "text", ".txt", [*DOCUMENTS] * 20)
    tokenizer = write_tokenizer(tmp_path)
    config = make_config(text, num_steps=6, every_steps=3)
    data = dataclasses.replace(config.data, tokenizer=str(tokenizer))
    config = dataclasses.replace(config, data=data)
    train_here(config)
    losses = losses_of(config)
    shutil.rmtree(checkpoint_of(config, 6))
    tokens = tmp_path / "tokens"
    assert main(["tokenize", str(text), str(tokens), "--tokenizer", str(tokenizer)]) == 0
    data = dataclasses.replace(data, path=str(tokens), tokenizer="")
    assert train_here(dataclasses.replace(config, data=data)) == [4, 5, 6]
    assert losses_of(config) == losses


def test_a_run_goes_on_with_other_settings_of_its_training(tmp_path: Path):
    config = read_settings(tmp_path, "train.num_steps=3")
    train_here(config)
    manifest = checkpoint_of(config, 3) / "manifest.json"
    older = json.loads(manifest.read_text())
    assert older["notes"]["config"]["model"].pop("num_heads") == 4
    del older["xxh3_128"]
    manifest.write_text(json.dumps(older))  # as Halley 0.1 wrote it, without num_heads
    other = read_settings(
        tmp_path,
        *("train.num_steps=5", "train.log_every=1", "train.dtype=bfloat16"),
        *("optimizer.learning_rate=0.02", "optimizer.beta2=0.99"),
        *("model.moe.router.balance_coefficient=0.02", "strategy=chunked", "num_chunks=2"),
    )
    assert train_here(other) == [4, 5]
    written = json.loads(Path(config.output, "config.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(other)))


def test_a_run_goes_on_with_another_ep_size(run_ranks: RunRanks, tmp_path: Path):
    text = write_text(tmp_path)
    config = make_config(
        text, model=SIGMOID, optimizer=ADAMW, ep_size=2, num_steps=8, every_steps=4
    )
    assert run_ranks(train_on_ranks, 4, config) == [list(range(1, 9))] * 4
    losses = losses_of(config)
    shutil.rmtree(checkpoint_of(config, 8))
    assert go_on_in_a_copy(run_ranks, config, config, 4) == losses
    alone = dataclasses.replace(change_training(config, num_microbatches=4), ep_size=0)
    for new, num_ranks in (
        (dataclasses.replace(config, ep_size=1), 4),
        (dataclasses.replace(config, ep_size=4, expert_tp_size=2), 4),
        (alone, 1),
    ):
        got = go_on_in_a_copy(run_ranks, config, new, num_ranks)
        assert got[:4] == losses[:4]
        assert got == pytest.approx(losses, rel=1e-6)


def test_a_run_goes_on_behind_what_other_ranks_and_batches_have_read(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config(write_text(tmp_path), num_steps=3)  # 2 sequences on each rank
    run_ranks(train_on_ranks, 2, config)
    read: list[int] = []
    read_window = Corpus.read_window

    def record(corpus: Corpus, index: int) -> np.ndarray:
        read.append(index)
        return read_window(corpus, index)

    monkeypatch.setattr(Corpus, "read_window", record)
    for sizes in ({"num_steps": 5, "batch_size": 3}, {"num_steps": 6, "num_microbatches": 2}):
        train_here(change_training(config, **sizes))
    whole = change_training(config, num_steps=11)  # steps of 2 sequences
    goes_on, read[:] = list(read), []
    train_here(dataclasses.replace(whole, output=str(tmp_path / "whole")))
    assert len(read) == 3 * 2 * 2 + 2 * 3 + 1 * 2 * 2
    assert goes_on == read[12:]


def test_another_order_of_the_text_is_a_warning(tmp_path: Path):
    config = make_config(write_text(tmp_path), num_steps=2)
    train_here(config)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=8))
    with pytest.warns(UserWarning, match="was") as caught:
        assert train_here(change_training(config, num_steps=3, seed=5)) == [3]
    end = (
        " up to step 2: the order of the text changes, so this epoch repeats some of it and leaves "
        "some out"
    )
    messages = [str(warning.message) for warning in caught]
    assert messages == [f"data.seq_len (8) was 16{end}", f"train.seed (5) was 0{end}"]


@pytest.mark.filterwarnings("default")
def test_damaged_checkpoints_are_one_line_for_the_user_and_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = read_settings(tmp_path, "train.num_steps=9")
    argv = command_line(config)
    assert main([*argv, "--nproc=1"]) == 0
    losses = losses_of(config)
    checkpoint_of(config, 9).joinpath("manifest.json").unlink()
    num_bytes = truncate(checkpoint_of(config, 6))
    damaged = [hash_tree(checkpoint_of(config, step)) for step in (6, 9)]
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
    kept = [folder / f"step-0000000{step}.replaced-1" for step in (6, 9)]
    assert [hash_tree(path) for path in kept] == damaged
    discarded = Path(config.output, "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded] == [4, 5, 6, 7, 8, 9]


def test_a_run_whose_checkpoints_are_all_damaged_ends_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = read_settings(tmp_path, "train.num_steps=6")
    output = config.output
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


def _first_error(rank: int, num_ranks: int, config: RunConfig) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        loop.train(config, make_world(rank, num_ranks), on_step=lambda step: None)
    return str(caught.value)


@pytest.mark.parametrize("wandb", [False, True])
def test_all_ranks_raise_the_error_of_a_file_that_rank_zero_opens(
    run_ranks: RunRanks, tmp_path: Path, wandb: bool
):
    """Otherwise the other ranks would start a step, and wait for rank 0."""
    if wandb:
        pytest.importorskip("wandb")
    config = make_config(write_text(tmp_path), wandb=wandb)
    name = "wandb/halley-run-id" if wandb else "metrics.jsonl"
    path = Path(config.output, name)
    path.mkdir(parents=True)
    error = f"run id ({path}) must be" if wandb else f"[Errno 21] Is a directory: '{path}'"
    messages = run_ranks(_first_error, 2, config)
    assert messages[0] == messages[1]
    assert messages[0].startswith(error)


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


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_sequences", "8", "num_sequences ('8') of checkpoint {} must be at least 0"),
        ("config", [1], "config of checkpoint {} must be a table"),
    ],
)
def test_notes_of_a_wrong_type_are_an_error(tmp_path: Path, name: str, value: object, rule: str):
    config = make_config(write_text(tmp_path), num_steps=2)
    train_here(config)
    path = checkpoint_of(config, 2)
    notes = json.loads((path / "manifest.json").read_text())["notes"]
    change_manifest(path, notes={**notes, name: value})
    with pytest.raises(ValueError, match=f"^{re.escape(rule.format(path))}$"):
        train_here(config)
