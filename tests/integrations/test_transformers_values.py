"""Transformers models with experts spread over ranks: steps, files, checkpointing, Trainer."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import halley.integrations.transformers as halley_transformers
from halley.integrations.transformers import find_extension_point
from tests.integrations.transformers_case import (
    FAMILIES,
    SEQ_LEN,
    Expected,
    Mesh,
    compare_step,
    disabled_afterwards,
    load_sharded,
    make_tokens,
    save_model,
)
from tests.rank_pool import RunRanks


TOLERANCE = 1e-5
MESHES = {
    "ep2": Mesh(ep_size=2, fsdp_size=2),
    "ep4": Mesh(ep_size=4, fsdp_size=4),
    "ep2_of_4": Mesh(ep_size=2, fsdp_size=4),
    "tp2_ep4": Mesh(ep_size=4, fsdp_size=2, tp_size=2),
}
UNSUPPORTED = {"gpt_oss": "the experts have a gate function of their own"}  # by family


@pytest.fixture(scope="module")
def saved() -> dict[str, tuple[Path, Expected]]:
    """Return the models that tests of this file have saved so far, by family."""
    return {}


@pytest.fixture
def case(
    family: str, saved: dict[str, tuple[Path, Expected]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Expected]:
    if family not in saved:
        folder = tmp_path_factory.mktemp(family)
        saved[family] = folder, save_model(family, folder)
    return saved[family]


def _step(
    rank: int, num_ranks: int, folder: Path, expected: Expected, mesh: Mesh, strategy: str
) -> dict[str, str]:
    with disabled_afterwards():
        model = load_sharded(folder, mesh, strategy=strategy)
        compare_step(model, expected, mesh, tolerance=TOLERANCE)
        return halley_transformers.describe(model)


# All families with one strategy; the others with few.
STEPS = [
    *((family, "sequential", "ep2") for family in FAMILIES),
    ("mixtral", "chunked", "ep4"),
    ("mixtral", "hierarchical:2", "ep4"),
    ("mixtral", "fused", "ep2"),
    ("deepseek_v3", "fused", "ep2"),
]


@pytest.mark.parametrize(("family", "strategy", "mesh"), STEPS)
def test_step_equals_undivided_model(family, strategy, mesh, case, run_ranks, record_property):
    sizes = MESHES[mesh]
    path = f"halley: {strategy}"
    if family in UNSUPPORTED:
        path = f"halley: sequential, with the framework's own expert code: {UNSUPPORTED[family]}"
    for found in run_ranks(_step, sizes.fsdp_size * sizes.tp_size, *case, sizes, strategy):
        assert found
        assert set(found.values()) == {path}
    record_property("ran", "own arithmetic" if family in UNSUPPORTED else strategy)


def _compiled_step(
    rank: int, num_ranks: int, folder: Path, expected: Expected, strategy: str
) -> dict[str, str]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    halley_transformers.enable(model, strategy=strategy, strict=True)
    with warnings.catch_warnings(action="ignore"):  # torch reads .grad of the graphs' inputs
        for layer in model.model.layers:
            layer.mlp.compile(backend="aot_eager", fullgraph=True)
        compare_step(model, expected, MESHES["ep2"], tolerance=TOLERANCE)
    return halley_transformers.describe(model)


@pytest.mark.parametrize(("family", "strategy"), [("mixtral", "fused"), ("qwen2_moe", "unfused")])
def test_compiled_block_is_one_graph(family, strategy, case, run_ranks) -> None:
    """Experts that are spread over ranks are an operator of the graph."""
    for found in run_ranks(_compiled_step, 2, *case, strategy, timeout_s=120.0):
        assert set(found.values()) == {f"halley: {strategy}"}


@pytest.mark.parametrize(("family", "mesh"), [("mixtral", "tp2_ep4"), ("qwen2_moe", "ep2_of_4")])
def test_step_on_two_dimensional_mesh(family, mesh, case, run_ranks) -> None:
    if find_extension_point().kind == "experts_function":
        pytest.skip("this transformers has no such meshes")
    run_ranks(_step, 4, *case, MESHES[mesh], "sequential")


def _train_steps(rank: int, num_ranks: int, folder: Path, strategy: str) -> list[float]:
    """Train ten steps of two microbatches; return the mean loss of each step."""
    with disabled_afterwards():
        model = load_sharded(folder, MESHES["ep2_of_4"], strategy=strategy, strict=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(rank)
        microbatches = torch.randint(0, 64, (2, 1, SEQ_LEN), generator=generator)
        losses: list[float] = []
        for _ in range(10):
            total = torch.zeros(())
            for tokens in microbatches:
                loss = model(input_ids=tokens, labels=tokens).loss / 2
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(float(total) / num_ranks)
        return losses


def _train_both(rank: int, num_ranks: int, folder: Path) -> tuple[list[float], list[float]]:
    return _train_steps(rank, num_ranks, folder, ""), _train_steps(rank, num_ranks, folder, "fused")


def test_losses_with_fsdp_and_microbatches_equal_those_of_transformers(tmp_path, run_ranks) -> None:
    """Two data-parallel and two expert-parallel ranks."""
    if find_extension_point().kind != "ep_implementation":
        pytest.skip("this transformers has no implementation of its own for such meshes")
    save_model("mixtral", tmp_path, num_hidden_layers=1)
    for expected, losses in run_ranks(_train_both, 4, tmp_path, timeout_s=240.0):
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        assert losses[-1] < losses[0]


def _save(rank: int, num_ranks: int, folder: Path, output: Path) -> None:
    with disabled_afterwards():
        model = load_sharded(folder, MESHES["ep2"], strategy="sequential")
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
        model = load_sharded(folder, MESHES["ep2"], strategy=strategy)
        # Transformers 5.23 renamed this method, and warns if the old name is called.
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")()
        model.train()
        assert getattr(model, f"is_{word}_checkpointing")
        compare_step(model, expected, MESHES["ep2"], tolerance=TOLERANCE)


@pytest.mark.parametrize("strategy", ["sequential", "fused"])
def test_activation_checkpointing_keeps_values(strategy, tmp_path, run_ranks) -> None:
    expected = save_model("qwen3_moe", tmp_path, num_hidden_layers=1)
    run_ranks(_checkpointed, 2, tmp_path, expected, strategy)


def _train(rank: int, num_ranks: int, folder: Path, output: Path) -> list[float]:
    """Train three steps with Transformers' Trainer; return the losses."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE="2"
    )
    with disabled_afterwards():
        model = load_sharded(folder, MESHES["ep2"], strategy="sequential")
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
