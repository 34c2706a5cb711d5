"""A decoder-only transformer with MoE layers; its parts have Hugging Face's names."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halley.core.config import ModelConfig
from halley.core.field_types import check_type
from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.torch_device import parse_device
from halley.distributed.mesh import ParallelGroups
from halley.moe.elementwise import compiled_on_gpu
from halley.moe.experts import GroupedExperts
from halley.moe.layer import FeedForward, MoELayer
from halley.moe.memory_check import check_model_memory
from halley.moe.router import SigmoidRouter
from halley.strategies.base import AbstractStrategy


_INIT_STD = 0.02
_T = TypeVar("_T")


class ModelOutput(NamedTuple):
    """Result of a forward pass.

    Attributes:
        logits_BSV: next-token logits, in the model's dtype.
        router_loss: sum of the MoE layers' losses, float32 scalar.
        counts_ME: slots of each expert of each MoE layer on this rank, int64.
    """

    logits_BSV: torch.Tensor
    router_loss: torch.Tensor
    counts_ME: torch.Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32.

    Source: Zhang and Sennrich (arXiv:1910.07467).
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel on a GPU


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))

        def linear(inner: int, outer: int, bias: bool) -> nn.Linear:
            return nn.Linear(inner, outer, bias=bias, dtype=dtype, device=device)

        self.q_proj = linear(config.hidden_size, size, config.attention_bias)
        self.k_proj = linear(config.hidden_size, kv_size, config.attention_bias)
        self.v_proj = linear(config.hidden_size, kv_size, config.attention_bias)
        self.o_proj = linear(size, config.hidden_size, False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            sizes = (size, kv_size) if config.qk_norm == "full" else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (
                RMSNorm(n, eps=config.norm_eps, dtype=dtype, device=device) for n in sizes
            )

    def forward(self, x_BSD: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attend; ``rotary`` is ``rotary_table``'s."""
        q, k = self.q_proj(x_BSD), self.k_proj(x_BSD)
        full = self.config.qk_norm == "full"
        if self.q_norm is not None and self.k_norm is not None and full:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._heads(q), self._heads(k), self._heads(self.v_proj(x_BSD))
        if self.q_norm is not None and self.k_norm is not None and not full:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        shared = self.config.num_kv_heads != self.config.num_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return x_BSH.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)


def rotary_table(config: ModelConfig, seq_len: int, *, device: torch.device | str) -> torch.Tensor:
    """Return cosines and sines of each position, ``(2, S, head_dim)`` float32.

    Source: RoFormer (arXiv:2104.09864), halves rotated together as in Hugging Face's models.
    """
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    angle = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return torch.stack([angle.cos(), angle.sin()])


@compiled_on_gpu
def rotate(x_BHSd: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys ``(B, heads, S, head_dim)`` by their positions."""
    cos, sin = rotary.to(x_BHSd.dtype)
    first, second = x_BHSd.chunk(2, dim=-1)
    return x_BHSd * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    """Attention, then a dense or an MoE feed-forward network, each after a norm."""

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
        place = {"dtype": dtype, "device": device}
        self.input_layernorm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device
        )
        self.self_attn = Attention(config, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device
        )
        self.mlp: MoELayer | FeedForward
        if config.is_moe_layer(index):
            assert strategy is not None
            self.mlp = MoELayer(
                config.moe,
                config.hidden_size,
                strategy=strategy,
                groups=groups,
                placement=placement,
                recorder=recorder,
                **place,
            )
        else:
            self.mlp = FeedForward(
                config.hidden_size, config.dense_intermediate_size, gated=True, **place
            )

    def forward(
        self, x_BSD: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the block's output, its router loss and counts (None for a dense block)."""
        with self.recorder.span("attention"):
            x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary)
        with self.recorder.span("ffn"):
            normed_BSD = self.post_attention_layernorm(x_BSD)
            if isinstance(self.mlp, MoELayer):
                moe = self.mlp(normed_BSD)
                return x_BSD + moe.y, moe.router_loss, moe.counts_E
            return x_BSD + self.mlp(normed_BSD), None, None


