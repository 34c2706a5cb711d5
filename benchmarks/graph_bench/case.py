"""A case of the graph benchmark: a model with weights and a batch on this rank, and one step."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal, final, get_args

import torch
import torch.distributed as dist

from benchmarks.graph_bench.catalogue import CatalogueShape
from benchmarks.graph_bench.gpt2_moe import ROUTERS, TOP_K, Gate, GPT2MoE, GPT2Shape, TrainingLoss
from halley.core.config import RouterConfig
from halley.distributed.mesh import ParallelGroups
from halley.moe.router import capacity
from halley.strategies.traceable import TraceableStrategy
from halley.tools.candidates import chunk_counts
from halley.tools.layer_case import relative_error


Inner = Literal["inductor", "eager"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and targets, (B, S)
# Runs forward and backward of all microbatches, adds to ``.grad``, returns the sum of the losses.
Step = Callable[[], torch.Tensor]
Values = dict[str, torch.Tensor]

SEQUENTIAL, NONE, CHUNKED, OVERLAP = "sequential", "none", "chunked", "inductor-overlap"
WGRAD, LANES, DIVIDED = "wgrad", "lanes", "divided"
VARIANTS = (NONE, SEQUENTIAL, WGRAD, LANES, DIVIDED, CHUNKED, OVERLAP)


def graph_case_name(slow_link: str) -> str:
    """Return the key "case" of the result lines, which names their file, for a slowed-down link."""
    return "graph" if slow_link == "none" else f"graph-{slow_link}"


def check_inner(name: str) -> Inner:
    """Return the inner compiler of that name.

    Raises:
        ValueError: the name is unknown.
    """
    for inner in get_args(Inner):
        if inner == name:
            return inner
    raise ValueError(f"inner ({name}) must be one of {', '.join(get_args(Inner))}")


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """A model and the options of the passes.

    Attributes:
        shape: sizes of the model.
        gate: kind of the routers of a GPT-2 model; a model of the catalogue has its own.
        batch_size: sequences of a microbatch per rank.
        num_microbatches: of a step.
        dtype: of weights and activations.
        inner: the compiler that runs after the passes.
        fixed_sizes: whether compiled variants send messages of fixed sizes: as many rows as
            ``max_load`` allows, or for a GPT-2 model without it as the capacity of the experts.
        max_load: most rows of a rank, as a multiple of those of balanced routing; 0: 1.25 for a
            model of the catalogue, none for a GPT-2 model.
        activation_budget: share of activation memory that the compiler may save for backward; it
            recomputes the rest (``torch._functorch.config.activation_memory_budget``).
        memory_margin: share by which the passes may raise peak memory.
        seed: of the tokens.

    Raises:
        ValueError: a number is out of range.
    """

    shape: GPT2Shape | CatalogueShape
    gate: Gate = "switch"
    batch_size: int
    num_microbatches: int = 1
    dtype: torch.dtype
    inner: Inner = "inductor"
    fixed_sizes: bool = False
    max_load: float = 0.0
    activation_budget: float = 1.0
    memory_margin: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch ({self.batch_size}) must be at least 1, or 0 for the model's")
        if self.num_microbatches < 1:
            raise ValueError(f"microbatches ({self.num_microbatches}) must be at least 1")
        if self.max_load != 0.0 and not 1.0 <= self.max_load < inf:
            raise ValueError(f"max_load ({self.max_load}) must be 0, or finite and at least 1")
        if self.max_load and not self.fixed_sizes:
            raise ValueError(f"max_load ({self.max_load}) must be 0 without fixed sizes")
        if not 0.0 <= self.activation_budget <= 1.0:
            raise ValueError(f"activation_budget ({self.activation_budget}) must be from 0 to 1")
        if not 0.0 <= self.memory_margin < inf:
            raise ValueError(f"memory_margin ({self.memory_margin}) must be finite and at least 0")

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch per rank."""
        return self.batch_size * self.shape.seq_len

    @property
    def num_slots(self) -> int:
        """Routed rows of a microbatch per rank before experts drop rows beyond their capacity."""
        return self.num_tokens * self.top_k

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        if isinstance(self.shape, GPT2Shape):
            return TOP_K[self.gate]
        return self.shape.config.moe.top_k

    @property
    def router(self) -> RouterConfig:
        """Configuration of the routers."""
        if isinstance(self.shape, GPT2Shape):
            return ROUTERS[self.gate]
        return self.shape.config.moe.router

    @property
    def gate_name(self) -> str:
        """Name of the kind of the routers in result lines."""
        return self.gate if isinstance(self.shape, GPT2Shape) else self.router.kind

    @property
    def is_deduplicated(self) -> bool:
        """Whether the compiled variants send a token once to each rank."""
        return self.bound > 0.0 or not isinstance(self.shape, GPT2Shape)

    @property
    def strategy(self) -> str:
        """Name of the strategy of the compiled variants."""
        return "functional:deduplicated" if self.is_deduplicated else "functional"

    @property
    def bound(self) -> float:
        """Argument ``max_load`` of the strategy; 0 for none."""
        default = 0.0 if isinstance(self.shape, GPT2Shape) else 1.25
        return (self.max_load or default) if self.fixed_sizes else 0.0

    def build(self, groups: ParallelGroups, device: torch.device) -> TrainingLoss:
        """Return the model and its loss, with random weights, or without values on "meta"."""
        strategy = TraceableStrategy(
            groups.ep,
            fixed_sizes=self.fixed_sizes and not self.is_deduplicated,
            deduplicated=self.is_deduplicated,
            max_load=self.bound,
        )
        place = {"dtype": self.dtype, "device": device}
        if isinstance(self.shape, GPT2Shape):
            return TrainingLoss(GPT2MoE(self.shape, self.gate, groups, strategy=strategy, **place))
        return TrainingLoss(self.shape.build(groups, strategy=strategy, **place))

    def settings(self, variant: str) -> list[str]:
        """Return the settings at which a variant runs; chunks divide the experts of a rank."""
        if variant != CHUNKED:
            return [""]
        return [f"n={n}" for n in chunk_counts(self.shape.experts_per_rank)]

    def options(self, passes: str) -> dict[str, object]:
        """Return the options of the backend "halley" for these passes, without profiles."""
        return {
            "passes": passes,
            "inner": self.inner,
            "memory_margin": self.memory_margin,
            "unknown_size": self.num_slots,  # rows per rank if the load is balanced
        }


