"""Strategy "auto": measure usable candidates in the first call of a kind of layer, use the fastest.

A kind of layer is a combination of sizes and options, with or without gradients.
"""

import time
from dataclasses import replace
from statistics import median
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import Predictor
from halley.cost.simulate import makespan_us
from halley.distributed.peers import (
    Collective,
    all_gather_objects,
    compare_ranks,
    peer_access,
    rank_and_size,
)
from halley.strategies.base import AbstractStrategy, check_inputs, wants_gradients


_NUM_SAMPLES = 3
_FUSED = "fused"  # the candidate that needs symmetric memory


class _Kind(NamedTuple):
    """The key of a kind of layer; equal on all ranks, so all ranks measure in the same call."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    element_bytes: int
    activation: str
    expert_bias: bool
    gradients: bool


class Decision(NamedTuple):
    """The strategy that "auto" has chosen for a kind of layer, why, and the measured times."""

    name: str  # the strategy chosen; "" before the first call
    reason: str  # why this strategy, a sentence; "" before the first call
    times_us: dict[str, float]  # time of each measured candidate, on the slowest rank


_UNDECIDED = Decision(name="", reason="", times_us={})


@final
class AutoStrategy(AbstractStrategy):
    """Run each kind of layer with the candidate strategy that was measured to be fastest.

    The first call of a kind runs every candidate several times, in alternation, with backward if
    gradients are needed. It skips candidates that cannot run or lack memory. The time of a
    candidate is the time on its slowest rank.

    Args:
        candidates: strategies by name.
        recorder: recorder of the candidates; disabled during the measurement.
        across_hosts: further candidates, instead of "fused" where symmetric memory is missing.
        left_out: the reason why a strategy is no candidate, by name.
        releases: free the buffers of "fused", and those of ``across_hosts``, as long as no kind of
            layer has chosen one of them.
    """

    def __init__(
        self,
        candidates: dict[str, AbstractStrategy],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        recorder: Recorder,
        across_hosts: dict[str, AbstractStrategy] | None = None,
        left_out: dict[str, str] | None = None,
        releases: bool = False,
    ) -> None:
        self._across_hosts = across_hosts or {}
        self.candidates = candidates | self._across_hosts
        self.group, self.device, self.recorder = group, torch.device(device), recorder
        self.tp_size = next(iter(candidates.values())).tp_size
        self.num_sets = rank_and_size(group)[1] // self.tp_size
        self._left_out, self._releases = left_out or {}, releases
        # Why symmetric memory is missing; None before the check, "" if available or not needed.
        self._no_access = None if _FUSED in candidates else ""
        self._decisions: dict[_Kind, Decision] = {}

    @property
    def gemm(self) -> str:
        return "that of the chosen strategy"

    @property
    def reasons(self) -> list[str]:
        """The strategy chosen for each kind of layer so far and why, one sentence each."""
        return [decision.reason for decision in self._decisions.values()]

    def release(self) -> None:
        for strategy in self.candidates.values():
            strategy.release()

    def decision(self, shape: LayerShape, *, gradients: bool) -> Decision:
        """Return the decision for layers without biases; its name is "" before their first call.

        ``gradients`` selects calls with backward. The number of tokens in ``shape`` is ignored.
        """
        kind = _Kind(
            shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
            shape.itemsize, shape.activation, expert_bias=False, gradients=gradients,
        )  # fmt: skip
        return self._decisions.get(kind, _UNDECIDED)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        gradients = wants_gradients(x_TD, routing, experts)
        kind = self._kind(experts, top_k=routing.topk_idx_TK.shape[1], gradients=gradients)
        decision = self._decisions.get(kind)
        if decision is None:
            check_inputs(x_TD, experts)
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "strategy auto chooses by measuring: run the layer once before torch.compile"
                )
            decision = self._decide(kind, x_TD, routing, experts)
        return self.candidates[decision.name].forward(x_TD, routing, experts)

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        """Return why a strategy chosen for this kind of layer cannot run these experts, or "".

        The choice takes the problems of the first layer into account. A later layer of the same
        kind can have others, such as a weight that is not aligned on one rank.
        """
        for gradients in (False, True):
            decision = self._decisions.get(self._kind(experts, top_k=top_k, gradients=gradients))
            if decision is not None:
                problem = self.candidates[decision.name].find_problem(experts, top_k=top_k)
                if problem:
                    return problem
        return ""

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return tasks of the strategy chosen for training; if none, of the predicted fastest."""
        if name := self.decision(shape, gradients=True).name:
            return self.candidates[name].tasks(shape, predictor)
        inside = [s for name, s in self.candidates.items() if name not in self._across_hosts]
        return min((s.tasks(shape, predictor) for s in inside), key=makespan_us)

    def _kind(self, experts: Experts, *, top_k: int, gradients: bool) -> _Kind:
        weight = experts.down_LDF
        return _Kind(
            weight.shape[1], weight.shape[2] * self.tp_size, weight.shape[0] * self.num_sets,
            top_k, weight.itemsize, experts.activation,
            expert_bias=experts.up_bias_LG is not None, gradients=gradients,
        )  # fmt: skip

    def _decide(
        self, kind: _Kind, x_TD: torch.Tensor, routing: Routing, experts: Experts
    ) -> Decision:
        values: dict[str, object] = kind._asdict()
        values |= {"strategy": "auto", "candidates": ", ".join(self.candidates)}
        values |= {"tp_size": self.tp_size, "device": self.device.type}
        compare_ranks("an MoE layer", values, group=self.group)
        if self._no_access is None:
            self._no_access = peer_access(self.group, self.device)
        problems, skipped = dict(self._left_out), self._across_hosts.keys()
        if self._no_access:
            problems[_FUSED], skipped = self._no_access, {_FUSED}
        candidates = {k: each for k, each in self.candidates.items() if k not in skipped}
        for name, strategy in candidates.items():
            if problem := strategy.find_problem(experts, top_k=kind.top_k):
                problems[name] = problem
        # A problem of one rank, such as an unaligned weight, excludes the candidate on all ranks.
        for found in all_gather_objects(problems, group=self.group, operation="strategy auto"):
            problems |= found
        names = [name for name in candidates if name not in problems]
        times_us, out_of_memory = self._measure(
            names, x_TD, routing, experts, gradients=kind.gradients
        )
        problems |= out_of_memory
        name = min(times_us, key=lambda name: times_us[name])
        shown = ", ".join(f"{name} {us:.0f} us" for name, us in times_us.items())
        why = f"{name} is fastest of {shown}"
        why += "".join(f"; not {name}: {why}" for name, why in problems.items())
        direction = "with backward" if kind.gradients else "forward"
        layer = f"hidden_size {kind.hidden_size}, {kind.num_experts} experts, top_k {kind.top_k}"
        decision = Decision(name=name, reason=f"{layer}, {direction}: {why}", times_us=times_us)
        self._decisions[kind] = decision
        chosen = {each.name for each in self._decisions.values()}
        for sharing in ([_FUSED], [*self._across_hosts]):  # candidates that share buffers
            if self._releases and not chosen.intersection(sharing):
                for unused in (each for each in sharing if each in names):
                    self.candidates[unused].release()
        return decision

    def _measure(
        self,
        names: list[str],
        x_TD: torch.Tensor,
        routing: Routing,
        experts: Experts,
        *,
        gradients: bool,
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return measured microseconds of candidates, and errors of those that ran out of memory.

        A collective, with the same result on all ranks.
        """
        # Backward ends at these detached inputs. So it neither frees the caller's graph nor adds to
        # gradient buffers that are attributes of the weights.
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
        # These empty hooks replace the caller's saved-tensor hooks (activation checkpointing).
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with self.recorder.paused(), hooks:
            for name in names:
                try:
                    run(name)  # the first run allocates buffers and compiles
                except MemoryError as error:  # raised on all ranks, so all skip the candidate
                    problems[name] = str(error)
            names = [name for name in names if name not in problems]
            samples = torch.zeros(_NUM_SAMPLES, len(names), dtype=torch.float64)
            for sample in samples:
                for index, name in enumerate(names):
                    start = self._now()
                    run(name)
                    sample[index] = self._now() - start
        slowest = samples.to(self.device)
        if self.group is not None:
            with Collective("the maximum of measured times", group=self.group):
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        medians_us = [median(column) * 1e6 for column in slowest.t().tolist()]
        return dict(zip(names, medians_us, strict=True)), problems

    def _now(self) -> float:
        # Kernels run asynchronously: wait for them before the clock is read.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
