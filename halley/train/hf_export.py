"""Export a training checkpoint to a folder that Hugging Face's transformers loads.

Tensors have the names of the published models on disk, one matrix per expert. The run's
tokenizer is not exported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from halley.core.config import ModelConfig, RunConfig
from halley.core.timeline import Recorder
from halley.core.types import DTYPES
from halley.core.validation import build, make_empty_folder, read_json
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import grouped_experts
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy
from halley.train.checkpoint import find_newest_checkpoint, load_checkpoint
from halley.train.checkpoint_reader import checkpoint_tensors
from halley.train.trainer import CHECKPOINTS_FOLDER, CONFIG_FILE, write_json


ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
MAX_SHARD_BYTES = 4 * 2**30
_MAX_CONFIG_BYTES = 1 << 20

_MIXTRAL_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    "gate_proj.": "w1.",
    "up_proj.": "w3.",
    "down_proj.": "w2.",
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Summary of an export: checkpoint step, Hugging Face family, bytes of tensors, file names."""

    step: int
    family: str
    num_bytes: int
    files: list[str]


def export_run(folder: Path, output: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Export:
    """Write a run's newest complete checkpoint as safetensors and config.json; return a summary.

    One process exports the run of any number of ranks. It holds about one output file in memory.

    Args:
        folder: the run's output, with ``config.json`` and ``checkpoints/``.
        output: a folder that is empty or does not exist.
        max_shard_bytes: size limit of one file; a larger stack of experts still becomes one file.

    Raises:
        ValueError: there is nothing to export, the model has no Hugging Face family, ``output`` is
            not empty, or the package safetensors is missing.
        RuntimeError: the checkpoint cannot be read.
    """
    config = read_run_config(folder)
    check_family(config.model)
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError(
            "halley export must have the package safetensors: pip install '.[hf]' "
            "in a checkout of Halley"
        ) from error
    checkpoint = find_newest_checkpoint(folder / CHECKPOINTS_FOLDER)
    if checkpoint is None:
        raise ValueError(f"run ({folder}) must hold a whole checkpoint in {CHECKPOINTS_FOLDER}/")
    make_empty_folder(output)

    model = _model_without_values(config.model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    experts = grouped_experts(model)
    dtype = DTYPES[config.train.dtype]
    shards = _divide(shapes, max_bytes=max_shard_bytes, itemsize=dtype.itemsize)
    weight_map: dict[str, str] = {}
    step = 0
    for number, names in enumerate(shards, start=1):
        state = {name: torch.empty(shapes[name]) for name in names}
        stored = checkpoint_tensors(state, experts, groups=ParallelGroups())
        step = load_checkpoint(checkpoint, {"parameters": stored})
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            matrices = hf_tensors(name, state.pop(name), family=config.model.hf_family)
            # Copy each tensor, because safetensors refuses views that share memory.
            tensors |= {key: value.to(dtype, copy=True) for key, value in matrices.items()}
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{part}.safetensors"
        save_file(tensors, output / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)

    num_bytes = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        write_json(output / "model.safetensors.index.json", index)
    # config.json is written last, so that transformers refuses an unfinished folder.
    write_json(output / "config.json", hf_config(config))
    files = sorted(file.name for file in output.iterdir())
    return Export(step=step, family=config.model.hf_family, num_bytes=num_bytes, files=files)


def read_run_config(folder: Path) -> RunConfig:
    """Return the configuration in a run's output folder; ValueError if it is missing or damaged."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"run ({folder}) must be the output folder of halley train, with a {CONFIG_FILE}"
        )
    table = read_json(path, what="run configuration", max_bytes=_MAX_CONFIG_BYTES)
    if not isinstance(table, dict):
        raise ValueError(f"run configuration ({path}) must be a table, as halley train wrote it")
    return build(RunConfig, cast(dict[str, object], table))


def check_family(config: ModelConfig) -> None:
    """Raise ``ValueError`` unless ``hf_family`` names a family with the equations of this model."""
    if family := config.hf_family:
        if found := differences(config, family):
            raise ValueError(
                f"model.hf_family ({family}) must have the model's equations: {'; '.join(found)}"
            )
        return
    nearest = min(ARCHITECTURES, key=lambda name: len(differences(config, name)))
    found = differences(config, nearest) or ["parts that its entry in halley/core/models.py names"]
    raise ValueError(
        f"model.hf_family ('') must be one of {', '.join(ARCHITECTURES)} to be exported; from "
        f"{nearest}, the nearest, {config.name} differs in: {'; '.join(found)}"
    )


def differences(config: ModelConfig, family: str) -> list[str]:
    """Return "NAME is A, not B" for each setting NAME that is A but must be B for the family."""
    moe, router = config.moe, config.moe.router
    qwen2 = family == "qwen2_moe"
    num_dense = config.num_layers - config.num_moe_layers
    parts: list[tuple[str, object, object]] = [
        ("qk_norm", config.qk_norm, {"qwen3_moe": "head", "olmoe": "full"}.get(family, "none")),
        ("attention_bias", config.attention_bias, qwen2),
        ("moe.activation", moe.activation, "swiglu"),
        ("moe.expert_bias", moe.expert_bias, False),
        ("moe.router.kind", router.kind, "softmax"),
        ("moe.router.capacity_factor", router.capacity_factor, 0.0),
    ]
    if family == "mixtral":
        parts.append(("moe.router.normalize", router.normalize, True))
    if family in ("mixtral", "olmoe"):
        parts.append(("number of dense layers", num_dense, 0))
    if family in ("qwen2_moe", "olmoe"):
        parts.append(("head_dim", config.head_dim, config.hidden_size // config.num_heads))
    wanted: object = 0
    if qwen2:
        parts.append(("moe.shared_gate", moe.shared_gate, True))
        wanted = moe.shared_intermediate_size or "at least 1"
    parts.append(("moe.shared_intermediate_size", moe.shared_intermediate_size, wanted))
    return [f"{name} is {has!r}, not {wants!r}" for name, has, wants in parts if has != wants]


def hf_tensors(name: str, tensor: torch.Tensor, *, family: str) -> dict[str, torch.Tensor]:
    """Return views of an ``MoETransformer`` parameter, by their names in Hugging Face's files.

    A stack of experts gives one or two matrices per expert.
    """
    if not name.startswith("lm_head."):
        name = f"model.{name}"
    name = name.replace(".mlp.router.", ".mlp.gate.")
    head, experts, part = name.partition(".mlp.experts.")
    tensors: dict[str, torch.Tensor] = {}
    if not experts:
        tensors[name] = tensor
    for index in range(tensor.shape[0] if experts else 0):
        matrices = {part: tensor[index]}
        if part == "gate_up_proj":
            matrices = dict(zip(("gate_proj", "up_proj"), tensor[index].chunk(2), strict=True))
        for matrix, value in matrices.items():
            tensors[f"{head}{experts}{index}.{matrix}.weight"] = value
    for ours, theirs in (_MIXTRAL_NAMES if family == "mixtral" else {}).items():
        tensors = {key.replace(ours, theirs): value for key, value in tensors.items()}
    return tensors


def hf_config(config: RunConfig) -> dict[str, object]:
    """Return the content of Hugging Face's ``config.json`` for the model of a run."""
    model, moe = config.model, config.model.moe
    table: dict[str, object] = {
        "architectures": [ARCHITECTURES[model.hf_family]],
        "model_type": model.hf_family,
        "dtype": config.train.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.data.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": False,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.router.balance_coefficient,
        # The export has no tokenizer. The default ids may be above those of a vocabulary of bytes.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.hf_family == "mixtral":
        return table | {
            "intermediate_size": moe.intermediate_size,
            "num_local_experts": moe.num_experts,
            "sliding_window": None,
        }
    table |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.router.normalize}
    if model.hf_family == "olmoe":
        return table | {"intermediate_size": moe.intermediate_size, "clip_qkv": None}
    dense = [index for index in range(model.num_layers) if not model.is_moe_layer(index)]
    table |= {
        "intermediate_size": model.dense_intermediate_size or moe.intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": False,
    }
    if model.hf_family == "qwen2_moe":
        table["shared_expert_intermediate_size"] = moe.shared_intermediate_size
        table["qkv_bias"] = True
    return table


def _model_without_values(config: ModelConfig) -> MoETransformer:
    recorder = Recorder("cpu", enabled=False)
    strategy = build_strategy("sequential", None, recorder=recorder, device="cpu")
    run = {"strategy": strategy, "groups": ParallelGroups(), "recorder": recorder}
    return MoETransformer(config, **run, device="meta")


def _divide(shapes: dict[str, torch.Size], *, max_bytes: int, itemsize: int) -> list[list[str]]:
    """Return the tensor names of each file; only a file of one tensor may exceed ``max_bytes``."""
    shards: list[list[str]] = []
    filled = max_bytes
    for name, shape in shapes.items():
        num_bytes = shape.numel() * itemsize
        if filled + num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards
