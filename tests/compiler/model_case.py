"""A transformer with MoE layers that torch.compile takes as one graph, and steps of it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch._dynamo
import torch._dynamo.config
import torch.nn.functional as F
from torch import nn

from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.transformer import ModelOutput, MoETransformer
from halley.strategies.traceable import TraceableStrategy
from tests.moe.model_case import MODELS, make_tokens


Step = dict[str, torch.Tensor]  # loss, outputs and gradients of one step, by name
Model = Callable[[torch.Tensor], ModelOutput]


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Let graphs read sizes from tensors, and forget all of them afterwards."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            yield
        finally:
            torch._dynamo.reset()


def build_model(kind: str, groups: ParallelGroups, *, num_layers: int) -> MoETransformer:
    """Return a model whose every other layer has experts.

    Args:
        kind: of its router: a key of ``MODELS``.
        groups: over which the experts are spread.
        num_layers: of it.
    """
    config = dataclasses.replace(
        MODELS[kind], num_layers=num_layers, moe_interval=2, dense_intermediate_size=24
    )
    assert groups.ep is not None
    model = MoETransformer(
        config,
        strategy=TraceableStrategy(groups.ep),
        groups=groups,
        recorder=Recorder("cpu", enabled=False),
    )
    model.init_weights(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter *= 10.0
    return model


def run_steps(
    model: nn.Module,
    call: Model,
    *,
    rank: int,
    num_steps: int,
    batch_size: int = 2,
    seq_len: int = 9,
) -> list[Step]:
    """Return what each step of plain SGD on this rank's tokens gives."""
    steps: list[Step] = []
    for step in range(num_steps):
        tokens_BS = make_tokens(rank, step=step, batch_size=batch_size, seq_len=seq_len)
        out = call(tokens_BS)
        logits = out.logits_BSV
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
        (loss + out.router_loss).backward()
        found = {"loss": loss.detach(), "logits": logits.detach(), "counts": out.counts_ME}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
        steps.append(found)
    return steps