@final
class GraphSubject:
    """Two models that share their parameters, and the microbatches of this rank.

    Attributes:
        whole: the model for the compiler; it never changes, so that it is not compiled again.
        plain: the model for eager mode, whose strategy can be replaced.
    """

    def __init__(self, case: GraphCase, groups: ParallelGroups, device: torch.device) -> None:
        self._case, self._groups = case, groups
        self.whole = case.build(groups, device)
        self.plain = case.build(groups, torch.device("meta"))
        self.plain.load_state_dict(self.whole.state_dict(keep_vars=True), assign=True)
        generator = torch.Generator().manual_seed(1_000_003 * case.seed + groups.rank)
        shape = (case.num_microbatches * case.batch_size, case.shape.seq_len + 1)
        text = torch.randint(case.shape.vocab_size, shape, generator=generator).to(device)
        self.tokens_BS = text[:, :-1].contiguous()
        self.targets_BS = text[:, 1:].contiguous()

    @torch.no_grad()
    def fullest_rows(self) -> int:
        """Return the rows of the most loaded rank, as the mean over layers; a collective.

        The other ranks wait for that rank. Capacity limits reduce the number of rows, and a skewed
        load increases it.

        Raises:
            ValueError: a rank has more rows than ``max_load`` allows; on all ranks.
        """
        outputs = [self.plain.model(each) for each in self.tokens_BS.split(self._case.batch_size)]
        self.check_finite(torch.stack([each.logits_BSV.sum() for each in outputs]), what="logits")
        counts_ME = outputs[0].counts_ME
        factor = self._case.router.capacity_factor
        if factor:
            num_experts = counts_ME.shape[1]
            counts_ME = counts_ME.clamp_max(
                capacity(factor, self._case.num_slots, num_experts=num_experts)
            )
        rows_MR = counts_ME.unflatten(1, (self._groups.ep_size, -1)).sum(2)
        if self._groups.ep is not None:
            dist.all_reduce(rows_MR, group=self._groups.ep)
        return max(1, round(rows_MR.amax(1).double().mean().item()))

    def check_finite(self, values: torch.Tensor, *, what: str) -> None:
        """Raise a ValueError on all ranks unless all ``values`` of all ranks are finite."""
        number = values.isfinite().logical_not().sum()
        if self._groups.ep is not None:
            dist.all_reduce(number, group=self._groups.ep)
        if number.item():
            bound = self._case.bound
            rule = f"max_load ({bound}) must be larger: " if bound else ""
            reason = ", as with more rows than it allows" if bound else ""
            raise ValueError(
                f"{rule}the {what} of {number.item()} microbatches of all ranks are not finite"
                f"{reason}"
            )

    def one_after_another(self, loss: Loss) -> Step:
        """Return a step that finishes each microbatch before the next one."""

        def run() -> torch.Tensor:
            total = torch.zeros((), device=self.tokens_BS.device)
            size = self._case.batch_size
            for batch in zip(self.tokens_BS.split(size), self.targets_BS.split(size), strict=True):
                value = loss(*batch)
                value.backward()
                total += value.detach()
            return total

        return run

    def run(self, step: Step) -> None:
        """Run a step; a collective. Leaves no gradient."""
        step()
        self.whole.zero_grad()

    def values(self, step: Step) -> Values:
        """Return the loss and all gradients of a step by name; a collective."""
        found = {"loss": step()}
        for name, parameter in self.whole.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
        self.whole.zero_grad()
        return {name: value.detach() for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between two sets of values on this rank.

    Attributes:
        max_rel_err: the largest relative error, as in ``halley.tools.layer_case``.
        names: of the values that are not equal bit for bit.
    """

    max_rel_err: float
    names: tuple[str, ...]


def compare(values: Values, wanted: Values) -> Difference:
    """Compare values with the expected ones.

    Raises:
        RuntimeError: the names of the gradients differ.
    """
    if values.keys() != wanted.keys():
        raise RuntimeError(f"gradients differ in number: {sorted(values.keys() ^ wanted.keys())}")
    differing = [name for name, value in values.items() if not torch.equal(value, wanted[name])]
    errors = [relative_error(values[name], wanted[name]) for name in differing]
    return Difference(max_rel_err=max(errors, default=0.0), names=tuple(differing))
