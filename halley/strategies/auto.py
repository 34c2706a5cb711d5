"""Choose the fastest strategy by measuring all candidates in the first call of a kind of layer."""

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task, makespan_us
from halley.distributed.peers import Collective, compare_ranks, rank_and_size
from halley.strategies.base import AbstractStrategy, check_inputs, wants_gradients
from halley.symm_mem.access import peer_access


_NUM_SAMPLES = 3


class _Kind(NamedTuple):
    """A kind of layer. The values are equal on all ranks, so that all measure in the same call."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    element_bytes: int
    activation: str
    expert_bias: bool
    gradients: bool


@final
class AutoStrategy(AbstractStrategy):
    """Runs each kind of layer by the strategy that was fastest in its first call.

    The first call of a kind runs every candidate several times, in alternation, on the inputs of
    that call, with backward if gradients are needed. The time of a candidate is the time of its
    slowest rank, so all ranks choose the same strategy.

    Args:
        candidates: strategies by name; one of them is "chunked".
        group: the ranks over which the experts are spread; None for a single rank.
        device: device of this rank.
        recorder: recorder of the candidates; disabled during the measurement.
        shares_memory: names of the candidates that need symmetric memory.
        left_out: why other strategies are no candidates, by name.
        releases: free the buffers of the candidates in symmetric memory if no kind chose one.
    """

    def __init__(
        self,
        candidates: dict[str, AbstractStrategy],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        recorder: Recorder,
        shares_memory: tuple[str, ...] = ("unfused", "fused"),
        left_out: Mapping[str, str] = MappingProxyType({}),
        releases: bool = False,
    ) -> None:
        self.candidates = candidates
        self.group, self.device, self.recorder = group, torch.device(device), recorder
        self.tp_size = next(iter(candidates.values())).tp_size
        self.num_sets = rank_and_size(group)[1] // self.tp_size
        self._shares_memory, self._releases = shares_memory, releases
        self._left_out = left_out
        # Why there is no symmetric memory; None before the first check, "" if it is available.
        self._no_access = None if set(shares_memory) & set(candidates) else ""
        self._choices: dict[_Kind, str] = {}
        self._reasons: dict[_Kind, str] = {}
        self._times_us: dict[_Kind, dict[str, float]] = {}

    @property
    def gemm(self) -> str:
        return "that of the chosen strategy"

    @property
    def reasons(self) -> list[str]:
        """The choice for each kind of layer so far and its reason, one sentence each."""
        return list(self._reasons.values())

    def choice(self, shape: LayerShape, *, gradients: bool) -> str:
        """Return the name of the strategy chosen for a layer without biases; "" before its call.

        Args:
            shape: sizes of the layer; the number of tokens is ignored.
            gradients: the choice for calls with backward.
        """
        return self._choices.get(_kind_of(shape, gradients=gradients), "")

    def times_us(self, shape: LayerShape, *, gradients: bool) -> dict[str, float]:
        """Return the measured time of each candidate; empty if nothing was measured.

        Args:
            shape, gradients: as for ``choice``.
        """
        return dict(self._times_us.get(_kind_of(shape, gradients=gradients), {}))

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        weight, gradients = experts.down_LDF, wants_gradients(x_TD, routing, experts)
        kind = _Kind(
            hidden_size=weight.shape[1],
            intermediate_size=weight.shape[2] * self.tp_size,
            num_experts=weight.shape[0] * self.num_sets,
            top_k=routing.topk_idx_TK.shape[1],
            element_bytes=weight.itemsize,
            activation=experts.activation,
            expert_bias=experts.up_bias_LG is not None,
            gradients=gradients,
        )
        name = self._choices.get(kind)
        if name is None:
            check_inputs(x_TD, experts)
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "strategy auto chooses by measuring: run the layer once before torch.compile"
                )
            name = self._decide(kind, x_TD, routing, experts)
        return self.candidates[name].forward(x_TD, routing, experts)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return the tasks of the strategy chosen for training, or of the predicted fastest."""
        if name := self.choice(shape, gradients=True):
            return self.candidates[name].tasks(shape, predictor)
        return min((s.tasks(shape, predictor) for s in self.candidates.values()), key=makespan_us)

    def _decide(self, kind: _Kind, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> str:
        values: dict[str, object] = kind._asdict()
        values |= {"strategy": "auto", "candidates": ", ".join(self.candidates)}
        values |= {"tp_size": self.tp_size, "device": self.device.type}
        compare_ranks("an MoE layer", values, group=self.group)
        names, problems = self._find_able(experts, top_k=kind.top_k)
        direction = "with backward" if kind.gradients else "forward"
        text = f"hidden_size {kind.hidden_size}, {kind.num_experts} experts, "
        text += f"top_k {kind.top_k}, {direction}: "
        if self._no_access:
            name = "chunked"
            text += f"chunked, as the fused kernels cannot run here: {self._no_access}"
        else:
            times_us, out_of_memory = self._measure(
                names, x_TD, routing, experts, gradients=kind.gradients
            )
            problems |= out_of_memory
            self._times_us[kind] = times_us
            name = min(times_us, key=lambda name: times_us[name])
            shown = ", ".join(f"{name} {us:.0f} us" for name, us in times_us.items())
            text += f"{name} is fastest of {shown}"
            text += "".join(f"; not {name}: {why}" for name, why in problems.items())
        self._choices[kind], self._reasons[kind] = name, text
        if self._releases and not set(self._shares_memory) & set(self._choices.values()):
            for each in set(self._shares_memory) & set(names):
                self.candidates[each].release()
        return name

    def _find_able(self, experts: Experts, *, top_k: int) -> tuple[list[str], dict[str, str]]:
        """Return the names of the candidates that can run a layer, and why the others cannot."""
        if self._no_access is None:
            self._no_access = peer_access(self.group, self.device)
        problems = dict(self._left_out)
        for name, strategy in self.candidates.items():
            problem = strategy.find_problem(experts, top_k=top_k)
            if name in self._shares_memory and self._no_access:
                problem = self._no_access
            if problem:
                problems[name] = problem
        return [name for name in self.candidates if name not in problems], problems

    def _measure(
        self,
        names: list[str],
        x_TD: torch.Tensor,
        routing: Routing,
        experts: Experts,
        *,
        gradients: bool,
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return the time of each candidate, and why others ran out of memory; a collective.

        The results are the same on all ranks.
        """
        # Separate leaves: backward must end at the layer, keep the caller's graph, and not add to
        # gradient buffers that are attributes of the caller's weights.
        leaves: list[torch.Tensor] = []

        def make_leaf(tensor: torch.Tensor) -> torch.Tensor:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            leaves.extend([leaf] if leaf.requires_grad else [])
            return leaf

        x_TD = make_leaf(x_TD)
        routing = replace(routing, topk_weights_TK=make_leaf(routing.topk_weights_TK))
        weights = {name: make_leaf(tensor) for name, tensor in experts.tensors().items()}
        experts = experts.with_tensors(weights)

        def run(name: str) -> None:
            y_TD = self.candidates[name].forward(x_TD, routing, experts)
            if gradients:
                torch.autograd.grad(y_TD, leaves, torch.zeros_like(y_TD))

        problems: dict[str, str] = {}
        enabled, self.recorder.enabled = self.recorder.enabled, False
        # Hides these calls from the caller's hooks, such as those of activation checkpointing.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            for name in names:
                try:
                    run(name)  # allocates buffers and compiles
                except MemoryError as error:  # raised on all ranks
                    problems[name] = str(error)
            names = [name for name in names if name not in problems]
            samples = torch.zeros(_NUM_SAMPLES, len(names), dtype=torch.float64)
            for sample in samples:
                for index, name in enumerate(names):
                    start = self._now()
                    run(name)
                    sample[index] = self._now() - start
        self.recorder.enabled = enabled
        slowest = samples.to(self.device)
        if self.group is not None:
            with Collective("the maximum of measured times", group=self.group):
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        medians_us = [median(column) * 1e6 for column in slowest.t().tolist()]
        return dict(zip(names, medians_us, strict=True)), problems

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _kind_of(shape: LayerShape, *, gradients: bool) -> _Kind:
    return _Kind(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        element_bytes=shape.itemsize,
        activation=shape.activation,
        expert_bias=False,
        gradients=gradients,
    )
