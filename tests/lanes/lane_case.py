"""Models, and steps of microbatches in any order, for tests of lanes."""

import random
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

from benchmarks.graph_bench.gpt2_moe import Gate, TrainingLoss
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.lanes.action import Order
from halley.lanes.capture import Capture
from halley.lanes.cut import Item, cut_step
from halley.lanes.executor import Executor, one_after_another
from halley.lanes.lane_schedule import schedules
from halley.lanes.segment_compiler import SegmentCompiler
from tests.compiler.model_case import build_narrow


SIZE = 8  # rows and columns of the small model
Result = tuple[torch.Tensor, list[torch.Tensor]]  # losses, and the gradient of each parameter


def build_gpt2(
    gate: Gate, groups: ParallelGroups, *, num_layers: int, **sizes: int
) -> TrainingLoss:
    """Return a narrow GPT-2 with experts in every other layer, and its loss."""
    return TrainingLoss(build_narrow(gate, groups, num_layers=num_layers, **sizes))


def make_batch(
    rank: int, *, batch_size: int, vocab_size: int = 32, seq_len: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of a rank, each ``(batch_size, seq_len)``."""
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(vocab_size, (batch_size, seq_len + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class SmallModel(nn.Module):
    """Two linear layers with an equal all-to-all after each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x_TD = exchange(layer(x_TD).tanh())
        return x_TD.square().mean()


def exchange(x_TD: torch.Tensor) -> torch.Tensor:
    """Send equal parts of the rows to each rank of the default group; differentiable."""
    num_ranks = dist.get_world_size()
    splits = [x_TD.shape[0] // num_ranks] * num_ranks
    group = dist.distributed_c10d._get_default_group()
    return fc.wait_tensor(fc.all_to_all_single_autograd(x_TD, splits, splits, group))


def take_result(losses: torch.Tensor, model: nn.Module) -> Result:
    """Return the losses and gradients of a step, and clear the gradients."""
    gradients: list[torch.Tensor] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return losses.detach().clone(), gradients


def run_uncompiled(
    model: nn.Module, batch: Sequence[torch.Tensor], *, num_microbatches: int
) -> Result:
    """Return the result of one microbatch after another, operator by operator."""
    losses: list[torch.Tensor] = []
    for microbatch in zip(*(each.chunk(num_microbatches) for each in batch), strict=True):
        loss = model(*microbatch)
        loss.backward()
        losses.append(loss)
    return take_result(torch.stack(losses), model)


def is_equal(first: Result, second: Result) -> bool:
    """Return whether losses and all gradients are equal bit for bit."""
    pairs = zip([first[0], *first[1]], [second[0], *second[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@final
class CutStep:
    """The items of a step of a model, which run in any legal order.

    With ``divides_batch``, the microbatches are lanes of the batch, and ``run`` returns its loss.
    With ``traced``, an earlier step of the model with microbatches of the same shape, nothing is
    traced or compiled again.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Sequence[torch.Tensor],
        *,
        num_microbatches: int,
        divides_batch: bool = False,
        traced: "CutStep | None" = None,
    ) -> None:
        num_lanes = num_microbatches if divides_batch else 1
        self._capture = (
            traced._capture if traced else Capture(model, inner="eager", num_lanes=num_lanes)
        )
        microbatches = zip(*(each.chunk(num_microbatches) for each in batch), strict=True)
        calls = [self._capture.collect(*each) for each in microbatches]
        forward, backward = (each.graph for each in calls[0].graphs.modules)
        if traced:
            self.items, self._calls = traced.items, traced._calls
        else:
            compiler = SegmentCompiler("eager")
            self.items = cut_step(calls[0].graphs)
            self._calls = [compiler.compile(item)[1] for item in self.items]
        self._model, self._num_microbatches = model, num_microbatches
        self._divides_batch, self._parameters = divides_batch, calls[0].values
        names = [f"f:{node.name}" for node in forward.find_nodes(op="placeholder")]
        tangent = f"f:{backward.find_nodes(op='placeholder')[-1].name}"
        share = {tangent: torch.tensor(1.0 / num_lanes)}
        self._inputs = [dict(zip(names, each.values, strict=True)) | share for each in calls]
        self._loss = f"f:{forward.output_node().args[0][0].name}"  # type: ignore

    def run(self, order: Order, *, joins: bool = False) -> Result:
        executor = Executor(self.items, self._calls, order, loss=self._loss, joins=joins)
        recorder = Recorder("cpu", enabled=False)
        losses = torch.stack(executor.run(self._inputs, self._parameters, recorder=recorder))
        return take_result(losses.mean()[None] if self._divides_batch else losses, self._model)

    def results(self) -> dict[str, Result]:
        """Return the results of all orders by name; of two orders also with joined items."""
        orders = self.orders()
        found = {name: self.run(order) for name, order in orders.items()}
        joined = ("random", "in turn")
        return found | {f"{each}, joined": self.run(orders[each], joins=True) for each in joined}

    def orders(self) -> dict[str, Order]:
        """Return all schedules, a random order and one microbatch after another, by name."""
        durations_us = [30.0 if item.kind == "start" else 1.0 for item in self.items]
        sizes = {"num_microbatches": self._num_microbatches}
        found: dict[str, Order] = {
            f"{lanes} lanes, units {moved}, {at}": order
            for at, (lanes, moved, order) in enumerate(
                schedules(self.items, durations_us, max_lanes=3, **sizes)
            )
        }
        found["random"] = _random_order(self.items, seed=7, **sizes)
        found["in turn"] = one_after_another(self.items, **sizes)
        return found


def _random_order(items: Sequence[Item], *, num_microbatches: int, seed: int) -> Order:
    """Return a legal order, the same on all ranks; units and microbatches mix at random."""
    choose = random.Random(seed)
    left = [list(range(len(items))) for _ in range(num_microbatches)]
    order: list[tuple[int, int]] = []
    while any(left):
        ready: list[tuple[int, int]] = []
        for lane, rest in enumerate(left):
            # Starts of a microbatch keep their order; on a single process group, that is no limit.
            first_start = next((at for at in rest if items[at].kind == "start"), None)
            ready += [
                (lane, at)
                for at in rest
                if items[at].kind != "start" or at == first_start
                if not any(need in left[of] for of, need in items[at].all_needs(lane, len(left)))
            ]
        lane, index = choose.choice(ready)
        left[lane].remove(index)
        order.append((lane, index))
    return order
