"""Saving, activation checkpointing, torch.compile and Trainer work with Halley's experts."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import halley.integrations.transformers as halley_transformers
from halley.integrations.transformers.registration import find_extension_point
from tests.integrations.transformers_case import (
    Expected,
    Mesh,
    compare_step,
    disabled_afterwards,
    find_moe_block,
    load_sharded,
    make_tokens,
    save_model,
)
from tests.rank_pool import RunRanks


MESH = Mesh(ep_size=2, fsdp_size=2)
TOLERANCE = 1e-5


def _save(rank: int, num_ranks: int, folder: Path, output: Path) -> None:
    with disabled_afterwards():
        model = load_sharded(folder, MESH, strategy="sequential")
        if find_extension_point().kind != "experts_function":
            model.save_pretrained(output)
            return
        state = halley_transformers.full_state_dict(model)
        if rank == 0:
            model.save_pretrained(output, state_dict=state)


def test_saved_files_equal_loaded_files(tmp_path: Path, run_ranks: RunRanks) -> None:
    save_model("mixtral", tmp_path / "loaded", num_hidden_layers=1)
    run_ranks(_save, 2, tmp_path / "loaded", tmp_path / "saved")
    expected = load_file(tmp_path / "loaded" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
    assert "halley" not in (tmp_path / "saved" / "config.json").read_text()


def _checkpointed(
    rank: int, num_ranks: int, folder: Path, expected: Expected, strategy: str
) -> None:
    with disabled_afterwards():
        model = load_sharded(folder, MESH, strategy=strategy)
        # Transformers 5.23 renamed this method, and warns if the old name is called.
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")()
        model.train()
        assert getattr(model, f"is_{word}_checkpointing")
        compare_step(model, expected, MESH, tolerance=TOLERANCE)


@pytest.mark.parametrize("strategy", ["sequential", "fused"])
def test_activation_checkpointing_keeps_values(
    strategy: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    expected = save_model("qwen3_moe", tmp_path, num_hidden_layers=1)
    run_ranks(_checkpointed, 2, tmp_path, expected, strategy)


def _compiled(rank: int, num_ranks: int, folder: Path, expected: Expected) -> None:
    with disabled_afterwards():
        model = load_sharded(folder, MESH, strategy="sequential")
        find_moe_block(model).compile(backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch cannot trace parts of FSDP2 and Transformers
            compare_step(model, expected, MESH, tolerance=TOLERANCE)
        torch.compiler.reset()


def test_compiled_block_keeps_values(tmp_path: Path, run_ranks: RunRanks) -> None:
    expected = save_model("mixtral", tmp_path, num_hidden_layers=1)
    run_ranks(_compiled, 2, tmp_path, expected)


def _train(rank: int, num_ranks: int, folder: Path, output: Path) -> list[float]:
    """Train three steps with Transformers' Trainer; return the losses."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE="2"
    )
    with disabled_afterwards():
        model = load_sharded(folder, MESH, strategy="sequential")
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


def test_trainer_lowers_the_loss(tmp_path: Path, run_ranks: RunRanks) -> None:
    save_model("qwen3_moe", tmp_path / "model", num_hidden_layers=1)
    losses = run_ranks(_train, 2, tmp_path / "model", tmp_path / "output")
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
