"""GPT-2 with an MoE layer in every second block: the models of Lancet's evaluation."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.config import MoEConfig, RouterConfig
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import GroupedExperts, MoELayer
from halley.moe.transformer import ModelOutput, MoETransformer
from halley.strategies.base import AbstractStrategy


Gate = Literal["switch", "top2", "prioritized", "dropless"]

ROUTERS: dict[Gate, RouterConfig] = {
    "switch": RouterConfig(kind="switch", capacity_factor=1.0),
    "top2": RouterConfig(kind="top2", capacity_factor=1.0),
    "prioritized": RouterConfig(kind="switch", capacity_factor=1.0, priority="weight"),
    "dropless": RouterConfig(kind="softmax"),
}
TOP_K: dict[Gate, int] = {"switch": 1, "top2": 2, "prioritized": 1, "dropless": 2}
# Experts of a trained model have nearly equal loads, because its loss balances them. With the 0.02
# of the other weights, all tokens of a random model have nearly equal hidden states and most choose
# the same expert: of 12288 tokens of GPT2-S-MoE, one of 4 experts gets up to 11000; with 2.0, 3700.
# Of the 128 experts of Qwen3-30B-A3B, one gets up to 11 times the mean of its layer; with 2.0, 1.7.
EMBEDDING_STD = 2.0


@dataclass(frozen=True, kw_only=True)
class GPT2Shape:
    """Sizes of a model and of its batch on one rank.

    Attributes:
        num_layers: blocks; every second block has an MoE layer, the others a dense network.
        vocab_size: GPT-2's 50257, rounded up to a multiple of 64 for aligned loads.
        batch_size: default number of sequences per rank.
        experts_per_rank: in each MoE layer.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int = 50304
    seq_len: int = 512
    batch_size: int = 24
    experts_per_rank: int = 2


# Source: Lancet (arXiv:2404.19429), evaluation. The text uses a batch of 48 for GPT2-L-MoE; the
# published configurations use 24.
GPT2_SHAPES: dict[str, GPT2Shape] = {
    shape.name: shape
    for shape in (
        GPT2Shape(name="gpt2-s-moe", num_layers=12, hidden_size=768, num_heads=12),
        GPT2Shape(name="gpt2-l-moe", num_layers=24, hidden_size=1024, num_heads=16),
        # For tests.
        GPT2Shape(
            name="gpt2-tiny-moe",
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            vocab_size=64,
            seq_len=8,
            batch_size=6,
        ),
    )
}


def find_shape(name: str) -> GPT2Shape:
    """Return the model of that name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in GPT2_SHAPES:
        raise ValueError(f"model ({name}) must be one of {', '.join(GPT2_SHAPES)}")
    return GPT2_SHAPES[name]


def check_gate(name: str) -> Gate:
    """Return the router of that name.

    Raises:
        ValueError: the name is unknown.
    """
    for gate in get_args(Gate):
        if gate == name:
            return gate
    raise ValueError(f"gate ({name}) must be one of {', '.join(get_args(Gate))}")


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: GPT2Shape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.c_attn = nn.Linear(size, 3 * size, dtype=dtype, device=device)
        self.c_proj = nn.Linear(size, size, dtype=dtype, device=device)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            heads.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for heads in self.c_attn(x_BSD).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block: attention, then a dense network or an MoE layer, each after a norm.

    Args:
        moe: the MoE layer; None for a dense network.
    """

    def __init__(
        self, shape: GPT2Shape, moe: MoELayer | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size = shape.hidden_size
        self.ln_1 = nn.LayerNorm(size, dtype=dtype, device=device)
        self.ln_2 = nn.LayerNorm(size, dtype=dtype, device=device)
        self.attn = Attention(shape, dtype=dtype, device=device)
        self.moe = moe
        if moe is None:
            self.c_fc = nn.Linear(size, 4 * size, dtype=dtype, device=device)
            self.c_proj = nn.Linear(4 * size, size, dtype=dtype, device=device)

    def forward(
        self, x_BSD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD))
        if self.moe is not None:
            out = self.moe(self.ln_2(x_BSD))
            return x_BSD + out.y, out.router_loss, out.counts_E
        hidden = F.gelu(self.c_fc(self.ln_2(x_BSD)), approximate="tanh")
        return x_BSD + self.c_proj(hidden), None, None


