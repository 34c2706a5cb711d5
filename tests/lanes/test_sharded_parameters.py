"""Lanes with parameters that FSDP2 shards have the losses and gradients of plain FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from halley.lanes import LaneStep, compile_step
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import SIZE, SmallModel, run_uncompiled


NUM_STEPS = 4  # the third makes the plan
NUM_MICROBATCHES = 3
LAYERS, WHOLE, FIRST = ("first", "second"), ("first", ""), ("first",)  # names of sharded modules
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NAMES = ("replicate", "shard")
STARTS = {  # names of collectives by their operators
    "_c10d_functional::all_to_all_single": "all_to_all",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


def _build(
    names: tuple[str, ...], mesh_shape: tuple[int, ...], policy: MixedPrecisionPolicy | None = None
) -> SmallModel:
    torch.manual_seed(0)
    model = SmallModel()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=NAMES[-len(mesh_shape) :])
    for name in names:
        module = model.get_submodule(name)
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def _synchronize(model: nn.Module, value: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(value, recurse=False)


def _run_plain(model: nn.Module, batch: torch.Tensor, num_microbatches: int) -> torch.Tensor:
    """Return the losses of FSDP2 without Halley, which reduces gradients after the last loss."""
    losses: list[torch.Tensor] = []
    for at, microbatch in enumerate(batch.chunk(num_microbatches)):
        _synchronize(model, at == num_microbatches - 1)
        loss = model(microbatch)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _make_batch(rank: int, num_ranks: int, *, num_microbatches: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 * num_ranks * num_microbatches, SIZE, generator=generator)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of all gradients, after a check that they are sharded like them."""
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        assert type(gradient) is type(parameter.data)
        assert gradient.dtype == parameter.dtype
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            assert gradient.placements == parameter.placements
            gradient = gradient.to_local()
        found.append(gradient.clone())
    return found


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)


def _train(
    rank: int,
    num_ranks: int,
    names: tuple[str, ...],
    mesh_shape: tuple[int, ...],
    policy: MixedPrecisionPolicy | None,
) -> tuple[list[float], bool]:
    """Return the error of the loss and gradients of each optimizer step, and whether it planned."""
    errors: list[float] = []
    model, plain = (_build(names, mesh_shape, policy) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    batch = _make_batch(rank, num_ranks, num_microbatches=NUM_MICROBATCHES)
    with fresh_graphs():
        step = compile_step(model, NUM_MICROBATCHES, inner="eager")
        for _ in range(NUM_STEPS):
            losses = step(batch)
            wanted = _run_plain(plain, batch, NUM_MICROBATCHES)
            found = [losses.float(), *_gradients(model)]
            errors.append(_error(found, [wanted.float(), *_gradients(plain)]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # The modules work without lanes, too.
        found = [_run_plain(each, batch, 1).float() for each in (model, plain)]
        errors.append(_error(found[:1], found[1:]))
    return errors, step.plan is not None


@pytest.mark.parametrize(
    ("names", "mesh_shape", "policy"),
    [
        (WHOLE, (2,), None),
        (LAYERS, (2,), BFLOAT16),
        (FIRST, (4,), None),
        (WHOLE, (2, 2), None),
    ],
)
def test_training_equals_plain_fsdp2(run_ranks, names, mesh_shape, policy) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    for errors, is_planned in run_ranks(_train, num_ranks, names, mesh_shape, policy):
        assert max(errors) < 1e-6
        assert is_planned


def _run_recorded(step: LaneStep, batch: torch.Tensor) -> list[str]:
    """Run a step; return the names of its all-to-alls and reduce-scatters, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(batch)
    events = sorted(recorded.events() or [], key=lambda event: event.time_range.start)
    return [STARTS[event.name] for event in events if event.name in STARTS]


def _accumulate(rank: int, num_ranks: int) -> tuple[float, float, list[list[str]]]:
    """Return the errors of gradients of two calls, with reductions in both and in the second."""
    model, plain = (_build(LAYERS, (num_ranks,)) for _ in range(2))
    batch = _make_batch(rank, num_ranks, num_microbatches=4)
    errors: list[float] = []
    found: list[list[str]] = []
    with fresh_graphs():
        step = compile_step(model, 2, inner="eager")
        step(batch[: len(batch) // 2])  # the profiler slows tracing down
        model.zero_grad()
        for reduces_first in (True, False):
            for at, half in enumerate(batch.chunk(2)):
                _synchronize(model, reduces_first or at == 1)
                found.append(_run_recorded(step, half))
            _run_plain(plain, batch, 4)
            errors.append(_error(_gradients(model), _gradients(plain)))
            for each in (model, plain):
                each.zero_grad()
    return errors[0], errors[1], found


def test_calls_accumulate_and_reduce_early(run_ranks) -> None:
    for reduced_twice, reduced_once, found in run_ranks(_accumulate, 2):
        assert reduced_twice < 1e-6
        assert reduced_once == 0.0
        assert [names.count("reduce_scatter") for names in found] == [2, 2, 0, 2]
        # Two forward and two backward all-to-alls for each microbatch. The gradients of the second
        # layer are reduced before the last all-to-all, which is the first layer's. There is no plan
        # yet: microbatches run one after another.
        assert found[0] == ["all_to_all"] * 7 + ["reduce_scatter", "all_to_all", "reduce_scatter"]


def _run_replicated(rank: int, num_ranks: int) -> tuple[float, list[str]]:
    """Return the error of all-reduced gradients, and the errors of modules that lanes refuse."""
    model, plain = _build(("first", "second"), (num_ranks, 1)), _build((), (num_ranks,))
    batch = _make_batch(rank, num_ranks, num_microbatches=2)
    wanted = run_uncompiled(plain, (batch,), num_microbatches=2)[1]
    for gradient in wanted:
        dist.all_reduce(gradient)
    texts: list[str] = []
    parallel = DistributedDataParallel(plain)
    refused: list[LaneStep] = [
        compile_step(each, 2, inner="eager")
        for each in (parallel, lambda x_TD: parallel(x_TD), lambda x_TD: model(x_TD))
    ]
    with fresh_graphs():
        for step in refused:
            with pytest.raises(ValueError, match="lanes") as caught:
                step(batch)
            texts.append(str(caught.value))
        compile_step(model, 2, inner="eager")(batch)
    return _error(_gradients(model), [each / num_ranks for each in wanted]), texts


def test_replicated_parameters_are_averaged_and_ddp_is_refused(run_ranks) -> None:
    for error, texts in run_ranks(_run_replicated, 2):
        assert error < 1e-6
        for text in texts[:2]:
            assert "DistributedDataParallel: use fully_shard with a mesh of shape" in text
        assert "only if loss_function is a module that contains them" in texts[2]
