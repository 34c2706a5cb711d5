"""A case of the model benchmark: a model with weights and a batch on this rank, and one step."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import nn

from halley.core.config import ModelConfig, RouterConfig
from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.core.types import local_experts
from halley.distributed.mesh import ParallelGroups, global_norm, sync_gradients
from halley.moe.dense import next_token_loss
from halley.moe.layer import MoELayer, grouped_experts
from halley.moe.router import RouterOutput
from halley.moe.transformer import MoETransformer, flops_per_token
from halley.ops.exchange import gather_table
from halley.strategies.base import AbstractStrategy
from halley.tools.layer_case import LayerTensors


# Bytes per weight: weight, gradient and two moments. With bfloat16 weights the other three are
# float32, and there is a float32 copy of the weight.
_STATE_BYTES = {torch.float32: 16, torch.bfloat16: 18}


class TrainingOptimizer(Protocol):
    """The methods of ``halley.train.optim.ModelOptimizer`` that a step uses."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass and start to sum its gradients over the ranks that share them."""
        ...

    def sync(self) -> None:
        """Wait for the sums."""
        ...

    def clip(self) -> torch.Tensor:
        """Clip the mean gradients over ranks; return their global norm before clipping."""
        ...

    def step(self, rate: float) -> None:
        """Update the parameters and free the gradients."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A training step of a model on random tokens, which the model's own routers route.

    Attributes:
        model: the model, with the number of layers to measure.
        num_tokens: tokens per rank.
        seq_len: tokens per sequence; divides ``num_tokens``.
        dtype: of weights and activations.
        seed: of weights and tokens.

    Raises:
        ValueError: the tokens do not divide into sequences, or training does not support the dtype.
    """

    model: ModelConfig
    num_tokens: int
    seq_len: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.num_tokens < 1 or self.num_tokens % self.seq_len:
            raise ValueError(f"seq_len ({self.seq_len}) must divide tokens ({self.num_tokens})")
        if self.dtype not in _STATE_BYTES:
            raise ValueError(f"dtype ({self.dtype}) must be float32 or bfloat16 in training")

    @property
    def batch_size(self) -> int:
        """Sequences per rank."""
        return self.num_tokens // self.seq_len


def cut_model(name: str, *, num_layers: int) -> ModelConfig:
    """Return the named model at full width with the given number of layers.

    Raises:
        ValueError: the model is unknown, or the first layers include no MoE layer.
    """
    model = find_model(name)
    if num_layers <= model.num_dense_layers:
        raise ValueError(
            f"layers ({num_layers}) must be above {model.num_dense_layers}, the dense layers that "
            f"model {name} begins with"
        )
    return dataclasses.replace(model, num_layers=num_layers)


def check_memory(case: ModelCase, *, num_ranks: int, memory_bytes: int) -> None:
    """Check that weights, gradients and optimizer state fit a rank, without activations.

    Args:
        case: the model.
        num_ranks: ranks that hold all experts together.
        memory_bytes: memory of a rank.

    Raises:
        ValueError: they do not fit, or the experts do not divide over the ranks.
    """
    model = case.model
    num_local = local_experts(model.moe.num_experts, ep_size=num_ranks)
    moe = dataclasses.replace(model.moe, top_k=num_local, router=RouterConfig())
    # A token that goes to all experts of a rank takes six operations per weight. Vectors (norms)
    # are ignored.
    flops = flops_per_token(dataclasses.replace(model, moe=moe), seq_len=0)
    num_weights = int(flops) // 6 + model.vocab_size * model.hidden_size
    num_bytes = num_weights * _STATE_BYTES[case.dtype]
    if num_bytes > memory_bytes:
        raise ValueError(
            f"layers ({model.num_layers}) of model {model.name} must fit the memory of a "
            f"rank ({memory_bytes / 2**30:.1f} GiB): with any strategy, weights, gradients and "
            f"optimizer take {num_bytes / 2**30:.1f} GiB on each of {num_ranks} ranks"
        )


