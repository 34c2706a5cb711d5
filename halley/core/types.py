"""The types that the whole package shares: routing, experts, the dispatch plan and layer sizes.

Shape letters, used as suffixes of tensor names in the whole package (x_TD is (T, D)):

  T  tokens of this rank           D  hidden size
  K  experts per token (top-k)     F  intermediate size of an expert
  E  experts of all ranks          G  columns of the first GEMM: 2 F (gate, up) or F
  L  experts of this rank, E / W   W  ranks of the expert-parallel group
  N  routed slots, T * K           R  rows received by this rank
  B  sequences of a batch          S  positions of a sequence
  C  chunks of a pipelined layer   V  vocabulary
  M  MoE layers of a model         X  any further dimensions
  P  token copies of this rank     J  column tiles of a GEMM
  H  halves of the send buffer, 2  A  tokens of all ranks, padded

In a GEMM kernel, M, N and K are the rows, the columns and the depth of one expert's output.

With ``tp_size`` above 1 or with spare experts, L is larger than E / W. A suffix 1 means one more:
``starts_E1`` has E + 1 entries. Some files use a letter for another size; their module docstring
then says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from halley.core.validation import check_choice


Activation = Literal["swiglu", "gelu"]
# Activations that a fused layer saves for backward. "all": the input rows of the experts and the
# input of the activation. "inputs": each received row once. "recompute": none, so backward
# dispatches the rows again.
Save = Literal["all", "inputs", "recompute"]
MAX_EXPERTS = 2**15 - 1  # sort keys are int16
DROPPED = -1  # expert id of a slot beyond an expert's capacity
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The router's decision: the experts of each token and their weights.

    Slot ``t * K + k`` is the k-th choice of token t.

    Attributes:
        topk_idx_TK: int64 expert ids in ``[0, E)``, or ``DROPPED``. The ids of one token differ.
        topk_weights_TK: float32 weights of the combine, 0 where a slot is dropped. A token's
            weights need not sum to 1.
    """

    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of one rank's experts, or of a contiguous range of them.

    The layout equals that of Hugging Face's stacked experts: gate rows first, then up rows.

    Attributes:
        up_LGD: weights of the first GEMM, ``(L, 2F, D)`` for swiglu, ``(L, F, D)`` for gelu.
        down_LDF: weights of the second GEMM, ``(L, D, F)``.
        up_bias_LG, down_bias_LD: biases of the two GEMMs, or None.
        activation: "swiglu" is ``silu(gate) * up``; "gelu" is the exact (erf) form.
    """

    up_LGD: torch.Tensor
    down_LDF: torch.Tensor
    up_bias_LG: torch.Tensor | None = None
    down_bias_LD: torch.Tensor | None = None
    activation: Activation = "swiglu"

    def __post_init__(self) -> None:
        # torch.compile evaluates this comparison while tracing, so it need not trace check_choice.
        if self.activation not in ("swiglu", "gelu"):
            check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def num_local_experts(self) -> int:
        return self.up_LGD.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, and the biases that exist, by attribute name."""
        names = ("up_LGD", "down_LDF", "up_bias_LG", "down_bias_LD")
        found: dict[str, torch.Tensor | None] = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "Experts":
        """Return a copy in which the given attributes have other tensors."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def split(self, sizes: list[int]) -> list["Experts"]:
        """Return consecutive ranges of experts as views, one range per given size."""
        tensors = self.tensors()
        ranges = zip(*(torch.split(each, sizes) for each in tensors.values()), strict=True)
        return [self.with_tensors(dict(zip(tensors, each, strict=True))) for each in ranges]


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """How many routed rows this rank sends to and receives from each rank, for some local experts.

    The local experts are a contiguous range, the same on every rank. A rank sends its rows sorted
    by expert, which is also the order of destination ranks. Rows arrive sorted by source rank, then
    by expert. A grouped GEMM needs the rows of each expert to be contiguous:
    ``routing.order_by_expert`` gives that order. Dispatch, combine and backward use the same plan.

    Attributes:
        starts_WL1: int64. For each source rank, it holds the index of each expert's first row among
            all rows that the source sends, then the end of the last expert's rows.
    """

    num_local: int  # local experts in the range
    send_splits: list[int]  # rows sent to each rank
    recv_splits: list[int]  # rows received from each rank
    starts_WL1: np.ndarray

    @property
    def num_send(self) -> int:
        return sum(self.send_splits)

    @property
    def num_recv(self) -> int:
        return sum(self.recv_splits)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes that determine the cost of an MoE layer on one rank."""

    num_tokens: int  # of one rank
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    itemsize: int = 2  # bytes per element of the activations
    activation: Activation = "swiglu"

    def __post_init__(self) -> None:
        check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def up_size(self) -> int:
        """Columns of the first GEMM, G."""
        return self.intermediate_size * (2 if self.activation == "swiglu" else 1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work for the simulator.

    ``stream`` is "compute", "comm" or "host". Tasks of one stream of one rank run one at a time.
    """

    name: str  # unique in the list of tasks
    stream: str
    duration_us: float  # the time that the task takes alone
    needs: tuple[str, ...] = ()  # names of tasks, of any rank, that end before this one starts
    rank: int = 0
