"""What users do with a model of transformers whose experts Halley runs: train, save, compile."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import halley.integrations.transformers as halley_hf
from halley.integrations.transformers.seams import find_seams
from tests.integrations.hf_case import (
    Mesh,
    Wanted,
    compare_step,
    load_spread,
    make_tokens,
    unregistered,
    write_case,
)
from tests.rank_pool import RunRanks


MESH = Mesh(ep_size=2, fsdp_size=2)
TOLERANCE = 1e-5


def _save(rank: int, num_ranks: int, folder: Path, output: Path) -> None:
    with unregistered():
        model = load_spread(folder, MESH, strategy="sequential")
        if find_seams().name != "experts_function":
            model.save_pretrained(output)
            return
        everyone: Any = dist.group.WORLD
        state = halley_hf.full_state_dict(model, everyone)
        if rank == 0:
            model.save_pretrained(output, state_dict=state)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_saved_files_have_the_keys_and_values_that_were_loaded(
    family: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    write_case(family, tmp_path / "whole")
    run_ranks(_save, 2, tmp_path / "whole", tmp_path / "saved")
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(saved[name], tensor), name
    assert "halley" not in (tmp_path / "saved" / "config.json").read_text()


def _checkpointed(rank: int, num_ranks: int, folder: Path, wanted: Wanted, strategy: str) -> None:
    with unregistered():
        model = load_spread(folder, MESH, strategy=strategy)
        # 5.23 has another name for it, and warns of the old one.
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")()
        model.train()
        assert getattr(model, f"is_{word}_checkpointing")
        compare_step(model, wanted, MESH, tolerance=TOLERANCE)


@pytest.mark.parametrize("strategy", ["sequential", "fused"])
def test_gradient_checkpointing_changes_nothing(
    strategy: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    wanted = write_case("qwen3_moe", tmp_path)
    run_ranks(_checkpointed, 2, tmp_path, wanted, strategy)


def _compiled(rank: int, num_ranks: int, folder: Path, wanted: Wanted) -> None:
    with unregistered():
        model = load_spread(folder, MESH, strategy="sequential")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch cannot trace in FSDP2 and transformers
            model.compile(backend="aot_eager")
            compare_step(model, wanted, MESH, tolerance=TOLERANCE)
        torch.compiler.reset()


def test_compiled_model_gives_the_same(tmp_path: Path, run_ranks: RunRanks) -> None:
    wanted = write_case("mixtral", tmp_path, num_hidden_layers=1)
    run_ranks(_compiled, 2, tmp_path, wanted)


def _train(rank: int, num_ranks: int, folder: Path, output: Path) -> list[float]:
    """Train three steps by transformers' own Trainer; return the losses."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE="2"
    )
    with unregistered():
        model = load_spread(folder, MESH, strategy="sequential")
        examples = [{"input_ids": row, "labels": row} for row in make_tokens()]
        arguments = transformers.TrainingArguments(
            output_dir=str(output),
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=1,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_trains(tmp_path: Path, run_ranks: RunRanks) -> None:
    write_case("qwen3_moe", tmp_path / "model")
    losses = run_ranks(_train, 2, tmp_path / "model", tmp_path / "output")
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
