"""Configurations of named models, with sources; ``load_config`` reads the configuration of a run.

A comment at an entry names the main parts of the published model that Halley's model lacks. Such
an entry has no ``hf_family``: it serves benchmarks, and its weights cannot be exported.

Balance coefficients that an entry sets are the published ones. Halley's loss is 1 for each
balanced layer, while Hugging Face pools the layers and counts each of the K choices. For an equal
effect, multiply the coefficient by K and divide it by the number of layers.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import cast

from halley.core.config import ModelConfig, MoEConfig, RouterConfig, RunConfig
from halley.core.model_files import is_model_file, parse_sizes, read_model
from halley.core.validation import Table, build, read_text, show, show_name, unknown_name


_MAX_BYTES = 2**16  # largest configuration file; usual ones have less than 4096 bytes
_MAX_DOTS = 200  # most dots on a line; tomllib takes quadratic time in the dots of a key

_MODELS = (
    # A small model for tests and demos, with the equations of Qwen3-MoE.
    ModelConfig(
        name="tiny", vocab_size=256, hidden_size=128, num_layers=4,
        num_heads=4, num_kv_heads=2, head_dim=32, qk_norm="head", hf_family="qwen3_moe",
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=256),
    ),
    # Source: config.json of mistralai/Mixtral-8x7B-v0.1.
    ModelConfig(
        name="mixtral-8x7b", vocab_size=32000, hidden_size=4096, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128,
        rope_theta=1e6, norm_eps=1e-5, hf_family="mixtral",
        moe=MoEConfig(
            num_experts=8, top_k=2, intermediate_size=14336,
            router=RouterConfig(balance_coefficient=0.02),
        ),
    ),
    # Source: config.json of microsoft/Phi-3.5-MoE-instruct. Halley has RMSNorm and a softmax
    # router in place of the published LayerNorm and SparseMixer router.
    ModelConfig(
        name="phi-3.5-moe", vocab_size=32064, hidden_size=4096, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, norm_eps=1e-5, attention_bias=True,
        moe=MoEConfig(
            num_experts=16, top_k=2, intermediate_size=6400, router=RouterConfig(normalize=False)
        ),
    ),
    # Source: config.json of Qwen/Qwen1.5-MoE-A2.7B, with the 64 experts (not 60) that COMET
    # (arXiv:2502.19811) uses in Table 2; 64 experts divide evenly over 2, 4, 8, ... 64 ranks.
    ModelConfig(
        name="qwen2-moe", vocab_size=151936, hidden_size=2048, num_layers=24,
        num_heads=16, num_kv_heads=16, head_dim=128,
        rope_theta=1e6, attention_bias=True, hf_family="qwen2_moe",
        moe=MoEConfig(
            num_experts=64, top_k=4, intermediate_size=1408,
            shared_intermediate_size=5632, shared_gate=True,
            router=RouterConfig(normalize=False, balance_coefficient=0.001),
        ),
    ),
    # Source: config.json of Qwen/Qwen3-30B-A3B.
    ModelConfig(
        name="qwen3-30b-a3b", vocab_size=151936, hidden_size=2048, num_layers=48,
        num_heads=32, num_kv_heads=4, head_dim=128,
        rope_theta=1e6, qk_norm="head", hf_family="qwen3_moe",
        moe=MoEConfig(
            num_experts=128, top_k=8, intermediate_size=768,
            router=RouterConfig(balance_coefficient=0.001),
        ),
    ),
    # Source: config.json of allenai/OLMoE-1B-7B-0924.
    ModelConfig(
        name="olmoe", vocab_size=50304, hidden_size=2048, num_layers=16,
        num_heads=16, num_kv_heads=16, head_dim=128,
        norm_eps=1e-5, qk_norm="full", hf_family="olmoe",
        moe=MoEConfig(
            num_experts=64, top_k=8, intermediate_size=1024, router=RouterConfig(normalize=False)
        ),
    ),
    # Source: config.json of openai/gpt-oss-20b. Halley has plain attention and SwiGLU in place of
    # the published attention sinks, sliding windows and clamped SwiGLU.
    ModelConfig(
        name="gpt-oss-20b", vocab_size=201088, hidden_size=2880, num_layers=24,
        num_heads=64, num_kv_heads=8, head_dim=64,
        rope_theta=150000.0, norm_eps=1e-5, attention_bias=True,
        moe=MoEConfig(num_experts=32, top_k=4, intermediate_size=2880, expert_bias=True),
    ),
    # Source: DeepSeek-V3 (arXiv:2412.19437), section 4.2. Halley has plain attention and a balance
    # loss per microbatch in place of the published latent attention and loss per sequence.
    ModelConfig(
        name="deepseek-v3", vocab_size=129280, hidden_size=7168, num_layers=61,
        num_heads=128, num_kv_heads=128, head_dim=128,
        num_dense_layers=3, dense_intermediate_size=18432,
        moe=MoEConfig(
            num_experts=256, top_k=8, intermediate_size=2048, shared_intermediate_size=2048,
            router=RouterConfig(
                kind="sigmoid", num_groups=8, num_limited_groups=4,
                scaling_factor=2.5, balance_coefficient=0.0001,
            ),
        ),
    ),
)  # fmt: skip
NAMED_MODELS: dict[str, ModelConfig] = {model.name: model for model in _MODELS}


def find_model(name: str) -> ModelConfig:
    """Return a model's configuration by its name, file or sizes, or raise a ``ValueError``."""
    if is_model_file(name):
        return read_model(Path(name))
    if "=" in name:
        return parse_sizes(name)
    if name not in NAMED_MODELS:
        raise ValueError(unknown_name(name, NAMED_MODELS, what="model"))
    return NAMED_MODELS[name]


