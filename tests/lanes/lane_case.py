"""Models, and steps of microbatches one after another, for tests of lanes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

from benchmarks.graph_bench.gpt2_moe import Gate, TrainingLoss
from halley.distributed.mesh import ParallelGroups
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
