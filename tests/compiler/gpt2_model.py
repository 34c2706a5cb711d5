"""GPT-2 with experts in every other feed-forward network, as Lancet's GPT2-S-MoE, but narrow."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.config import MoEConfig, RouterConfig
from halley.moe.experts import GroupedExperts
from halley.moe.layer import MoELayer
from halley.moe.model import ModelOutput
from halley.moe.parallel import ParallelGroups
from halley.strategies.functional import FunctionalStrategy


VOCAB_SIZE = 32
HIDDEN_SIZE = 32
NUM_HEADS = 4
SEQ_LEN = 8
EXPERTS_PER_RANK = 2  # as in the paper
Gate = Literal["switch", "top2", "prioritized", "dropless"]

ROUTERS: dict[Gate, RouterConfig] = {
    "switch": RouterConfig(kind="switch", capacity_factor=1.0),
    "top2": RouterConfig(kind="top2", capacity_factor=1.0),
    "prioritized": RouterConfig(kind="switch", capacity_factor=1.0, priority="weight"),
    "dropless": RouterConfig(kind="softmax"),
}
TOP_K: dict[Gate, int] = {"switch": 1, "top2": 2, "prioritized": 1, "dropless": 2}


class Attention(nn.Module):
    """Causal attention of queries, keys and values from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE)
        self.c_proj = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x_BSD).split(HIDDEN_SIZE, dim=-1)
        q, k, v = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a dense network or experts, each after a norm."""

    def __init__(self, gate: Gate | None, groups: ParallelGroups) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN_SIZE), nn.LayerNorm(HIDDEN_SIZE)
        self.attn = Attention()
        self.moe: MoELayer | None = None
        if gate is None:
            self.c_fc = nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE)
            self.c_proj = nn.Linear(4 * HIDDEN_SIZE, HIDDEN_SIZE)
            return
        config = MoEConfig(
            num_experts=EXPERTS_PER_RANK * groups.ep_size,
            top_k=TOP_K[gate],
            intermediate_size=4 * HIDDEN_SIZE,
            activation="gelu",
            router=ROUTERS[gate],
        )
        strategy = FunctionalStrategy(groups.ep)
        self.moe = MoELayer(config, HIDDEN_SIZE, strategy=strategy, groups=groups)

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
    """A language model with experts in the second block of each two.

    Args:
        gate: of its routers.
        groups: over which the experts are spread.
        num_layers: of it.
    """

    def __init__(self, gate: Gate, groups: ParallelGroups, *, num_layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.wpe = nn.Embedding(SEQ_LEN, HIDDEN_SIZE)
        self.h = nn.ModuleList(
            Block(gate if layer % 2 else None, groups) for layer in range(num_layers)
        )
        self.ln_f = nn.LayerNorm(HIDDEN_SIZE)
        self.lm_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        self._fill(groups)

    def forward(self, tokens_BS: torch.Tensor) -> ModelOutput:
        x_BSD = self.wte(tokens_BS) + self.wpe(torch.arange(tokens_BS.shape[1]))
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
    def _fill(self, groups: ParallelGroups) -> None:
        """Fill parameters alike on all ranks, but for experts; large enough that all matter."""
        for module in self.modules():
            own = groups.ep_rank + 1 if isinstance(module, GroupedExperts) else 0
            generator = torch.Generator().manual_seed(own)
            for parameter in module.parameters(recurse=False):
                if not isinstance(module, nn.LayerNorm):
                    parameter.normal_(0.0, 0.2, generator=generator)