def load_config(path: Path | None, *, overrides: list[str]) -> RunConfig:
    """Return a run's configuration: defaults, changed by a TOML file if any, then by overrides.

    ``model`` is a table with ``name``, one of ``NAMED_MODELS`` ("tiny" if it is left out), and any
    fields to change. A string is short for a table with that name. ``overrides`` are texts such as
    ``"train.num_steps=100"``; a value that is not TOML is a string. A file that is missing or not
    TOML, an unknown key, and a value that has the wrong type or breaks a rule are a ``ValueError``.
    """
    table: Table = {} if path is None else _read_toml(path)
    for text in overrides:
        _apply_override(table, text)
    model = table.setdefault("model", "tiny")
    if isinstance(model, str):
        model = {"name": model}
    if not isinstance(model, dict):
        raise ValueError(f"model ({show(model)}) must be a name or a table")
    model = cast(Table, model)
    name = model.get("name", "tiny")
    if not isinstance(name, str):
        raise ValueError(f"model.name ({show(name)}) must be of type str")
    base: Table = dataclasses.asdict(find_model(name))
    _merge(base, {**model, "name": base["name"]}, prefix="model.")
    return build(RunConfig, {**table, "model": base})


def _read_toml(path: Path) -> Table:
    text = read_text(path, what="config", max_bytes=_MAX_BYTES)
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"config ({path}) must have at most {_MAX_DOTS} dots on a line")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"config ({path}) must be TOML with fewer nested lists") from error
    except ValueError as error:
        raise ValueError(f"config ({path}) must be TOML: {error}") from error


def _apply_override(table: Table, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set ({show_name(text)}) must be KEY=VALUE")
    parsed = _parse_value(value)
    *parents, last = key.split(".")
    for parent in parents:
        child = table.setdefault(parent, {})
        if isinstance(child, str) and parent == "model":  # model=NAME is short for model.name=NAME
            child = table[parent] = {"name": child}
        if not isinstance(child, dict):
            rule = f"must name a key below a table, {show_name(parent)} is none"
            raise ValueError(f"--set ({show_name(text)}) {rule}")
        table = cast(Table, child)
    if last == "model" and isinstance(table.get(last), dict) and isinstance(parsed, str):
        # Change the name only: other keys of a [model] table or of --set model.KEY=VALUE stay.
        parsed = {**cast(Table, table[last]), "name": parsed}
    table[last] = parsed


def _parse_value(text: str) -> object:
    if text.count(".") > _MAX_DOTS:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # several lines of text can set more keys


def _merge(base: Table, changes: Table, *, prefix: str) -> None:
    for key, value in changes.items():
        if key not in base:
            raise ValueError(unknown_name(key, base, prefix=prefix))
        old = base[key]
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(cast(Table, old), cast(Table, value), prefix=f"{prefix}{key}.")
        else:
            base[key] = value
