"""Steps of microbatches in lanes equal those of one microbatch after another, bit for bit."""

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.emulated_link import emulate_link
from benchmarks.graph_bench.gpt2_moe import Gate
from halley.core.timeline import Recorder, waited_us
from halley.core.types import DROPPED
from halley.distributed.mesh import build_groups
from halley.lanes import compile_step, executor
from halley.lanes.capture import Inner
from halley.moe.router import AbstractRouter
from halley.ops.gradient_hook import set_gradient_hook
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import (
    SIZE,
    CutStep,
    SmallModel,
    build_gpt2,
    is_equal,
    make_batch,
    run_uncompiled,
    take_result,
)
from tests.moe.model_case import destroy


BATCH_SIZE = 2  # of a microbatch
NUMS_MICROBATCHES = (1, 2, 3)
NUM_STEPS = 5  # the first three run one microbatch after another


def _run_schedules(
    rank: int, num_ranks: int, gate: Gate, num_layers: int
) -> dict[str, tuple[bool, bool]]:
    """Return for each schedule whether its results equal those of both other ways, by name."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2(gate, groups, num_layers=num_layers)
    batches = {n: make_batch(rank, batch_size=BATCH_SIZE * n) for n in NUMS_MICROBATCHES}
    # Before the model is traced: an eager step changes its strategy, which would be traced again.
    uncompiled = {n: run_uncompiled(model, each, num_microbatches=n) for n, each in batches.items()}
    found: dict[str, tuple[bool, bool]] = {}
    case: CutStep | None = None
    with fresh_graphs():
        for num_microbatches, batch in batches.items():
            case = CutStep(model, batch, num_microbatches=num_microbatches, traced=case)
            results = case.results()
            wanted = results["in turn"]
            for name, result in results.items():
                equal = is_equal(result, wanted), is_equal(result, uncompiled[num_microbatches])
                found[f"{num_microbatches} microbatches, {name}"] = equal
    destroy(groups)
    return found


@pytest.mark.parametrize(
    ("gate", "num_ranks", "num_layers"),
    [
        ("switch", 2, 4),
        ("switch", 4, 2),
        *((gate, ranks, 2) for gate in ("top2", "prioritized", "dropless") for ranks in (2, 4)),
    ],
)
def test_every_schedule_is_equal_bit_for_bit(
    run_ranks, gate: Gate, num_ranks: int, num_layers: int
) -> None:
    for found in run_ranks(_run_schedules, num_ranks, gate, num_layers, timeout_s=400.0):
        assert len(found) > 4 * len(NUMS_MICROBATCHES), found
        assert {name for name, equal in found.items() if equal != (True, True)} == set()


def _count_dropped(rank: int, num_ranks: int) -> int:
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2("switch", groups, num_layers=4)
    outputs: list[Any] = []  # of type RouterOutput
    for module in model.modules():
        if isinstance(module, AbstractRouter):
            module.register_forward_hook(lambda router, inputs, output: outputs.append(output))
    with torch.no_grad():
        model(*make_batch(rank, batch_size=BATCH_SIZE))
    destroy(groups)
    return sum(int((output.routing.topk_idx_TK == DROPPED).sum()) for output in outputs)


def test_capacity_of_the_tested_model_drops_tokens(run_ranks) -> None:
    assert all(num_dropped > 0 for num_dropped in run_ranks(_count_dropped, 2))


def _train(
    rank: int, num_ranks: int, inner: Inner, gate: Gate
) -> tuple[list[bool], list[bool], int, tuple[int, int]]:
    """Return which steps equal the first and an uncompiled one, number of lanes and of items."""
    link = emulate_link(bytes_per_s=1e6)  # so slow that lanes are predicted to be faster
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2(gate, replace(groups, ep=dist.new_group(backend=link.backend)), num_layers=4)
    batch = make_batch(rank, batch_size=2 * BATCH_SIZE)
    with fresh_graphs():
        step = compile_step(model, 2, inner=inner)
        results = [take_result(step(*batch), model) for _ in range(NUM_STEPS)]
        assert step.plan is not None
        num_lanes, counts = step.plan.num_lanes, step.num_items
    uncompiled = run_uncompiled(model, batch, num_microbatches=2)
    destroy(groups)
    to_first = [is_equal(result, results[0]) for result in results]
    close = [
        all(map(partial(torch.allclose, rtol=1e-4, atol=1e-6), result[1], uncompiled[1]))
        for result in results
    ]
    return to_first, close, num_lanes, counts


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_planned_steps_equal_the_first_ones(run_ranks, inner: Inner) -> None:
    for to_first, close, num_lanes, (num_items, num_distinct) in run_ranks(
        _train, 2, inner, "switch", timeout_s=500.0
    ):
        assert to_first == [True] * NUM_STEPS
        assert close == [True] * NUM_STEPS
        assert num_lanes == 2
        assert num_distinct < num_items / 2  # equal layers share compiled segments


def _call_twice(rank: int, num_ranks: int) -> tuple[bool, bool, list[int], float | None]:
    """Return results for a second shape, for accumulated gradients, order of hooks, and waits."""
    torch.manual_seed(0)
    model, recorder = SmallModel(), Recorder("cpu")
    shapes_equal: list[bool] = []
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager", recorder=recorder)
        for num_rows in (4, 8):
            batch = (torch.randn(num_rows * num_ranks, SIZE),)
            result = take_result(step(*batch), model)
            shapes_equal.append(is_equal(result, run_uncompiled(model, batch, num_microbatches=2)))
        step(*batch)
        sums = take_result(step(*batch), model)[1]
        halves = [2 * gradient for gradient in result[1]]
        is_sum = all(torch.allclose(a, b) for a, b in zip(sums, halves, strict=True))
        gradients: list[torch.Tensor] = []
        weight = model.first.weight
        assert isinstance(weight, nn.Parameter)
        set_gradient_hook(weight, lambda gradient: gradients.append(gradient.clone()))
        step(*batch)
        assert weight.grad is None
        wanted: list[torch.Tensor] = []
        for microbatch in batch[0].chunk(2):
            wanted += torch.autograd.grad(model(microbatch), [weight])
    order = [at for gradient in gradients for at in (0, 1) if torch.equal(gradient, wanted[at])]
    return all(shapes_equal), is_sum, order, waited_us(recorder.collect())


def test_new_shapes_accumulation_hooks_and_recorder(run_ranks) -> None:
    for is_equal_to_uncompiled, is_sum, order, exposed_us in run_ranks(_call_twice, 2):
        assert is_equal_to_uncompiled
        assert is_sum
        assert order == [0, 1]  # a hook receives the gradient of each microbatch, in their order
        assert exposed_us is not None
        assert exposed_us > 0.0


def _run_tensor_hooks(rank: int, num_ranks: int) -> list[bool]:
    """Return which steps have the uncompiled model's result, and calls of hooks with its values."""
    torch.manual_seed(0)
    model = SmallModel()
    batch = (torch.randn(4 * num_ranks, SIZE, generator=torch.Generator().manual_seed(rank)),)
    seen: list[torch.Tensor] = []
    weight, other = model.first.weight, model.second.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(other, nn.Parameter)
    weight.register_hook(lambda gradient: gradient / 3)  # as experts divided over ranks have
    other.register_hook(lambda gradient: seen.append(gradient.clone()))  # returns None: no change
    other.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
    wanted = run_uncompiled(model, batch, num_microbatches=2)
    wanted_seen, seen[:] = [*seen], []
    equal: list[bool] = []
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        for _ in range(NUM_STEPS):
            result = take_result(step(*batch), model)
            same = [torch.equal(*pair) for pair in zip(seen, wanted_seen, strict=True)]
            equal.append(is_equal(result, wanted) and all(same))
            seen.clear()
    return equal


