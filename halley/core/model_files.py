"""Make a model's configuration from Hugging Face's ``config.json``, or from sizes in a text.

Such a configuration serves benchmarks, plans and training. It has no ``hf_family``, because the
file does not tell whether Halley's equations are those of the model. So it cannot be exported.
Keys that are not in the tables below, such as those of sliding windows, are ignored.
"""

from pathlib import Path
from typing import Any, cast

from halley.core.config import ModelConfig
from halley.core.validation import build_record, read_json, show, show_name


_MAX_BYTES = 2**20
_SIZES = {"E": "num_experts", "K": "top_k", "D": "hidden_size", "F": "intermediate_size"}
# For each field, its possible keys in config.json; the first key that the file has is read.
_MODEL_KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim", "v_head_dim"),
    "num_dense_layers": ("first_k_dense_replace",),
    "moe_interval": ("decoder_sparse_step",),
    "dense_intermediate_size": ("intermediate_size",),
    "rope_theta": ("rope_theta",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "attention_bias": ("attention_bias",),
}
_MOE_KEYS = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "shared_intermediate_size": ("shared_expert_intermediate_size",),
}
_ROUTER_KEYS = {
    "normalize": ("norm_topk_prob",),
    "num_groups": ("n_group",),
    "num_limited_groups": ("topk_group",),
    "scaling_factor": ("routed_scaling_factor",),
    "balance_coefficient": ("router_aux_loss_coef", "aux_loss_alpha"),
}
_SIGMOID = ("deepseek_v3", "glm4_moe", "minimax_m2")  # model types whose router is a sigmoid
_NEEDED = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_experts", "top_k")


def is_model_file(name: str) -> bool:
    """Return whether a model's name is a path: it ends in ".json" or has a "/"."""
    return name.endswith(".json") or "/" in name


def read_model(path: Path) -> ModelConfig:
    """Return the model configuration in a ``config.json``; ``path`` is this file or its folder.

    Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4-MoE, MiniMax-M2, Phi-MoE and GPT-OSS
    models are known; another one works if it has the same keys. The model is named after the
    folder. A file without experts, or with an activation that is not SwiGLU, is a ``ValueError``.
    """
    path = path / "config.json" if path.is_dir() else path
    where = f"model ({show_name(str(path))})"
    found = read_json(path, what="model", max_bytes=_MAX_BYTES)
    if isinstance(found, dict) and "text_config" in found:  # the model is multimodal
        found = cast(dict[str, object], found)["text_config"]
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object")
    given = cast(dict[str, Any], found)
    if isinstance(rope := given.get("rope_parameters"), dict):  # Transformers 5 wrote the file
        given = {**cast(dict[str, Any], rope), **given}
    kind = given.get("model_type")
    router, moe = _take(given, _ROUTER_KEYS), _take(given, _MOE_KEYS)
    model = _take(given, _MODEL_KEYS)
    if missing := [name for name in _NEEDED if name not in moe | model]:
        keys = " or ".join((_MODEL_KEYS | _MOE_KEYS)[missing[0]])
        raise ValueError(f"{where} must be of a Mixture-of-Experts model, with the key {keys}")
    if (activation := given.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"{where} must have hidden_act silu, and has {show(activation)}")
    if kind in _SIGMOID or given.get("scoring_func") == "sigmoid":
        router["kind"] = "sigmoid"
    else:
        for name in ("num_groups", "num_limited_groups", "scaling_factor"):
            router.pop(name, None)
    count, size = given.get("n_shared_experts"), moe.get("intermediate_size")
    if isinstance(count, int) and isinstance(size, int):
        count = count * size
    if count is not None:
        moe["shared_intermediate_size"] = count
    moe |= {"shared_gate": kind == "qwen2_moe", "expert_bias": kind == "gpt_oss"}
    if not model.get("num_dense_layers") and model.get("moe_interval", 1) == 1:
        model.pop("dense_intermediate_size", None)
    hidden_size, heads = model["hidden_size"], model["num_heads"]
    if isinstance(hidden_size, int) and isinstance(heads, int) and heads > 0:
        model.setdefault("head_dim", hidden_size // heads)
    name = path.parent.name or str(kind)
    table = {"name": name, **model, "moe": {**moe, "router": router}}
    return build_record(ModelConfig, table, where=where)


def parse_sizes(text: str) -> ModelConfig:
    """Return a one-layer model's configuration, from sizes such as "E=128,K=8,D=2048,F=768".

    E is the number of experts, K the experts of a token, D the hidden size, and F the intermediate
    size of an expert. A wrong text is a ``ValueError``.
    """
    sizes: dict[str, int] = {}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if key not in _SIZES or key in sizes or not (value.isascii() and value.isdecimal()):
            break
        sizes[key] = int(value)
    where = f"model ({show_name(text)})"
    if len(sizes) < len(_SIZES) or len(sizes) != text.count(",") + 1:
        example = "E=128,K=8,D=2048,F=768"
        raise ValueError(f"{where} must be the sizes E, K, D and F once each, such as {example}")
    heads = max(1, sizes["D"] // 128)
    moe = {name: sizes[key] for key, name in _SIZES.items() if key != "D"}
    table = {
        "name": text, "vocab_size": 32000, "hidden_size": sizes["D"], "num_layers": 1,
        "num_heads": heads, "num_kv_heads": heads, "head_dim": 128, "moe": moe,
    }  # fmt: skip
    return build_record(ModelConfig, table, where=where)


def _take(given: dict[str, Any], keys: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return, for each field, the value of its first key that is in ``given`` and not null."""
    present = {
        name: [given[key] for key in own if given.get(key) is not None]
        for name, own in keys.items()
    }
    return {name: values[0] for name, values in present.items() if values}
