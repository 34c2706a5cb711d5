"""The routed experts of any framework: expert ids and this rank's weights in, weighted sums out.

A framework's part is to say where its weights stand (``LocalExperts``) and which ranks share them.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.ops.expert_forward import check_alignment
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy, under_autocast
from halley.strategies.registry import build_strategy, check_strategy
from halley.strategies.sequential import run_in_turn


# Rows that were brought to this rank and the local expert of each, (R, D) and (R,) int64, to the
# rows' outputs, (R, D): unweighted, differentiable in the rows and in the experts' weights.
ExpertsFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """The experts of one rank, as their framework has them.

    Attributes:
        num_local: L; the rank at place r of the group holds experts ``[r * L, (r + 1) * L)``.
        function: the framework's own arithmetic, for what no strategy knows.
        stacked: the same weights as strategies take them, views of the parameters, in a dtype of
            ``core.types.DTYPES``; None where they are laid out or used in another way.
        reason: why ``stacked`` is None, as in "activation (ReLU) must be SiLU".
    """

    num_local: int
    function: ExpertsFunction
    stacked: Experts | None = None
    reason: str = ""


@final
class ExpertParallelism:
    """Runs the experts of a framework's modules by one strategy; shared by all layers of a model.

    Args:
        strategy: a name as ``moe.strategy.build_strategy`` takes it.
        strict: where something cannot be run as asked for, True raises and False warns once, on the
            first rank, and takes the way that can.

    Raises:
        ValueError: there is no such strategy.
    """

    def __init__(self, strategy: str = "auto", *, strict: bool = False) -> None:
        check_strategy(strategy)
        self.strategy = strategy
        self.strict = strict
        self._strategies: dict[tuple[dist.ProcessGroup | None, torch.device], AbstractStrategy] = {}
        self._warned: set[str] = set()

    # Sizes are read on the host, and buffers made at the first call: a compiler stops here, and
    # goes on behind it.
    @torch.compiler.disable(reason="a graph ends at Halley's experts: fullgraph must be False")
    def run(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        experts: LocalExperts,
        *,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the sum, over each token's experts, of weight times expert output, ``(T, D)``.

        A collective of the group, forward and backward. Differentiable in ``x_TD``, the routing
        weights and the experts' weights.

        Args:
            x_TD: tokens of this rank, none included, of any floating dtype.
            routing: their experts, as global ids, and weights.
            experts: those of this rank.
            group: the ranks over which the experts are spread; None for a rank on its own.

        Returns:
            The sums, in the dtype of ``x_TD``.

        Raises:
            ValueError: shapes or expert ids do not fit; or, if strict, see ``find_problem``.
        """
        group = None if group is None or dist.get_world_size(group) == 1 else group
        experts = _under_autocast(experts)
        problem = self.find_problem(experts, top_k=routing.topk_idx_TK.shape[1], group=group)
        if problem:
            self.check(problem)
        if experts.stacked is None or problem:
            return run_in_turn(
                x_TD,
                routing,
                partial(_apply, experts),
                num_local=experts.num_local,
                group=group,
                recorder=Recorder(x_TD.device, enabled=False),
            )
        strategy = self._find_strategy(group, x_TD.device)
        rows_TD = x_TD.to(experts.stacked.up_LGD.dtype)
        return strategy.forward(rows_TD, routing, experts.stacked).to(x_TD.dtype)

    def find_problem(
        self, experts: LocalExperts, *, top_k: int, group: dist.ProcessGroup | None
    ) -> str:
        """Return why the strategy cannot run these experts, or ""; the same on all ranks."""
        if experts.stacked is None:
            return experts.reason
        weight = experts.stacked.down_LDF
        try:
            check_alignment(weight.shape[1], name="hidden_size", dtype=weight.dtype)
            check_alignment(weight.shape[2], name="intermediate_size", dtype=weight.dtype)
        except ValueError as error:
            return str(error)
        strategy = self._find_strategy(group, weight.device)
        return strategy.find_problem(experts.stacked, top_k=top_k)

    def check(self, problem: str) -> None:
        """Refuse a problem of some experts if the strategy was asked for by name.

        They can still be dispatched, run by their own function, and combined, which is what
        "sequential" does and what "auto" may choose.

        Args:
            problem: as from ``find_problem``.

        Raises:
            ValueError: strict, and the strategy is neither of these.
        """
        if self.strategy not in ("auto", "sequential"):
            self.refuse(
                f"strategy ({self.strategy}) cannot run experts of this kind: {problem}",
                instead="their own arithmetic runs, between dispatch and combine",
            )

    def describe(
        self, experts: LocalExperts, *, top_k: int, group: dist.ProcessGroup | None
    ) -> str:
        """Return how these experts run: the strategy, or by their own function and why.

        Args:
            experts: that have run, by ``run`` with the same ``top_k`` and ``group``.
        """
        group = None if group is None or dist.get_world_size(group) == 1 else group
        experts = _under_autocast(experts)
        problem = self.find_problem(experts, top_k=top_k, group=group)
        if experts.stacked is None or problem:
            return f"sequential around their own arithmetic: {problem}"
        strategy = self._find_strategy(group, experts.stacked.up_LGD.device)
        reasons = strategy.reasons if isinstance(strategy, AutoStrategy) else []
        return "; ".join([self.strategy, *reasons])

    def refuse(self, problem: str, *, instead: str) -> None:
        """Raise the problem if strict, else warn of it, once, on the first rank.

        Args:
            problem: what cannot be.
            instead: a clause that says what is done if it is not raised.

        Raises:
            ValueError: strict.
        """
        if self.strict:
            raise ValueError(problem)
        if problem not in self._warned:
            self._warned.add(problem)
            if not dist.is_initialized() or dist.get_rank() == 0:
                warnings.warn(f"{problem}; {instead}", stacklevel=2)

    def _find_strategy(
        self, group: dist.ProcessGroup | None, device: torch.device
    ) -> AbstractStrategy:
        key = group, device
        if key not in self._strategies:
            recorder = Recorder(device, enabled=False)
            self._strategies[key] = build_strategy(
                self.strategy, group, recorder=recorder, device=device
            )
        return self._strategies[key]


def mark(module: nn.Module, path: str) -> None:
    """Note on a module how it runs, for ``describe``; in no state dict, and copied as any text."""
    vars(module)["halley_path"] = path


def describe(model: nn.Module) -> dict[str, str]:
    """Return how each module of experts in a model runs, by the module's name.

    Modules whose experts are spread over ranks are there once they have run; "halley: ...", or the
    framework's name with the reason why it is not what was asked for.
    """
    return {
        name: str(vars(module)["halley_path"])
        for name, module in model.named_modules()
        if "halley_path" in vars(module)
    }


def _apply(experts: LocalExperts, x_RD: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
    num_rows = x_RD.shape[0]
    if num_rows == 0:
        # A row of zeros that is no row: backward must still reach the weights and the dispatch.
        row_1D = x_RD.sum(0, keepdim=True)
        return experts.function(row_1D, ends_L.new_zeros(1, dtype=torch.int64))[:0]
    counts_L = torch.diff(ends_L, prepend=ends_L.new_zeros(1))
    ids_L = torch.arange(experts.num_local, device=x_RD.device)
    return experts.function(x_RD, ids_L.repeat_interleave(counts_L, output_size=num_rows))


def _under_autocast(experts: LocalExperts) -> LocalExperts:
    """Return the experts in the dtype of autocast where it is on."""
    if experts.stacked is None:
        return experts
    return replace(experts, stacked=under_autocast(experts.stacked))
