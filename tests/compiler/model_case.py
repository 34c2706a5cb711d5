"""Build models with MoE layers that torch.compile traces as one graph, and train them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, GPT2Shape
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.transformer import ModelOutput, MoETransformer
from halley.strategies.traceable import TraceableStrategy
from tests.moe.model_case import MODELS, make_tokens


Step = dict[str, torch.Tensor]  # loss, outputs and gradients of one step, by name
Model = Callable[[torch.Tensor], ModelOutput]


SEQ_LEN = 8  # of the narrow GPT-2


class AllToAllCalls(TorchDispatchMode):
    """Appends "all-to-all" to a list of events whenever one starts."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            self._events.append("all-to-all")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Let Dynamo read sizes from tensors without a graph break; forget all graphs afterwards."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            yield
        finally:
            torch._dynamo.reset()


def build_narrow(gate: Gate, groups: ParallelGroups, *, num_layers: int) -> GPT2MoE:
    """Return a narrow GPT-2 with experts in every other layer, and weights large enough to matter.

    Args:
        gate: kind of its routers.
        groups: process groups; the experts are distributed over the expert-parallel one.
        num_layers: number of transformer layers.
    """
    shape = GPT2Shape(
        name="narrow",
        num_layers=num_layers,
        hidden_size=32,
        num_heads=4,
        vocab_size=32,
        seq_len=SEQ_LEN,
    )
    return GPT2MoE(shape, gate, groups, strategy=TraceableStrategy(groups.ep), std=0.2)


def build_model(kind: str, groups: ParallelGroups, *, num_layers: int) -> MoETransformer:
    """Return a model with experts in every other layer.

    Args:
        kind: kind of its routers, a key of ``MODELS``.
        groups: process groups; the experts are distributed over the expert-parallel one.
        num_layers: number of transformer layers.
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
    """Return loss, outputs and gradients of each SGD step on this rank's tokens."""
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
