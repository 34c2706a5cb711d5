"""A two-layer Transformers model that trains with DeepSpeed's AutoEP and optionally Halley."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist


_REASON = "deepspeed is not installed: make compat runs these tests with it"

# DeepSpeed looks for a GPU when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    deepspeed: Any = pytest.importorskip("deepspeed", reason=_REASON)
    transformers: Any = pytest.importorskip("transformers", reason=_REASON)
    halley_deepspeed: Any = importlib.import_module("halley.integrations.deepspeed")

VOCABULARY, SEQ_LEN, BATCH = 64, 12, 2
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained."""

    strategy: str = ""  # of Halley; "" for DeepSpeed's own layer
    model: str = "mixtral"  # a key of ``MODELS``, which is also AutoEP's name for it
    stage: int = 1  # of ZeRO
    ep_size: int = 2  # expert-parallel degree
    settings: dict[str, Any] = field(default_factory=dict)  # of DeepSpeed's "expert_parallel"
    activation: str = ""  # DeepSpeed's name of the experts' activation; "" for the model's
    strict: bool = True  # as for ``enable``


@contextmanager
def launched(rank: int, num_ranks: int) -> Iterator[None]:
    """Set the environment variables of a launcher, and ignore DeepSpeed's warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed uses names that torch 2.13 deprecates
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", num_ranks)):
            patch.setenv(name, str(value))
        # DeepSpeed would compile a collective for ranks of one host. That takes minutes, and a
        # killed rank leaves a lock behind.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        yield


def build_engine(case: Case) -> Any:
    """Return DeepSpeed's engine around a model with random weights, the same in every call."""
    if case.strategy:
        halley_deepspeed.enable(case.strategy, strict=case.strict)
    try:
        kind = transformers.CONFIG_MAPPING[case.model]
        config = kind(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            **MODELS[case.model],
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "zero_optimization": {"stage": case.stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "expert_parallel": {
                    "enabled": True,
                    "autoep_size": case.ep_size,
                    "preset_model": case.model,
                    **case.settings,
                },
            },
        )
        for module in engine.module.modules():
            if case.activation and hasattr(module, "activation_limit"):
                module.activation = case.activation
        return engine
    finally:
        halley_deepspeed.disable()


def train(rank: int, num_ranks: int, case: Case, num_steps: int) -> tuple[list[float], Any]:
    """Train on random tokens; return the mean loss of each step, and the descriptions."""
    with launched(rank, num_ranks):
        engine = build_engine(case)
        generator = torch.Generator().manual_seed(rank)
        losses: list[float] = []
        for _ in range(num_steps):
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ_LEN), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / num_ranks)
        return losses, halley_deepspeed.describe(engine.module)
