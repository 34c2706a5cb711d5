"""Small models and layers for tests, one for each kind of router, with large weights."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.config import ModelConfig, MoEConfig, RouterConfig
from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import MoELayer
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy
from halley.tools.skew import zipf_load


CPU = torch.device("cpu")
HIDDEN = 16

_MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=8)
_MODEL = ModelConfig(
    name="small", vocab_size=32, hidden_size=HIDDEN, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm="head", moe=_MOE,
)  # fmt: skip
_SIGMOID = RouterConfig(kind="sigmoid", num_groups=4, num_limited_groups=2, scaling_factor=2.5)
_SWITCH = RouterConfig(kind="switch", capacity_factor=1.0, z_coefficient=0.01)
_TOP2 = dataclasses.replace(_SWITCH, kind="top2")


def _change(moe: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return dataclasses.replace(_MODEL, moe=dataclasses.replace(_MOE, **(moe or {})), **changes)


MODELS: dict[str, ModelConfig] = {
    "softmax": _MODEL,
    "sigmoid": _change({"top_k": 3, "router": _SIGMOID}),
    "switch": _change({"top_k": 1, "router": _SWITCH}),
    "top2": _change({"router": _TOP2}),
    "biases": _change({"expert_bias": True}, attention_bias=True),
    "shared experts": _change({"shared_intermediate_size": 12, "shared_gate": True}),
    "gelu": _change({"activation": "gelu", "shared_intermediate_size": 4}, qk_norm="full"),
    "dense layers": _change(
        num_layers=4, num_dense_layers=1, moe_interval=2, dense_intermediate_size=24
    ),
}


LOADS = {
    "zipf": zipf_load(_MOE.num_experts, exponent=1.2, top_k=2),
    "one takes all": torch.tensor([1.0] + [1e-9] * 7),
    "one is empty": torch.tensor([0.0] + [1 / 7] * 7),
}


def build_layer(
    kind: str,
    groups: ParallelGroups,
    strategy: str,
    *,
    load: str = "",
    dtype: torch.dtype = torch.float32,
    placement: ExpertPlacement | None = None,
) -> MoELayer:
    """Return an MoE layer whose router produces about a given load; experts differ in weights."""
    options = {"recorder": Recorder(CPU), "device": CPU, "num_chunks": 2}
    layer = MoELayer(
        MODELS[kind].moe, HIDDEN,
        strategy=build_strategy(strategy, groups.ep, tp_size=groups.tp_size, **options),
        groups=groups, placement=placement, dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            generator = torch.Generator().manual_seed(seed)
            if not name.startswith("experts."):
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
                continue
            name = name.removeprefix("experts.")
            shape = (_MOE.num_experts, *layer.experts.full_shape(name))
            values = 0.4 * torch.randn(shape, generator=generator)
            parameter.copy_(layer.experts.local_shard(name, values[list(layer.experts.expert_ids)]))
        if load:
            layer.router.weight[:, 0] = LOADS[load].clamp_min(1e-9).log().float()
    return layer


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
    place = {"recorder": recorder, "device": CPU}
    model = MoETransformer(
        config, strategy=build_strategy(strategy, groups.ep, num_chunks=num_chunks, **place),
        groups=groups, activation_checkpointing=activation_checkpointing, **place,
    )  # fmt: skip
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


def run_step(model: MoETransformer, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Run forward and backward; return the loss, which includes the routers' losses."""
    out = model(tokens_BS)
    logits = out.logits_BSV[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, tokens_BS[:, 1:].flatten()) + out.router_loss
    loss.backward()
    return loss.detach()


def destroy(groups: ParallelGroups) -> None:
    """Destroy the groups of a mesh; otherwise they exist until the ranks of the tests end."""
    mesh = groups.mesh
    assert mesh is not None
    dist.barrier()  # no rank may destroy a group to which another still connects
    for name in ("edp", "ep"):
        group = mesh.get_group(name)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
