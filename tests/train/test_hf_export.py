"""Exported models: transformers reads the files and computes the same logits; refused models."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halley.core.config import (
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from halley.core.models import NAMED_MODELS
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.transformer import MoETransformer
from halley.train.checkpoint import save_checkpoint
from halley.train.hf_export import ARCHITECTURES, check_family, export_run, hf_config
from halley.train.optim import ModelOptimizer
from tests.moe.model_case import MODELS as SMALL_MODELS
from tests.moe.model_case import build_model, destroy, make_tokens
from tests.rank_pool import RunRanks


safetensors = pytest.importorskip("safetensors.torch")

MOE = MoEConfig(num_experts=4, top_k=2, intermediate_size=8)
NOT_NORMALIZED = RouterConfig(normalize=False, balance_coefficient=0.25)
_BASE = dataclasses.replace(SMALL_MODELS["softmax"], qk_norm="none", head_dim=4, moe=MOE)


def _family(name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(_BASE, hf_family=name, **changes)


SHARED = dataclasses.replace(
    MOE, shared_intermediate_size=12, shared_gate=True, router=NOT_NORMALIZED
)
SPARSE = {"num_dense_layers": 1, "moe_interval": 2, "dense_intermediate_size": 24}
MODELS = {
    "mixtral": _family("mixtral", head_dim=8, rope_theta=1e6, norm_eps=1e-3),
    "qwen2_moe": _family("qwen2_moe", attention_bias=True, num_kv_heads=4, moe=SHARED),
    "qwen3_moe": _family("qwen3_moe", qk_norm="head", head_dim=8, num_layers=4, **SPARSE),
    "olmoe": _family("olmoe", qk_norm="full", moe=dataclasses.replace(MOE, router=NOT_NORMALIZED)),
}


def _run_config(model: ModelConfig, **train: str) -> RunConfig:
    return RunConfig(model=model, data=DataConfig(seq_len=64), train=TrainConfig(**train))  # type: ignore[arg-type]


def _write_config(folder: Path, config: RunConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


def _write_run(folder: Path, family: str, **train: str) -> MoETransformer:
    """Write the files of a run; return its model, whose norm weights are not one."""
    config = _run_config(MODELS[family], **train)
    model = build_model(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.linspace(-0.5, 0.5, parameter.numel())
    _write_config(folder, config)
    state = ModelOptimizer(model, OptimizerConfig(kind="sgd"), groups=ParallelGroups()).state()
    save_checkpoint(folder / "checkpoints", state, step=7, keep=1)
    return model


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    model = _write_run(tmp_path / "run", family)
    export = export_run(tmp_path / "run", tmp_path / "whole")
    assert (export.step, export.family) == (7, family)
    assert export.files == ["config.json", "model.safetensors"]
    assert export.num_bytes == sum(4 * p.numel() for p in model.parameters())

    transformers = pytest.importorskip("transformers")
    export_run(tmp_path / "run", tmp_path / "hf", max_shard_bytes=4000)
    other, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert type(other).__name__ == ARCHITECTURES[family]
    assert not any(loading.values())  # transformers finds no missing or unknown tensor
    tokens_BS = make_tokens(0, batch_size=3, seq_len=40)
    with torch.no_grad():
        got_BSV, wanted_BSV = other(tokens_BS).logits, model(tokens_BS).logits_BSV
    assert wanted_BSV.std() > 0.1
    torch.testing.assert_close(got_BSV, wanted_BSV, rtol=1e-5, atol=1e-5)


def test_shards(tmp_path: Path):
    _write_run(tmp_path / "run", "olmoe")
    whole = export_run(tmp_path / "run", tmp_path / "whole")
    parts = export_run(tmp_path / "run", tmp_path / "parts", max_shard_bytes=5000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": whole.num_bytes}
    assert parts.num_bytes == whole.num_bytes
    found: dict[str, torch.Tensor] = {}
    sizes: list[int] = []
    for i in range(7):
        shard = f"model-{i + 1:05d}-of-00007.safetensors"
        tensors = safetensors.load_file(tmp_path / "parts" / shard)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert all(index["weight_map"][name] == shard for name in tensors)
        found |= tensors
    assert len(parts.files) == 7 + len(["config.json", "model.safetensors.index.json"])
    # A layer: norm 64, q 1024, k and v 512 each | o 1024, norms 64, 32, 64, router 256 | gates and
    # ups 4096 | downs 2048, and the start of the next layer. The embedding (2048) comes first.
    assert sizes == [4160, 1440, 4096, 4160, 1440, 4096, 4160]
    wanted = safetensors.load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_dtype_is_that_of_the_run(tmp_path: Path):
    model = _write_run(tmp_path / "run", "mixtral", dtype="bfloat16")
    export = export_run(tmp_path / "run", tmp_path / "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert export.num_bytes == sum(2 * p.numel() for p in model.parameters())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def _save_on_rank(rank: int, num_ranks: int, folder: Path) -> None:
    groups = build_groups(0, device_type="cpu")
    model = build_model(MODELS["mixtral"], groups=groups)
    optimizer = ModelOptimizer(model, OptimizerConfig(), groups=groups)
    save_checkpoint(folder / "checkpoints", optimizer.state(), step=1, keep=1)
    destroy(groups)


def test_experts_of_all_ranks_come_together(run_ranks: RunRanks, tmp_path: Path):
    run_ranks(_save_on_rank, 2, tmp_path / "run")
    _write_config(tmp_path / "run", _run_config(MODELS["mixtral"]))
    export_run(tmp_path / "run", tmp_path / "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    alone = dict(build_model(MODELS["mixtral"]).named_parameters())
    for layer in range(2):
        down_EDF = alone[f"layers.{layer}.mlp.experts.down_proj"]
        for e in range(4):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{e}.w2.weight"
            assert torch.equal(tensors[name], down_EDF[e])


def test_wrong_folders_and_a_missing_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    _write_run(run, "olmoe")
    with pytest.raises(ValueError, match=r"run\) must be empty, or not there yet"):
        export_run(run, run)
    with pytest.raises(ValueError, match="must be a folder to write to: Not a directory"):
        export_run(run, run / "config.json" / "hf")
    _write_config(run, _run_config(dataclasses.replace(MODELS["olmoe"], num_layers=3)))
    with pytest.raises(ValueError, match="must fit the model"):
        export_run(run, tmp_path / "hf")
    assert not (tmp_path / "hf" / "config.json").exists()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hf\]'"):
        export_run(run, tmp_path / "other")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_config_fields_that_no_logit_shows(family: str):
    config = hf_config(_run_config(MODELS[family]))
    assert config["architectures"] == [ARCHITECTURES[family]]
    assert config["max_position_embeddings"] == 64
    assert config["router_aux_loss_coef"] == (0.01 if family in ("mixtral", "qwen3_moe") else 0.25)
    assert config["tie_word_embeddings"] is False
    for token in ("bos", "eos", "pad"):  # default token ids of the families are above 255
        assert config[f"{token}_token_id"] is None


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_families_of_named_models(name: str):
    model = NAMED_MODELS[name]
    if model.hf_family:
        check_family(model)
        return
    with pytest.raises(ValueError, match=rf"hf_family \(''\).* {name} differs in: "):
        check_family(model)
