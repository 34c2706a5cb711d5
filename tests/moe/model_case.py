"""Small models for tests, one for each kind of router, with large weights."""

import dataclasses

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig, MoEConfig, RouterConfig
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy


CPU = torch.device("cpu")

_MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=8)
_MODEL = ModelConfig(
    name="small",
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm="head",
    moe=_MOE,
)


def _with_router(top_k: int, router: RouterConfig) -> ModelConfig:
    return dataclasses.replace(_MODEL, moe=dataclasses.replace(_MOE, top_k=top_k, router=router))


MODELS: dict[str, ModelConfig] = {
    "softmax": _MODEL,
    "sigmoid": _with_router(
        3, RouterConfig(kind="sigmoid", num_groups=4, num_limited_groups=2, scaling_factor=2.5)
    ),
    "switch": _with_router(1, RouterConfig(kind="switch", capacity_factor=1.0, z_coefficient=0.01)),
    "top2": _with_router(2, RouterConfig(kind="top2", capacity_factor=1.0, z_coefficient=0.01)),
    "biases": dataclasses.replace(
        _MODEL, attention_bias=True, moe=dataclasses.replace(_MOE, expert_bias=True)
    ),
    "shared experts": dataclasses.replace(
        _MODEL, moe=dataclasses.replace(_MOE, shared_intermediate_size=12, shared_gate=True)
    ),
    "gelu": dataclasses.replace(
        _MODEL,
        qk_norm="full",
        moe=dataclasses.replace(_MOE, activation="gelu", shared_intermediate_size=4),
    ),
    "dense layers": dataclasses.replace(
        _MODEL, num_layers=4, num_dense_layers=1, moe_interval=2, dense_intermediate_size=24
    ),
}


def build_model(
    config: ModelConfig,
    *,
    strategy: str = "sequential",
    num_chunks: int = 0,
    groups: ParallelGroups | None = None,
    recorder: Recorder | None = None,
    activation_checkpointing: bool = False,
    seed: int = 0,
) -> MoETransformer:
    """Return a float32 model whose weights have std 0.2 and whose biases are not zero."""
    groups = groups or ParallelGroups()
    recorder = recorder or Recorder(CPU, enabled=False)
    model = MoETransformer(
        config,
        strategy=build_strategy(
            strategy, groups.ep, recorder=recorder, device=CPU, num_chunks=num_chunks
        ),
        groups=groups,
        recorder=recorder,
        activation_checkpointing=activation_checkpointing,
    )
    model.init_weights(seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter += torch.linspace(-0.5, 0.5, parameter.shape[-1])
            elif "norm" not in name:
                parameter *= 10.0
    return model


def make_tokens(rank: int, *, batch_size: int = 2, seq_len: int = 9, step: int = 0) -> torch.Tensor:
    """Return the tokens of a rank in a step, ``(B, S)``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(_MODEL.vocab_size, (batch_size, seq_len), generator=generator)


def destroy(groups: ParallelGroups) -> None:
    """Destroy the groups of a mesh; otherwise they exist until the ranks of the tests end."""
    mesh = groups.mesh
    assert mesh is not None
    dist.barrier()  # a rank that is still connecting must not find its peer gone
    for name in ("edp", "ep"):
        group = mesh.get_group(name)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
