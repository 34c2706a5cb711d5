"""Training with Megatron's optimizers resumes from checkpoints of either kind of layers."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.integrations.megatron_case import Case, build_model, checkpointing, on_cpu, run_step
from tests.rank_pool import RunRanks


NUM_STEPS = 2  # before the checkpoint, and again after it


class _CudaNames(TorchFunctionMode):
    """Replace the device "cuda", which Megatron's optimizers ask for, by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _build(strategy: str, num_ranks: int) -> tuple[Any, Any]:
    """Return a model and its Megatron optimizer; strategy "" builds Megatron's own layers."""
    model = build_model(Case(strategy=strategy), num_ranks)
    optimizers: Any = importlib.import_module("megatron.core.optimizer")
    config = optimizers.OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0)
    return model, optimizers.get_megatron_optimizer(config, [model])


def _state_of(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return {"model": weights, "optimizer": state}


def _train(model: Any, optimizer: Any, tokens: list[torch.Tensor]) -> list[float]:
    losses: list[float] = []
    for batch in tokens:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run_step(model, batch, "plain"))
        model.finish_grad_sync()
        optimizer.step()
    return losses


def _resume(
    rank: int, num_ranks: int, folder: Path, writer: str, reader: str
) -> tuple[list[float], list[float], float]:
    """Return the later losses of the model that saved and of the one that loaded.

    The third value is the largest difference of their expert weights at the end.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, 64, (2, 17), generator=generator) for _ in range(2 * NUM_STEPS)]
    with on_cpu(), _CudaNames():
        model, optimizer = _build(writer, num_ranks)
        _train(model, optimizer, tokens[:NUM_STEPS])
        checkpointing.save(_state_of(model, optimizer, is_loading=False), str(folder))
        expected = _train(model, optimizer, tokens[NUM_STEPS:])

        other, other_optimizer = _build(reader, num_ranks)
        # Other weights and optimizer states, which the checkpoint must replace.
        _train(other, other_optimizer, tokens[-1:])
        state = _state_of(other, other_optimizer, is_loading=True)
        state = checkpointing.load(state, str(folder))
        other.module.load_state_dict(state["model"])
        other_optimizer.load_state_dict(state["optimizer"])
        losses = _train(other, other_optimizer, tokens[NUM_STEPS:])
    pairs = zip(_experts(model), _experts(other), strict=True)
    return expected, losses, max(float((a - b).abs().max()) for a, b in pairs)


def _experts(model: Any) -> list[torch.Tensor]:
    """Return the stacked expert weights of Halley's or Megatron's layers."""
    stacks: list[torch.Tensor] = []
    for layer in model.module.decoder.layers:
        experts = layer.mlp.experts
        if hasattr(experts, "weight1"):
            stacks += [experts.weight1.detach(), experts.weight2.detach()]
            continue
        for part in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, part).weight.detach() for expert in experts.local_experts]
            stacks.append(torch.stack(weights))
    return stacks


@pytest.mark.parametrize(
    ("writer", "reader"), [("sequential", "sequential"), ("sequential", ""), ("", "sequential")]
)
def test_training_resumes_from_checkpoints_of_either_kind(
    writer: str, reader: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    """Bit for bit with the same kind of layers."""
    tolerance = 0.0 if writer == reader else 1e-5
    for expected, losses, difference in run_ranks(_resume, 2, tmp_path, writer, reader):
        assert losses == pytest.approx(expected, rel=0, abs=tolerance)
        assert difference <= 10 * tolerance