def test_hooks_of_tensors_run_as_in_autograd(run_ranks) -> None:
    assert run_ranks(_run_tensor_hooks, 2) == [[True] * NUM_STEPS] * 2


@final
class _ReturnsWeight(torch.autograd.Function):
    """Multiplies by a weight; its backward returns the saved weight itself."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_D)
        return x_TD * weight_D

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight_D,) = ctx.saved_tensors
        # Autograd would make the weight's own memory its ``.grad``, and add to that.
        is_traced = torch.compiler.is_compiling()
        return gradients[0] * weight_D, weight_D.detach() if is_traced else weight_D.clone()


@final
class _SharesGradients(nn.Module):
    """A model in which two parameters have one gradient, and that of another is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SmallModel()
        self.weight = nn.Parameter(torch.randn(SIZE))
        # As large as a microbatch: nothing is summed up, so both have the gradient of their sum.
        self.first, self.second = (nn.Parameter(torch.randn(4, SIZE)) for _ in range(2))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.model(_ReturnsWeight.apply(x_TD + self.first + self.second, self.weight))


def _run_shared_gradients(rank: int, num_ranks: int) -> tuple[list[bool], list[int], list[int]]:
    """Return which steps are equal, and positions of gradients: shared ones, and lasting ones."""
    torch.manual_seed(0)
    model = _SharesGradients()
    batch = (torch.randn(4 * num_ranks, SIZE, generator=torch.Generator().manual_seed(rank)),)
    wanted = run_uncompiled(model, batch, num_microbatches=2)
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        equal = [is_equal(take_result(step(*batch), model), wanted) for _ in range(NUM_STEPS)]
        program = step._last
    assert program is not None
    numbers = Counter(name for item in program.items for name, _ in item.gradients)
    shared = [p for item in program.items for name, p in item.gradients if numbers[name] > 1]
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(10)]
    lasting: list[int] = []
    for action in program._executor._actions:
        lasts = executor._first_gradients(action, parameters)
        lasting += [position for at, position in action.gradients if lasts[at]]
    return equal, shared, lasting


