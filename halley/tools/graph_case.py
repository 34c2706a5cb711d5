"""A model for the benchmark of graphs: its weights and batch on this rank, and one step of it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal, final, get_args

import torch
import torch.distributed as dist

from halley.distributed.mesh import ParallelGroups
from halley.moe.router import capacity
from halley.strategies.functional import FunctionalStrategy
from halley.tools.gpt2_moe import ROUTERS, TOP_K, Gate, GPT2MoE, GPT2Shape, TrainingLoss
from halley.tools.tolerance import relative_error


Inner = Literal["inductor", "eager"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and targets, (B, S)
Values = dict[str, torch.Tensor]

SEQUENTIAL, NONE, CHUNKED, OVERLAP = "sequential", "none", "chunked", "inductor-overlap"
WITH_PASSES = ("both", "wgrad", "partition")
VARIANTS: tuple[str, ...] = (NONE, SEQUENTIAL, *WITH_PASSES, CHUNKED, OVERLAP)
_CHUNKS = (2, 3, 4, 8)
MAX_PARTS = 8  # as the passes' options have it, which bring torch's compiler


def graph_case_name(slow_link: str) -> str:
    """Return the name of result lines, and of their file, by how NCCL is slowed down."""
    return "graph" if slow_link == "none" else f"graph-{slow_link}"


def check_inner(name: str) -> Inner:
    """Return the inner compiler of that name.

    Raises:
        ValueError: there is none.
    """
    for inner in get_args(Inner):
        if inner == name:
            return inner
    raise ValueError(f"inner ({name}) must be one of {', '.join(get_args(Inner))}")


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """What to measure.

    Attributes:
        shape: of the model.
        gate: of its routers.
        batch_size: sequences of each rank.
        dtype: of weights and activations.
        inner: what compiles graphs once passes have run.
        num_parts: of the batch, in the passes that divide; 0 lets them choose.
        memory_margin: by what share the passes may raise the peak.
        seed: of the tokens.

    Raises:
        ValueError: a number is not allowed.
    """

    shape: GPT2Shape
    gate: Gate = "switch"
    batch_size: int
    dtype: torch.dtype
    inner: Inner = "inductor"
    num_parts: int = 0
    memory_margin: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch ({self.batch_size}) must be at least 1, or 0 for the model's")
        if self.num_parts != 0 and not 2 <= self.num_parts <= MAX_PARTS:
            raise ValueError(f"num_parts ({self.num_parts}) must be 0, or 2 to {MAX_PARTS}")
        if self.num_parts and self.batch_size % self.num_parts:
            raise ValueError(f"num_parts ({self.num_parts}) must divide batch ({self.batch_size})")
        if not 0.0 <= self.memory_margin < inf:
            raise ValueError(f"memory_margin ({self.memory_margin}) must be finite and at least 0")

    @property
    def num_tokens(self) -> int:
        """Tokens of each rank."""
        return self.batch_size * self.shape.seq_len

    @property
    def num_slots(self) -> int:
        """Experts that the tokens of each rank pick together, those that are full included."""
        return self.num_tokens * TOP_K[self.gate]

    def settings(self, variant: str) -> list[str]:
        """Return the settings at which a variant runs; chunks are of a rank's experts."""
        if variant != CHUNKED:
            return [""]
        return [f"n={n}" for n in _CHUNKS if n <= self.shape.experts_per_rank] or ["n=1"]

    def options(self, passes: str) -> dict[str, object]:
        """Return what the backend "halley" is told for a list of passes, but of profiles."""
        return {
            "passes": passes,
            "inner": self.inner,
            "num_parts": self.num_parts,
            "memory_margin": self.memory_margin,
            "unknown_size": self.num_slots,  # rows of a rank if load is even
        }


@final
class GraphSubject:
    """A model with weights, twice over the same parameters, and a batch of this rank.

    Attributes:
        whole: the one that is compiled; its layers never change, so that nothing compiles again.
        plain: the one that runs operator by operator, with a strategy of one's choice.
    """

    def __init__(self, case: GraphCase, groups: ParallelGroups, device: torch.device) -> None:
        def build(place: torch.device | str) -> GPT2MoE:
            strategy = FunctionalStrategy(groups.ep)
            return GPT2MoE(
                case.shape, case.gate, groups, strategy=strategy, dtype=case.dtype, device=place
            )

        self._case, self._groups = case, groups
        model, twin = build(device), build("meta")
        twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
        self.whole, self.plain = TrainingLoss(model), TrainingLoss(twin)
        generator = torch.Generator().manual_seed(1_000_003 * case.seed + groups.rank)
        shape = (case.batch_size, case.shape.seq_len + 1)
        text = torch.randint(case.shape.vocab_size, shape, generator=generator).to(device)
        self.tokens_BS = text[:, :-1].contiguous()
        self.targets_BS = text[:, 1:].contiguous()

    @torch.no_grad()
    def fullest_rows(self) -> int:
        """Return how many rows the fullest rank receives in a layer, over layers; a collective.

        Others wait for it. Experts that are full take fewer than the slots, popular ones more than
        a rank's share.
        """
        counts_ME = self.plain.model(self.tokens_BS).counts_ME
        factor = ROUTERS[self._case.gate].capacity_factor
        if factor:
            num_experts = counts_ME.shape[1]
            counts_ME = counts_ME.clamp_max(
                capacity(factor, self._case.num_slots, num_experts=num_experts)
            )
        rows_MR = counts_ME.unflatten(1, (self._groups.ep_size, -1)).sum(2)
        if self._groups.ep is not None:
            dist.all_reduce(rows_MR, group=self._groups.ep)
        return max(1, round(rows_MR.amax(1).double().mean().item()))

    def step(self, loss: Loss) -> None:
        """Run forward and backward; a collective. Leaves no gradient."""
        loss(self.tokens_BS, self.targets_BS).backward()
        self.whole.zero_grad()

    def values(self, loss: Loss) -> Values:
        """Return the loss and all gradients of a step, by name; a collective."""
        found = {"loss": loss(self.tokens_BS, self.targets_BS)}
        found["loss"].backward()
        for name, parameter in self.whole.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
        self.whole.zero_grad()
        return {name: value.detach() for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far values are from others, on this rank.

    Attributes:
        max_rel_err: of the worst, see ``core.tolerance``.
        names: of those that are not equal bit for bit.
    """

    max_rel_err: float
    names: tuple[str, ...]


def compare(values: Values, wanted: Values) -> Difference:
    """Return how far the values are from those wanted.

    Raises:
        RuntimeError: there are other gradients than those wanted.
    """
    if values.keys() != wanted.keys():
        raise RuntimeError(f"gradients differ in number: {sorted(values.keys() ^ wanted.keys())}")
    differing = [name for name, value in values.items() if not torch.equal(value, wanted[name])]
    errors = [relative_error(values[name], wanted[name]) for name in differing]
    return Difference(max_rel_err=max(errors, default=0.0), names=tuple(differing))