class MoETransformer(nn.Module):
    """A language model; call ``init_weights`` or load a checkpoint before use.

    Args:
        config: the shape.
        strategy: runs the routed experts of all layers; or one for each MoE layer, in order.
        groups: where the experts live.
        activation_checkpointing: compute each block again in backward.
        placements: of the experts of each MoE layer, in order; None for the plain one.

    Raises:
        ValueError: the experts do not divide over the ranks, placements are for others, placements
            or strategies are for another number of layers, sizes are not aligned, or the parameters
            do not fit into the device's memory.
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
        sizes = {"ep_size": groups.ep_size, "tp_size": groups.tp_size}
        check_model_memory(config, dtype=dtype, device=device, **sizes)
        placement_of = _by_layer(config, placements, name="placements")
        one = isinstance(strategy, AbstractStrategy)
        strategies = [strategy] * config.num_moe_layers if one else strategy
        strategy_of = _by_layer(config, strategies, name="strategies")
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            Block(
                config,
                index,
                strategy=strategy_of.get(index),
                groups=groups,
                recorder=recorder,
                dtype=dtype,
                device=device,
                placement=placement_of.get(index),
            )
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)
        self.lm_head = nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device
        )

    def forward(self, tokens_BS: torch.Tensor) -> ModelOutput:
        """Return next-token logits of ``tokens_BS``, int64; a collective of the group."""
        x_BSD = self.embed_tokens(tokens_BS)
        rotary = rotary_table(self.config, tokens_BS.shape[1], device=x_BSD.device)
        losses: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                out = checkpoint(block, x_BSD, rotary, use_reentrant=False)
                assert isinstance(out, tuple)
                x_BSD, loss, block_counts = out
            else:
                x_BSD, loss, block_counts = block(x_BSD, rotary)
            if loss is not None:
                losses.append(loss)
                counts.append(block_counts)
        logits_BSV = self.lm_head(self.norm(x_BSD))
        router_loss = torch.stack(losses).sum() if losses else logits_BSV.new_zeros(())
        return ModelOutput(
            logits_BSV,
            router_loss.float(),
            torch.stack(counts) if counts else tokens_BS.new_zeros(0, 0),
        )

    @torch.no_grad()
    def init_weights(self, *, seed: int) -> None:
        """Fill all parameters from ``seed``, alike for every number of ranks.

        Matrices are normal with deviation 0.02, norms 1, biases 0. Each parameter, and each
        expert, has a generator of its own, so what a rank holds does not depend on the others.
        """
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{prefix}.{name}"
                if isinstance(module, RMSNorm):
                    parameter.fill_(1.0)
                elif name.endswith("bias"):
                    parameter.zero_()
                elif isinstance(module, GroupedExperts):
                    for index, expert in zip(module.expert_ids, parameter, strict=True):
                        shape, expert_name = module.whole_shape(name), f"{full_name}.{index}"
                        whole = _draw(shape, expert_name, seed=seed, device=expert.device)
                        expert.copy_(module.own_part(name, whole))
                else:
                    parameter.copy_(
                        _draw(parameter.shape, full_name, seed=seed, device=parameter.device)
                    )
            if isinstance(module, SigmoidRouter):
                module.bias.zero_()


def _by_layer(config: ModelConfig, given: Sequence[_T] | None, *, name: str) -> dict[int, _T]:
    """Return what is given for each MoE layer, by the layer's index.

    Raises:
        ValueError: it is for another number of MoE layers.
    """
    if given is None:
        return {}
    layers = [index for index in range(config.num_layers) if config.is_moe_layer(index)]
    if len(given) != len(layers):
        raise ValueError(f"{name} ({len(given)}) must be as many as MoE layers ({len(layers)})")
    return dict(zip(layers, given, strict=True))


def _draw(shape: tuple[int, ...], name: str, *, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.empty(shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, _INIT_STD, generator=generator)


def flops_per_token(config: ModelConfig, *, seq_len: int) -> float:
    """Return the floating-point operations of forward and backward for one token.

    Six per parameter that a token meets (its top-k experts only), and causal attention's two
    products over half the sequence on average.

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