def test_shared_gradients_and_inputs_as_gradients(run_ranks) -> None:
    for equal, shared, lasting in run_ranks(_run_shared_gradients, 2):
        assert equal == [True] * NUM_STEPS
        # One gradient must not become the ``.grad`` of two parameters: microbatches add to it.
        assert len(shared) == 2
        assert len(lasting) == 5
        assert not set(shared) & set(lasting)


def _measure_exposed(rank: int, num_ranks: int) -> tuple[float, float]:
    """Return the exposed seconds of a step, one microbatch after another and in lanes."""
    groups, link = build_groups(num_ranks, device_type="cpu"), emulate_link()
    sizes = {"vocab_size": 64, "seq_len": 64}
    slow = replace(groups, ep=dist.new_group(backend=link.backend))
    model = build_gpt2("dropless", slow, num_layers=4, hidden_size=64, **sizes)
    batch = make_batch(rank, batch_size=16, **sizes)
    exposed_s: list[float] = []
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        step(*batch)
        # All transfers together take a third of the time of the computation on this machine.
        begin_s = time.perf_counter()
        run_uncompiled(model, batch, num_microbatches=2)
        compute_s = torch.tensor(time.perf_counter() - begin_s)
        dist.broadcast(compute_s, 0)
        link.bytes_per_s = link.num_bytes / 2 / (compute_s.item() / 3)
        for _ in range(7):
            link.clear()
            step(*batch)
            exposed_s.append(link.exposed_s)
    destroy(groups)
    return min(exposed_s[:2]), min(exposed_s[2:])


def test_lanes_expose_less_communication_over_an_emulated_link(run_ranks) -> None:
    for alone_s, lanes_s in run_ranks(_measure_exposed, 2, timeout_s=300.0):
        assert lanes_s < 0.4 * alone_s
