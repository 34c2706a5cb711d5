"""A decoder-only transformer with MoE layers; most parameter names are those of Hugging Face."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halley.core.config import ModelConfig
from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.validation import check_type, parse_device
from halley.distributed.mesh import ParallelGroups
from halley.moe.dense import Attention, FeedForward, rotary_table
from halley.moe.head_loss import chunked_loss
from halley.moe.layer import MoELayer, init_parameters
from halley.moe.memory_check import check_fits, model_sizes, num_parameters
from halley.strategies.base import AbstractStrategy


_T = TypeVar("_T")


class ModelOutput(NamedTuple):
    """Result of ``MoETransformer.forward``: logits, router loss, and token counts per expert."""

    logits_BSV: torch.Tensor  # next-token logits, in the model's dtype
    router_loss: torch.Tensor  # sum of the router losses of all MoE layers, a float32 scalar
    counts_ME: torch.Tensor  # int64, this rank's tokens that chose each expert, by MoE layer


class LossOutput(NamedTuple):
    """Losses of a batch, and token counts per expert."""

    loss: torch.Tensor  # mean cross-entropy of the next token in nats, a float32 scalar
    router_loss: torch.Tensor  # as in ``ModelOutput``
    counts_ME: torch.Tensor  # as in ``ModelOutput``


class Block(nn.Module):
    """A residual transformer block: norm and attention, then norm and a dense or MoE layer."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        strategy: AbstractStrategy | None,
        groups: ParallelGroups,
        recorder: Recorder,
        dtype: torch.dtype,
        device: torch.device,
        placement: ExpertPlacement | None,
    ) -> None:
        super().__init__()
        self.recorder = recorder
        hidden_size, place = config.hidden_size, {"dtype": dtype, "device": device}
        self.input_layernorm = nn.RMSNorm(hidden_size, config.norm_eps, **place)
        self.self_attn = Attention(config, **place)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, config.norm_eps, **place)
        self.mlp: MoELayer | FeedForward
        if config.is_moe_layer(index):
            assert strategy is not None
            run = {"strategy": strategy, "groups": groups, "placement": placement}
            self.mlp = MoELayer(config.moe, hidden_size, recorder=recorder, **run, **place)
        else:
            size = config.dense_intermediate_size
            self.mlp = FeedForward(hidden_size, size, gated=True, **place)

    def forward(
        self, x_BSD: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return output, router loss, tokens per expert; the last two are None in a dense block."""
        with self.recorder.span("attention"):
            x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary)
        with self.recorder.span("ffn"):
            normed_BSD = self.post_attention_layernorm(x_BSD)
            if isinstance(self.mlp, MoELayer):
                moe = self.mlp(normed_BSD)
                return x_BSD + moe.y, moe.router_loss, moe.counts_E
            return x_BSD + self.mlp(normed_BSD), None, None


class MoETransformer(nn.Module):
    """A decoder-only language model; call ``init_weights`` or load a checkpoint before use.

    Args:
        strategy: runs the routed experts of all MoE layers; or one strategy for each MoE layer.
        activation_checkpointing: recompute each block in backward.
        placements: expert placement of each MoE layer; None for consecutive ranges.

    Raises:
        ValueError: arguments do not fit each other, or parameters do not fit into memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        strategy: AbstractStrategy | Sequence[AbstractStrategy],
        groups: ParallelGroups,
        recorder: Recorder,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        activation_checkpointing: bool = False,
        placements: Sequence[ExpertPlacement] | None = None,
    ) -> None:
        super().__init__()
        device = parse_device(device, types=("cpu", "cuda", "meta"))
        check_type(config, ModelConfig, name="config")
        place = {"dtype": dtype, "device": device}
        number = num_parameters(config, ep_size=groups.ep_size, tp_size=groups.tp_size)
        check_fits(number * dtype.itemsize, model_sizes(config), device=device)
        placement_of = _by_layer(config, placements, name="placements")
        one = isinstance(strategy, AbstractStrategy)
        strategies = [strategy] * config.num_moe_layers if one else strategy
        strategy_of = _by_layer(config, strategies, name="strategies")
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **place)
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            own = {"strategy": strategy_of.get(index), "placement": placement_of.get(index)}
            self.layers.append(
                Block(config, index, groups=groups, recorder=recorder, **own, **place)
            )
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps, **place)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **place)

    def forward(self, tokens_BS: torch.Tensor) -> ModelOutput:
        """Return logits, router loss, tokens per expert; a collective of the "ep" group."""
        x_BSD, losses, counts = self._run_layers(tokens_BS)
        logits_BSV = self.lm_head(self.norm(x_BSD))
        return ModelOutput(logits_BSV, *_sum_losses(losses, counts, tokens_BS))

    def losses(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> LossOutput:
        """Return losses and tokens per expert, without the logits of all tokens. Collective.

        The head runs in chunks of tokens: see ``halley.moe.head_loss``. Targets are int64 token
        ids. The loss equals ``next_token_loss`` of the logits, up to rounding.
        """
        x_BSD, losses, counts = self._run_layers(tokens_BS)
        loss = chunked_loss(self.norm(x_BSD), self.lm_head.weight, targets_BS=targets_BS)
        return LossOutput(loss, *_sum_losses(losses, counts, tokens_BS))

    def _run_layers(
        self, tokens_BS: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return the last layer's output, router losses and counts of the MoE layers."""
        x_BSD = self.embed_tokens(tokens_BS)
        rotary = rotary_table(self.config, tokens_BS.shape[1], device=x_BSD.device)
        losses: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                out: Any = checkpoint(block, x_BSD, rotary, use_reentrant=False)
            else:
                out = block(x_BSD, rotary)
            x_BSD, loss, block_counts = out
            if loss is not None:
                losses.append(loss)
                counts.append(block_counts)
        return x_BSD, losses, counts

    def init_weights(self, *, seed: int) -> None:
        """Initialize all parameters from a seed, with the same values on any number of ranks."""
        init_parameters(self, seed=seed)


def _sum_losses(
    losses: list[torch.Tensor], counts: list[torch.Tensor], tokens_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of router losses, float32, and the stacked counts, ``(M, E)``."""
    if not losses:
        return tokens_BS.new_zeros((), dtype=torch.float32), tokens_BS.new_zeros(0, 0)
    return torch.stack(losses).sum().float(), torch.stack(counts)


def _by_layer(config: ModelConfig, given: Sequence[_T] | None, *, name: str) -> dict[int, _T]:
    """Map the index of each MoE layer to its element of ``given``; return {} for None."""
    if given is None:
        return {}
    layers = [index for index in range(config.num_layers) if config.is_moe_layer(index)]
    if len(given) != len(layers):
        raise ValueError(f"{name} ({len(given)}) must be as many as MoE layers ({len(layers)})")
    return dict(zip(layers, given, strict=True))


def flops_per_token(config: ModelConfig, *, seq_len: int) -> float:
    """Return the floating-point operations per token of the GEMMs of forward and backward.

    Each matmul weight that a token uses counts six operations; experts other than its top-k and the
    shared one count none. The two GEMMs of causal attention read half the sequence on average.
    Source: Kaplan et al. (arXiv:2001.08361), section 2.1; PaLM (arXiv:2204.02311), appendix B.
    """
    moe, hidden = config.moe, config.hidden_size
    heads = config.head_dim * (config.num_heads + config.num_kv_heads)
    gated = 3 if moe.activation == "swiglu" else 2
    num_moe = config.num_moe_layers
    num_dense = config.num_layers - num_moe
    routed = gated * hidden * (moe.top_k * moe.intermediate_size + moe.shared_intermediate_size)
    weights = (
        config.num_layers * 2 * hidden * heads
        + num_moe * (routed + hidden * moe.num_experts)
        + num_dense * 3 * hidden * config.dense_intermediate_size
        + hidden * config.vocab_size
    )
    attention = config.num_layers * 2 * seq_len * config.num_heads * config.head_dim / 2
    return 6.0 * weights + 6.0 * attention