@contextmanager
def memory_named(case: ModelCase, what: str) -> Iterator[None]:
    """Add the case to the message of an out-of-memory error inside the block.

    Args:
        case: the model.
        what: the strategy that runs.

    Raises:
        MemoryError: instead of torch's error. The watchdog stops the other ranks, which may wait in
            a collective.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        is_memory = "out of memory" in text or "allocate memory" in text
        if not is_memory and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise MemoryError(
            f"too little memory for model {case.model.name}, layers {case.model.num_layers}, "
            f"tokens {case.num_tokens}, {what}: {error}"
        ) from error


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with weights, a batch of this rank, and a training step of both."""

    model: MoETransformer
    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    groups: ParallelGroups
    recorder: Recorder

    def use(self, strategy: AbstractStrategy) -> None:
        """Use this strategy for the routed experts of all layers."""
        for layer in self._moe_layers():
            layer.strategy = strategy

    def step(self, optimizer: TrainingOptimizer) -> None:
        """Run a training step as ``halley.train.step`` does, with learning rate 0; a collective.

        The optimizer runs, but weights and router biases do not change. Therefore the routing, and
        with it the work, is the same in every step of every strategy.
        """
        loss = self._loss()
        with self.recorder.span("backward"):
            optimizer.backward(loss)
        with self.recorder.span("gradients.wait", stream="exposed"):
            optimizer.sync()
        with self.recorder.span("optimizer"):
            optimizer.clip()
            optimizer.step(0.0)

    def values(self) -> torch.Tensor:
        """Return three numbers that differ if a step is wrong; a collective. Frees the gradients.

        They are the loss with router losses (mean over ranks), the global norm of all gradients,
        and the global norm of the gradients of the routed experts.
        """
        loss = self._loss()
        loss.backward()
        loss = loss.detach() / self.groups.num_ranks
        if self.groups.world is not None:
            dist.all_reduce(loss, group=self.groups.world)
        names = grouped_experts(self.model)
        dense: list[torch.Tensor] = []
        expert: list[torch.Tensor] = []
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            (expert if name in names else dense).append(parameter.grad.float())
        sync_gradients(dense, expert, groups=self.groups)
        norms = [global_norm(each, expert, groups=self.groups) for each in (dense, ())]
        self.model.zero_grad()
        return torch.stack([loss, *norms]).double().cpu()

    @torch.no_grad()
    def layers(self) -> list[LayerTensors]:
        """Run forward and return the tokens, routing and experts of each MoE layer."""
        calls: list[tuple[torch.Tensor, RouterOutput]] = []

        def keep(router: nn.Module, inputs: tuple[torch.Tensor], routed: RouterOutput) -> None:
            calls.append((inputs[0], routed))

        layers = self._moe_layers()
        hooks = [layer.router.register_forward_hook(keep) for layer in layers]
        self.model(self.tokens_BS)
        for hook in hooks:
            hook.remove()
        return [
            LayerTensors(
                groups=self.groups,
                x_TD=x_TD,
                routing=routed.routing,
                experts=layer.local_experts(),
                grad_TD=x_TD,
                counts_WE=gather_table(routed.counts_E, group=self.groups.ep).cpu(),
            )
            for layer, (x_TD, routed) in zip(layers, calls, strict=True)
        ]

    def _loss(self) -> torch.Tensor:
        with self.recorder.span("forward"):
            output = self.model(self.tokens_BS)
        with self.recorder.span("loss"):
            return next_token_loss(output.logits_BSV, self.targets_BS) + output.router_loss

    def _moe_layers(self) -> list[MoELayer]:
        return [module for module in self.model.modules() if isinstance(module, MoELayer)]


def build_subject(
    case: ModelCase,
    strategy: AbstractStrategy,
    *,
    groups: ParallelGroups,
    recorder: Recorder,
    device: torch.device,
) -> Subject:
    """Draw random weights from the seed, and random tokens from the seed and this rank.

    Raises:
        ValueError: the experts do not divide over the ranks.
    """
    model = MoETransformer(
        case.model,
        strategy=strategy,
        groups=groups,
        recorder=recorder,
        dtype=case.dtype,
        device=device,
    )
    model.init_weights(seed=case.seed)
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + groups.rank)
    shape = (case.batch_size, case.seq_len + 1)
    text = torch.randint(case.model.vocab_size, shape, generator=generator).to(device)
    return Subject(
        model=model,
        tokens_BS=text[:, :-1].contiguous(),
        targets_BS=text[:, 1:].contiguous(),
        groups=groups,
        recorder=recorder,
    )
