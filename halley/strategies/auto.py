"""Whichever strategy is fastest: measured on the first call of a shape, agreed on by all ranks."""

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import final

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task, makespan_us
from halley.distributed.peers import Collective, compare_ranks
from halley.distributed.ranks import place_in
from halley.strategies.base import AbstractStrategy, check_inputs, wants_gradients
from halley.symm_mem.access import peer_access


_NUM_SAMPLES = 3

# Hidden size, intermediate size, experts, top-k, bytes of an element, activation; whether there are
# biases; whether gradients are wanted. Nothing that differs between ranks, so that all of them
# measure in the same call.
_Key = tuple[int, int, int, int, int, str, bool, bool]


@final
class AutoStrategy(AbstractStrategy):
    """Runs each shape by the strategy that measured fastest when it first came.

    The first call of a shape runs every candidate some times, one after another in turn, on the
    inputs that it was given; where gradients are wanted, with backward. A rank's time is that of
    the slowest rank.

    Args:
        candidates: by name; one of them is "chunked".
        group: the ranks over which the experts are spread; None for a rank on its own.
        device: of this rank.
        recorder: that of the candidates; silent while they are measured.
        shares_memory: the candidates that need memory which all ranks can address.
        left_out: why others are no candidates, by name.
        releases: whether these give their buffers back where no shape runs by one of them.
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
        self.num_sets = place_in(group)[1] // self.tp_size
        self._shares_memory, self._releases = shares_memory, releases
        self._left_out = left_out
        # Not asked yet, or for nobody.
        self._no_access = None if set(shares_memory) & set(candidates) else ""
        self._choices: dict[_Key, str] = {}
        self._reasons: dict[_Key, str] = {}
        self._times_us: dict[_Key, dict[str, float]] = {}

    @property
    def gemm(self) -> str:
        return "that of its choice"

    @property
    def reasons(self) -> list[str]:
        """What was chosen for each shape so far, and why, a sentence each."""
        return list(self._reasons.values())

    def choice(self, shape: LayerShape, *, gradients: bool) -> str:
        """Return the name of the strategy that a layer without biases runs by, "" if undecided.

        Args:
            shape: the layer; its number of tokens does not matter.
            gradients: whether with backward.
        """
        return self._choices.get(_key(shape, gradients=gradients), "")

    def times_us(self, shape: LayerShape, *, gradients: bool) -> dict[str, float]:
        """Return the candidates' times that a choice rests on; none where nothing was measured.

        Args:
            shape, gradients: as for ``choice``.
        """
        return dict(self._times_us.get(_key(shape, gradients=gradients), {}))

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        weight, gradients = experts.down_LDF, wants_gradients(x_TD, routing, experts)
        key = (
            weight.shape[1],
            weight.shape[2] * self.tp_size,
            weight.shape[0] * self.num_sets,
            routing.topk_idx_TK.shape[1],
            weight.itemsize,
            experts.activation,
            experts.up_bias_LG is not None,
            gradients,
        )
        name = self._choices.get(key)
        if name is None:
            check_inputs(x_TD, experts)
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "strategy auto chooses by measuring: run the layer once before torch.compile"
                )
            name = self._decide(key, x_TD, routing, experts)
        return self.candidates[name].forward(x_TD, routing, experts)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return the work of what was chosen for training; else of what is predicted fastest."""
        if name := self.choice(shape, gradients=True):
            return self.candidates[name].tasks(shape, predictor)
        return min((s.tasks(shape, predictor) for s in self.candidates.values()), key=makespan_us)

    def _decide(self, key: _Key, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> str:
        gradients = key[-1]
        self._compare(key)
        names, problems = self._able(experts, top_k=key[3])
        direction = "with backward" if gradients else "forward"
        text = f"hidden_size {key[0]}, {key[2]} experts, top_k {key[3]}, {direction}: "
        if self._no_access:
            name = "chunked"
            text += f"chunked, as the fused kernels cannot run here: {self._no_access}"
        else:
            times_us, without_room = self._measure(
                names, x_TD, routing, experts, gradients=gradients
            )
            problems |= without_room
            self._times_us[key] = times_us
            name = min(times_us, key=lambda name: times_us[name])
            shown = ", ".join(f"{name} {us:.0f} us" for name, us in times_us.items())
            text += f"{name} is fastest of {shown}"
            text += "".join(f"; not {name}: {why}" for name, why in problems.items())
        self._choices[key], self._reasons[key] = name, text
        if self._releases and not set(self._shares_memory) & set(self._choices.values()):
            for each in set(self._shares_memory) & set(names):
                self.candidates[each].release()
        return name

    def _compare(self, key: _Key) -> None:
        """Compare with the other ranks what is to be measured, before any of them measures."""
        names = (
            "hidden_size", "intermediate_size", "num_experts", "top_k", "element_bytes",
            "activation", "expert_bias", "gradients",
        )  # fmt: skip
        values: dict[str, object] = dict(zip(names, key, strict=True))
        values |= {"strategy": "auto", "candidates": ", ".join(self.candidates)}
        values |= {"tp_size": self.tp_size, "device": self.device.type}
        compare_ranks("an MoE layer", values, group=self.group)

    def _able(self, experts: Experts, *, top_k: int) -> tuple[list[str], dict[str, str]]:
        """Return the candidates that can run a layer, and why the others cannot."""
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
        """Return the time of each candidate, or why there is no room for it; a collective.

        The same on all ranks.
        """

        def run(name: str) -> None:
            y_TD = self.candidates[name].forward(x_TD, routing, experts)
            if gradients:
                torch.autograd.grad(y_TD, leaves, torch.zeros_like(y_TD))

        # Leaves of their own: backward must end at the layer, leave the caller's graph whole, and
        # add nothing to buffers that hang on weights.
        leaves: list[torch.Tensor] = []

        def leaf(part: torch.Tensor) -> torch.Tensor:
            part = part.detach().requires_grad_(part.requires_grad)
            leaves.extend([part] if part.requires_grad else [])
            return part

        x_TD = leaf(x_TD)
        routing = replace(routing, topk_weights_TK=leaf(routing.topk_weights_TK))
        experts = experts.with_tensors({name: leaf(t) for name, t in experts.tensors().items()})
        problems: dict[str, str] = {}
        enabled, self.recorder.enabled = self.recorder.enabled, False
        # Hooks of the caller, such as those of activation checkpointing, must see one forward.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            for name in names:
                try:
                    run(name)  # makes buffers and compiles
                except MemoryError as error:  # on all ranks
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
        columns = slowest.t().tolist()
        columns = [median(column) * 1e6 for column in columns]
        return dict(zip(names, columns, strict=True)), problems

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _key(shape: LayerShape, *, gradients: bool) -> _Key:
    sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
    return (*sizes, shape.itemsize, shape.activation, False, gradients)
