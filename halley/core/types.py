"""The nouns of the project: how tokens are routed, where they go, what multiplies them.

Shape letters, used as suffixes of tensor names in the whole package (x_TD is (T, D)):

  T  tokens of this rank           D  hidden size
  K  experts per token (top-k)     F  intermediate size of an expert
  E  experts of all ranks          G  columns of the first GEMM: 2 F (gate, up) or F
  L  experts of this rank, E / W   W  ranks of the expert-parallel group
  N  routed slots, T * K           R  rows received by this rank
  B  sequences of a batch          S  positions of a sequence
  C  chunks of a pipelined layer   V  vocabulary
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from halley.core.field_types import check_choice


Activation = Literal["swiglu", "gelu"]
# What fused layers keep for backward: the rows of their experts and what the activation was made
# of; each row once, however many experts want it; or nothing, as rows are dispatched again.
Save = Literal["all", "inputs", "recompute"]
MAX_EXPERTS = 2**15 - 1  # slots are sorted by expert ids packed into int16
DROPPED = -1  # expert id of a slot that capacity dropped
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What the router decided: for each token, its experts and their weights.

    Slot ``t * K + k`` is the k-th choice of token t.

    Attributes:
        topk_idx_TK: expert ids in ``[0, E)``, or ``DROPPED``, int64; those of a token differ.
        topk_weights_TK: weights of the combine, float32; 0 where dropped; rows need not sum to 1.
    """

    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of the experts that live on one rank, or a contiguous range of them.

    The layout is that of Hugging Face's stacked experts: gate rows first, then up rows.

    Attributes:
        up_LGD: first projection, ``(L, 2F, D)`` for swiglu, ``(L, F, D)`` for gelu.
        down_LDF: second projection, ``(L, D, F)``.
        up_bias_LG: bias of the first projection, or None.
        down_bias_LD: bias of the second projection, or None.
        activation: "swiglu" is ``silu(gate) * up``; "gelu" is the exact (erf) form.

    Raises:
        ValueError: there is no such activation.
    """

    up_LGD: torch.Tensor
    down_LDF: torch.Tensor
    up_bias_LG: torch.Tensor | None = None
    down_bias_LD: torch.Tensor | None = None
    activation: Activation = "swiglu"

    def __post_init__(self) -> None:
        if self.activation not in ("swiglu", "gelu"):  # in traced code, a constant
            check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def num_local_experts(self) -> int:
        return self.up_LGD.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, and the biases if there are any, by attribute."""
        names = ("up_LGD", "down_LDF", "up_bias_LG", "down_bias_LD")
        found: dict[str, torch.Tensor | None] = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "Experts":
        """Return the experts with other weights or biases, by attribute."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def split(self, sizes: list[int]) -> list["Experts"]:
        """Return consecutive ranges of experts as views, one of each given size."""
        parts = {name: torch.split(tensor, sizes) for name, tensor in self.tensors().items()}
        return [
            self.with_tensors({name: part[index] for name, part in parts.items()})
            for index in range(len(sizes))
        ]


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the routed rows of a range of local experts go; dispatch, combine and backward read it.

    The range is the same on every rank. A rank sends its rows sorted by expert, so they leave in
    order of destination rank. They arrive sorted by source rank, then expert, and are gathered in
    order of expert (``routing.order_by_expert``), where the rows of one expert are contiguous and a
    grouped GEMM can read them.

    Attributes:
        num_local: how many local experts the plan is for.
        send_splits: rows sent to each rank.
        recv_splits: rows received from each rank.
        starts_WL1: where each expert's rows start among those that each rank sends to all ranks,
            then where the last one's end, int64.
    """

    num_local: int
    send_splits: list[int]
    recv_splits: list[int]
    starts_WL1: np.ndarray

    @property
    def num_send(self) -> int:
        return sum(self.send_splits)

    @property
    def num_recv(self) -> int:
        return sum(self.recv_splits)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes that decide what an MoE layer costs on one rank.

    Attributes:
        num_tokens: tokens of one rank, T.
        itemsize: bytes of one element of the activations.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    itemsize: int = 2
    activation: Activation = "swiglu"

    def __post_init__(self) -> None:
        check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def up_size(self) -> int:
        """Columns of the first GEMM, G."""
        return self.intermediate_size * (2 if self.activation == "swiglu" else 1)
