"""The dense modules of a transformer, with the parameter names of Hugging Face, and the loss."""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.config import ModelConfig


_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled_on_gpu(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function: run it compiled if a positional argument is on a GPU, else in eager mode.

    Inductor fuses the operators. Inside a compiled model, they become part of the model's graph.
    """

    @cache  # compile at the first call, because an import must not start the compiler
    def compiled() -> Callable[_P, _T]:
        return torch.compile(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return compiled()(*args, **kwargs) if on_gpu else function(*args, **kwargs)

    return call


class FeedForward(nn.Module):
    """A dense feed-forward network without biases: SwiGLU if ``gated``, else GELU."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        self.gate_proj = linear(hidden_size, intermediate_size) if gated else None
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and optional norms of q and k."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        place = {"dtype": dtype, "device": device}
        linear = partial(nn.Linear, config.hidden_size, bias=config.attention_bias, **place)
        self.q_proj, self.k_proj, self.v_proj = linear(size), linear(kv_size), linear(kv_size)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False, **place)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm != "none":
            sizes = (size, kv_size) if config.qk_norm == "full" else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (nn.RMSNorm(n, config.norm_eps, **place) for n in sizes)

    def forward(self, x_BSD: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Return the output, ``(B, S, D)``; ``rotary`` is a ``rotary_table`` for S positions."""
        q, k = self.q_proj(x_BSD), self.k_proj(x_BSD)
        full = self.config.qk_norm == "full"  # whether one norm spans all heads
        if full:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._heads(q), self._heads(k), self._heads(self.v_proj(x_BSD))
        if not full:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        shared = self.config.num_kv_heads != self.config.num_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return x_BSH.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)


def rotary_table(config: ModelConfig, seq_len: int, *, device: torch.device | str) -> torch.Tensor:
    """Return the cosines, then the sines of rotary angles, ``(2, seq_len, head_dim)`` float32.

    Element i rotates with element i + head_dim / 2, as in Hugging Face. Source: arXiv:2104.09864.
    """
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    angle = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return torch.stack([angle.cos(), angle.sin()])


@compiled_on_gpu
def rotate(x_BHSd: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return queries or keys ``(B, heads, S, head_dim)``, rotated by a ``rotary_table``."""
    cos, sin = rotary.to(x_BHSd.dtype)
    first, second = x_BHSd.chunk(2, dim=-1)
    return x_BHSd * cos + torch.cat([-second, first], dim=-1) * sin


@compiled_on_gpu
def next_token_loss(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits and target tokens, in nats, a float32 scalar."""
    # On a GPU, the compiled loss stores no float32 copy of the logits: ``float()`` is fused.
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
