"""Exported models: names, values and files as transformers takes them, and its very logits."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from halley.core.config import (
    OptimizerConfig,
    RunConfig,
)
from halley.distributed.mesh import build_groups
from halley.moe.experts import grouped_experts
from halley.moe.transformer import MoETransformer
from halley.train.checkpoint import save_checkpoint
from halley.train.checkpoint_reader import checkpoint_views
from halley.train.hf_export import (
    ARCHITECTURES,
    export_run,
    read_run_config,
)
from halley.train.optim import ModelOptimizer
from tests.moe.model_case import build_model, destroy, make_tokens
from tests.rank_pool import RunRanks
from tests.train.export_case import MODELS, run_config


safetensors = pytest.importorskip("safetensors.torch")


def _write_config(folder: Path, config: RunConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


def _write_run(folder: Path, family: str, *, dtype: str = "float32") -> MoETransformer:
    """Write what a run leaves; return its model, whose norms differ from one."""
    config = run_config(MODELS[family], dtype)
    model = build_model(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.linspace(-0.5, 0.5, parameter.numel())
    _write_config(folder, config)
    parameters = checkpoint_views(dict(model.named_parameters()), grouped_experts(model))
    save_checkpoint(folder / "checkpoints", {"parameters": parameters}, step=7, keep=1)
    return model


def _attention_names(layer: int, *, bias: bool = False, norms: bool = False) -> set[str]:
    start = f"model.layers.{layer}"
    names = {f"{start}.self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {f"{start}.{norm}_layernorm.weight" for norm in ("input", "post_attention")}
    if bias:
        names |= {f"{start}.self_attn.{part}_proj.bias" for part in "qkv"}
    if norms:
        names |= {f"{start}.self_attn.{part}_norm.weight" for part in "qk"}
    return names


def _moe_names(layer: int) -> set[str]:
    start = f"model.layers.{layer}.mlp"
    parts = ("gate", "up", "down")
    experts = {f"{start}.experts.{e}.{part}_proj.weight" for e in range(4) for part in parts}
    return experts | {f"{start}.gate.weight"}


_ENDS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
NAMES: dict[str, set[str]] = {
    "mixtral": _ENDS.union(
        *(_attention_names(layer) for layer in (0, 1)),
        {f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in (0, 1)},
        {
            f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight"
            for layer in (0, 1)
            for e in range(4)
            for part in ("w1", "w2", "w3")
        },
    ),
    "qwen2_moe": _ENDS.union(
        *(_attention_names(layer, bias=True) | _moe_names(layer) for layer in (0, 1)),
        {f"model.layers.{layer}.mlp.shared_expert_gate.weight" for layer in (0, 1)},
        {
            f"model.layers.{layer}.mlp.shared_expert.{part}_proj.weight"
            for layer in (0, 1)
            for part in ("gate", "up", "down")
        },
    ),
    # The first layer is dense, and of the others every second one.
    "qwen3_moe": _ENDS.union(
        *(_attention_names(layer, norms=True) for layer in range(4)),
        _moe_names(2),
        {
            f"model.layers.{layer}.mlp.{part}_proj.weight"
            for layer in (0, 1, 3)
            for part in ("gate", "up", "down")
        },
    ),
    "olmoe": _ENDS.union(
        *(_attention_names(layer, norms=True) | _moe_names(layer) for layer in (0, 1))
    ),
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_names_and_values(family: str, tmp_path: Path):
    model = _write_run(tmp_path / "run", family)
    told = export_run(tmp_path / "run", tmp_path / "hf")
    assert (told.step, told.family) == (7, family)
    assert told.files == ["config.json", "model.safetensors"]
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert tensors.keys() == NAMES[family]
    assert told.num_bytes == sum(4 * p.numel() for p in model.parameters())
    assert told.num_bytes == sum(tensor.nbytes for tensor in tensors.values())

    parameters = dict(model.named_parameters())
    layer = 2 if family == "qwen3_moe" else 1
    start = f"model.layers.{layer}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}"
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    stack = parameters[f"layers.{layer}.mlp.experts.gate_up_proj"]
    wanted = {
        "lm_head.weight": parameters["lm_head.weight"],
        "model.embed_tokens.weight": parameters["embed_tokens.weight"],
        "model.norm.weight": parameters["norm.weight"],
        f"{start}.gate.weight": parameters[f"layers.{layer}.mlp.router.weight"],
        f"{start}.experts.3.{gate}.weight": stack[3, :8],
        f"{start}.experts.3.{up}.weight": stack[3, 8:],
        f"{start}.experts.3.{down}.weight": parameters[f"layers.{layer}.mlp.experts.down_proj"][3],
    }
    for name, value in wanted.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = _write_run(tmp_path / "run", family)
    export_run(tmp_path / "run", tmp_path / "hf", max_shard_bytes=4000)
    other, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert type(other).__name__ == ARCHITECTURES[family]
    assert not any(loading.values())  # nothing missing, nothing left over
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
    # ups 4096 | downs 2048, and what follows. The embedding (2048) comes first, the head last.
    assert sizes == [4160, 1440, 4096, 4160, 1440, 4096, 4160]
    wanted = safetensors.load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_dtype_is_that_of_the_run(tmp_path: Path):
    model = _write_run(tmp_path / "run", "mixtral", dtype="bfloat16")
    told = export_run(tmp_path / "run", tmp_path / "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert told.num_bytes == sum(2 * p.numel() for p in model.parameters())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def _save_on_rank(rank: int, num_ranks: int, folder: Path) -> None:
    groups = build_groups(0, device_type="cpu")
    model = build_model(MODELS["mixtral"], groups=groups)
    optimizer = ModelOptimizer(model, OptimizerConfig(), groups=groups)
    save_checkpoint(folder / "checkpoints", optimizer.state(), step=1, keep=1)
    destroy(groups)


def test_experts_of_all_ranks_come_together(run_ranks: RunRanks, tmp_path: Path):
    run_ranks(_save_on_rank, 2, tmp_path / "run")
    _write_config(tmp_path / "run", run_config(MODELS["mixtral"]))
    export_run(tmp_path / "run", tmp_path / "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    alone = dict(build_model(MODELS["mixtral"]).named_parameters())
    for layer in range(2):
        down_EDF = alone[f"layers.{layer}.mlp.experts.down_proj"]
        for e in range(4):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{e}.w2.weight"
            assert torch.equal(tensors[name], down_EDF[e])


def test_read_run_config(tmp_path: Path):
    config = run_config(MODELS["qwen2_moe"], "bfloat16")
    _write_config(tmp_path, config)
    assert read_run_config(tmp_path) == config
    for text in ("[]", "{", '{"model": {"name": "x"}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"config.json\) must be|model\.vocab_size is required"
        ):
            read_run_config(tmp_path)


def test_folders_that_do_not_do(tmp_path: Path):
    _write_config(tmp_path / "run", run_config(MODELS["olmoe"]))
    with pytest.raises(ValueError, match=r"must hold a whole checkpoint in checkpoints/"):
        export_run(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    _write_run(tmp_path / "run", "olmoe")
    with pytest.raises(ValueError, match=r"run\) must be empty, or not there yet"):
        export_run(tmp_path / "run", tmp_path / "run")
    with pytest.raises(ValueError, match="must be a folder to write to: Not a directory"):
        export_run(tmp_path / "run", tmp_path / "run" / "config.json" / "hf")


def test_checkpoint_of_another_model(tmp_path: Path):
    _write_run(tmp_path / "run", "olmoe")
    _write_config(tmp_path / "run", run_config(dataclasses.replace(MODELS["olmoe"], num_layers=3)))
    with pytest.raises(ValueError, match="must fit the model"):
        export_run(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf" / "config.json").exists()


def test_missing_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _write_run(tmp_path / "run", "olmoe")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hf\]'"):
        export_run(tmp_path / "run", tmp_path / "hf")
