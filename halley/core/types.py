"""The types that the whole package shares, and checks of routing and of numbers of ranks.

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

from halley.core.validation import check_choice, check_type


Activation = Literal["swiglu", "gelu"]
# Tensors that a fused layer saves for backward: "all" saves the input rows of the experts and the
# input of the activation, "inputs" each received token once, "recompute" nothing (backward
# dispatches the tokens again).
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
        capacity: the most slots of this rank that an expert keeps; None if there is no limit.
    """

    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    capacity: int | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of one rank's experts, or of a contiguous range of them.

    The layout equals that of Hugging Face's stacked experts: gate rows first, then up rows.

    Attributes:
        up_LGD: weights of the first GEMM, ``(L, 2F, D)`` for swiglu, ``(L, F, D)`` for gelu.
        down_LDF: weights of the second GEMM, ``(L, D, F)``.
        activation: "swiglu" is ``silu(gate) * up``; "gelu" is the exact (erf) form.
        sources: empty, or the tensors of which ``up_LGD`` and ``down_LDF`` are copies: gate and up,
            both ``(L, F, D)``, and down ``(L, D, F)``, of any floating dtype. A strategy may then
            return the gradients of these tensors, and none of the copies.
    """

    up_LGD: torch.Tensor
    down_LDF: torch.Tensor
    up_bias_LG: torch.Tensor | None = None
    down_bias_LD: torch.Tensor | None = None
    activation: Activation = "swiglu"
    sources: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        # Compare here, so that torch.compile traces check_choice only if the value is wrong.
        if self.activation not in ("swiglu", "gelu"):
            check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def num_local_experts(self) -> int:
        return self.up_LGD.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the experts' weights, and the biases that exist, by attribute name."""
        names = ("up_LGD", "down_LDF", "up_bias_LG", "down_bias_LD")
        found: dict[str, torch.Tensor | None] = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "Experts":
        """Return a copy in which attributes named in ``tensors`` are replaced, without sources."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes, sources=())

    def split(self, sizes: list[int]) -> list["Experts"]:
        """Return views of consecutive ranges of the experts; range i has ``sizes[i]`` experts."""
        tensors = self.tensors()
        ranges = zip(*(torch.split(each, sizes) for each in tensors.values()), strict=True)
        return [self.with_tensors(dict(zip(tensors, each, strict=True))) for each in ranges]


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """How many rows this rank sends to and receives from each rank, for a range of local experts.

    The range is the same on every rank. A rank sends its rows sorted by expert, which is also the
    order of destination ranks. Rows arrive sorted by source rank, then by expert. For a grouped
    GEMM, ``routing.order_by_expert`` sorts them. Dispatch, combine and backward use the same plan.

    ``starts_WL1``, int64, has for each source rank the index of each expert's first row among all
    rows that the source sends, then the end of the last expert's rows.
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
    num_groups: int = 1  # equal groups of consecutive experts; a token uses few of the groups
    num_limited_groups: int = 1  # groups that a token may use

    def __post_init__(self) -> None:
        check_choice(self.activation, get_args(Activation), name="activation")

    @property
    def up_size(self) -> int:
        """Number of columns of the first GEMM's output, G."""
        return self.intermediate_size * (2 if self.activation == "swiglu" else 1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work that the simulator schedules.

    ``stream`` is "compute", "comm" or "host". Tasks of one stream of one rank run one at a time.
    """

    name: str  # unique in the list of tasks
    stream: str
    duration_us: float  # the time that the task takes alone
    needs: tuple[str, ...] = ()  # names of tasks, of any rank, that must end before this one
    rank: int = 0
    memory_share: float = 0.0  # of a "compute" task: share of the time that memory limits


def check_routing(routing: Routing, *, num_tokens: int, num_experts: int) -> None:
    """Raise a ``ValueError`` for wrong shapes, dtypes or top-k, and on CPUs for wrong expert ids.

    The ids are not checked on a GPU, because the host would wait for it, nor inside
    ``torch.compile``, which traces without values.
    """
    idx, weights = routing.topk_idx_TK, routing.topk_weights_TK
    shape = tuple(idx.shape)
    if idx.ndim != 2 or idx.shape[0] != num_tokens:
        rule = f"(num_tokens, top_k) with num_tokens {num_tokens}"
        raise ValueError(f"topk_idx {shape} must be {rule}")
    if weights.shape != idx.shape:
        raise ValueError(f"topk_weights {tuple(weights.shape)} must have topk_idx's shape {shape}")
    if idx.dtype != torch.int64:
        raise ValueError(f"topk_idx dtype ({idx.dtype}) must be torch.int64")
    if not weights.dtype.is_floating_point:
        raise ValueError(f"topk_weights dtype ({weights.dtype}) must be a floating dtype")
    if idx.shape[1] > num_experts:
        raise ValueError(f"top_k ({idx.shape[1]}) must be at most num_experts ({num_experts})")
    if not idx.is_cuda and not torch.compiler.is_compiling() and idx.numel():
        least, largest = int(idx.min()), int(idx.max())
        if least < DROPPED or largest >= num_experts:
            wrong = least if least < DROPPED else largest
            rule = f"an expert below num_experts ({num_experts}), or {DROPPED} where dropped"
            raise ValueError(f"topk_idx ({wrong}) must be {rule}")


def local_experts(num_experts: int, *, ep_size: int, tp_size: int = 1) -> int:
    """Return L: how many experts, or tensor-parallel shards of them, each of ``ep_size`` ranks has.

    Raises a ``ValueError`` if the experts do not divide evenly over the ranks.
    """
    if ep_size < 1:
        raise ValueError(f"ep_size ({ep_size}) must be at least 1")
    if tp_size < 1 or ep_size % tp_size:
        raise ValueError(f"tp_size ({tp_size}) must divide ep_size ({ep_size})")
    if num_experts * tp_size % ep_size != 0:
        divisor = f"ep_size ({ep_size})" + (f" / tp_size ({tp_size})" if tp_size > 1 else "")
        raise ValueError(f"num_experts ({num_experts}) must be divisible by {divisor}")
    return num_experts * tp_size // ep_size


def check_tp_size(tp_size: int, *, num_ranks: int) -> None:
    """Raise a ``ValueError`` unless ``num_ranks`` ranks divide into groups of ``tp_size`` ranks."""
    check_type(tp_size, int, name="tp_size")
    if tp_size < 1 or num_ranks % tp_size:
        rule = f"at least 1 and divide the ranks of the group ({num_ranks})"
        raise ValueError(f"tp_size ({tp_size}) must be {rule}")