class GPT2MoE(nn.Module):
    """A language model with an MoE layer in every second block, without dropout.

    Args:
        shape: its sizes.
        gate: kind of the routers.
        groups: the ranks that hold the experts.
        strategy: runs the routed experts on these groups.
        std: standard deviation of all weights but the embeddings; the default is that of GPT-2.
        embedding_std: standard deviation of the embeddings.
        dtype, device: of the parameters; "meta" leaves them without values.
    """

    def __init__(
        self,
        shape: GPT2Shape,
        gate: Gate,
        groups: ParallelGroups,
        *,
        strategy: AbstractStrategy,
        std: float = 0.02,
        embedding_std: float = EMBEDDING_STD,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        device = torch.device(device)
        config = MoEConfig(
            num_experts=shape.experts_per_rank * groups.ep_size,
            top_k=TOP_K[gate],
            intermediate_size=4 * shape.hidden_size,
            activation="gelu",
            router=ROUTERS[gate],
        )
        size, vocab_size = shape.hidden_size, shape.vocab_size

        def experts() -> MoELayer:
            return MoELayer(
                config, size, strategy=strategy, groups=groups, dtype=dtype, device=device
            )

        self.wte = nn.Embedding(vocab_size, size, dtype=dtype, device=device)
        self.wpe = nn.Embedding(shape.seq_len, size, dtype=dtype, device=device)
        self.h = nn.ModuleList(
            Block(shape, experts() if layer % 2 else None, dtype=dtype, device=device)
            for layer in range(shape.num_layers)
        )
        self.ln_f = nn.LayerNorm(size, dtype=dtype, device=device)
        self.lm_head = nn.Linear(size, vocab_size, bias=False, dtype=dtype, device=device)
        if device.type != "meta":
            self._fill(groups, std=std, embedding_std=embedding_std)

    def forward(self, tokens_BS: torch.Tensor) -> ModelOutput:
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.wte(tokens_BS) + self.wpe(places_S)
        losses: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        for block in self.h:
            x_BSD, loss, counts_E = block(x_BSD)
            if loss is not None:
                losses.append(loss)
                counts.append(counts_E)
        logits_BSV = self.lm_head(self.ln_f(x_BSD))
        return ModelOutput(logits_BSV, torch.stack(losses).sum(), torch.stack(counts))

    @torch.no_grad()
    def _fill(self, groups: ParallelGroups, *, std: float, embedding_std: float) -> None:
        """Draw random parameters, equal on all ranks except for those of experts."""
        device = self.wte.weight.device
        generators = [torch.Generator(device).manual_seed(s) for s in (0, groups.ep_rank + 1)]
        for module in self.modules():
            generator = generators[isinstance(module, GroupedExperts)]
            for parameter in module.parameters(recurse=False):
                if not isinstance(module, nn.LayerNorm):
                    own_std = embedding_std if isinstance(module, nn.Embedding) else std
                    parameter.normal_(0.0, own_std, generator=generator)


class TrainingLoss(nn.Module):
    """A model with its loss, so that the compiled graph includes the loss."""

    def __init__(self, model: GPT2MoE | MoETransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        out = self.model(tokens_BS)
        logits_TV = out.logits_BSV.flatten(0, 1).float()
        return F.cross_entropy(logits_TV, targets_BS.flatten()) + out.router_loss

    def use(self, strategy: AbstractStrategy) -> None:
        """Use this strategy for the routed experts of all layers."""
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.strategy = strategy
