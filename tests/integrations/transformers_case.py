"""Tiny random Transformers models: undivided on one process, and with experts spread over ranks."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.modeling_utils  # before the ranks are forked, which then need not import it
from torch import nn
from torch.distributed.tensor import DTensor

import halley.integrations.transformers as halley_transformers
from halley.integrations.transformers import find_extension_point


_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SHARED: dict[str, Any] = {"moe_intermediate_size": 16}
_GROUPED: dict[str, Any] = {
    **_SHARED,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {**_SHARED, "num_experts": 8, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_SHARED, "num_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "rope_parameters": {"rope_type": "default"}},
    "deepseek_v3": {
        **_GROUPED,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": _GROUPED,
    "granitemoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8, "rotary_dim": 8},
}
NUM_SEQUENCES, SEQ_LEN = 4, 12

# Some versions of Transformers have no expert-parallel plan for these families.
_PLANS: dict[str, dict[str, str]] = {
    "granitemoe": {
        "model.layers.*.block_sparse_moe.experts.gate_up_proj": "grouped_gemm",
        "model.layers.*.block_sparse_moe.experts.down_proj": "grouped_gemm",
        "model.layers.*.block_sparse_moe.experts": "ep_dispatch_experts",
    }
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The values of the undivided model on one process for ``make_tokens()``."""

    loss: float  # mean over all tokens
    gradients: dict[str, torch.Tensor]  # by parameter


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of a job's mesh; the ranks of one tensor-parallel group hold the same tokens."""

    ep_size: int
    fsdp_size: int
    tp_size: int = 1


def make_tokens() -> torch.Tensor:
    """Return token ids, ``(NUM_SEQUENCES, SEQ_LEN)``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, _SIZES["vocab_size"], (NUM_SEQUENCES, SEQ_LEN), generator=generator)


def make_model(family: str, **changes: Any) -> Any:
    """Return a model of a family with random weights, none of them zero."""
    config = transformers.CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def save_model(family: str, folder: Path, **changes: Any) -> Expected:
    """Save a model to a folder; return its values."""
    transformers.utils.logging.disable_progress_bar()
    model = make_model(family, **changes)
    model.save_pretrained(folder)
    loss = run_step(model, make_tokens())
    return Expected(loss=loss, gradients=_gradients(model))


def run_step(model: nn.Module, tokens: torch.Tensor) -> float:
    """Run forward and backward of the mean loss; return it."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


def load_sharded(folder: Path, mesh: Mesh, *, strategy: str, strict: bool = False) -> Any:
    """Return the model of a folder, its experts spread over the ranks and run by Halley.

    With strategy "" Transformers runs them; this needs version 5.23 or newer.
    """
    transformers.utils.logging.disable_progress_bar()
    kind = find_extension_point().kind
    if kind == "experts_function":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        halley_transformers.enable(model, strategy=strategy, strict=strict)
        return model
    from transformers.distributed.configuration_utils import DistributedConfig

    if strategy:
        halley_transformers.enable(strategy=strategy, strict=strict, default=False)
    options: dict[str, Any] = {"fsdp_size": mesh.fsdp_size, "ep_size": mesh.ep_size}
    if kind == "ep_implementation":
        options["ep_implementation"] = halley_transformers.NAME if strategy else "all_to_all"
    if mesh.tp_size > 1:
        options["tp_size"] = mesh.tp_size
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    if config.base_model_ep_plan is None:
        options["ep_plan"] = _PLANS[config.model_type]
    distributed = DistributedConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)


def compare_step(model: nn.Module, expected: Expected, mesh: Mesh, *, tolerance: float) -> None:
    """Run a step on this rank's share of the tokens; compare the loss and all gradients."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tokens = make_tokens().chunk(num_ranks // mesh.tp_size)[rank // mesh.tp_size]
    loss = torch.tensor(run_step(model, tokens))
    dist.all_reduce(loss)
    assert abs(float(loss) / num_ranks - expected.loss) < tolerance
    gradients = _gradients(model)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        size = max(float(expected.gradients[name].abs().max()), 1e-3)
        error = float((gradient - expected.gradients[name]).abs().max())
        assert error < tolerance * size, f"{name}: {error} of {size}"


@contextmanager
def disabled_afterwards() -> Iterator[None]:
    """Disable Halley at the end; ignore FSDP2's warnings about modules other than experts.

    FSDP2 warns of each module that returns a view. Only for experts would that be Halley's fault.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module \((?!\w*Experts\))")
            yield
    finally:
        halley_transformers.disable()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return undivided gradients by name, averaged over ranks after ``enable(model)``."""
    divided = getattr(model, "_ddp_params_and_buffers_to_ignore", None)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif divided is not None and name in divided:
            shares = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(shares, gradient)
            gradient = torch.cat(shares)
        elif divided is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        gradients[name] = gradient
    return gradients
