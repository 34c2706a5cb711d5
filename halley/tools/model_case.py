"""A whole model to measure: its weights and batch on this rank, and a training step of it."""

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
from halley.core.routing import local_experts
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, global_norm, sync_gradients
from halley.moe.experts import expert_parameter_names
from halley.moe.layer import MoELayer
from halley.moe.losses import next_token_loss
from halley.moe.router import RouterOutput
from halley.moe.transformer import MoETransformer, flops_per_token
from halley.ops.exchange import gather_table
from halley.strategies.base import AbstractStrategy
from halley.tools.layer_case import LayerTensors


# Weight, gradient and two moments; in bfloat16 the last three are float32, and there is a float32
# copy of the weight.
_STATE_BYTES = {torch.float32: 16, torch.bfloat16: 18}


class TrainingOptimizer(Protocol):
    """What a step needs of ``halley.train.optim.ModelOptimizer``, which stands a floor above."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass and begin to sum its gradients over the ranks that share them."""
        ...

    def sync(self) -> None:
        """Wait for the sums."""
        ...

    def clip(self) -> torch.Tensor:
        """Clip the mean of the gradients over ranks; return its global norm before."""
        ...

    def step(self, rate: float) -> None:
        """Update the parameters and forget the gradients."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """What to measure: a step of a model, which routes random tokens by its own routers.

    Attributes:
        model: with as many layers as are measured.
        num_tokens: of each rank.
        seq_len: of each sequence; divides ``num_tokens``.
        seed: of weights and tokens.

    Raises:
        ValueError: the tokens do not divide into sequences, or no model trains in that dtype.
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
        """Sequences of each rank."""
        return self.num_tokens // self.seq_len


def cut_model(name: str, *, num_layers: int) -> ModelConfig:
    """Return the named model at its own width, with only so many layers.

    Raises:
        ValueError: there is no such model, or no MoE layer among so few layers.
    """
    model = find_model(name)
    if num_layers <= model.num_dense_layers:
        raise ValueError(
            f"layers ({num_layers}) must be above {model.num_dense_layers}, the dense layers that "
            f"model {name} begins with"
        )
    return dataclasses.replace(model, num_layers=num_layers)


def check_memory(case: ModelCase, *, num_ranks: int, memory_bytes: int) -> None:
    """Check that what outlives a step fits a rank; activations and buffers come on top.

    Args:
        num_ranks: over which the experts are spread.
        memory_bytes: that a rank has.

    Raises:
        ValueError: weights, gradients and the optimizer's state are larger, or the experts do not
            divide over the ranks.
    """
    model = case.model
    num_local = local_experts(model.moe.num_experts, ep_size=num_ranks)
    moe = dataclasses.replace(model.moe, top_k=num_local, router=RouterConfig())
    # Six operations a weight, where a token goes to all experts of a rank; vectors do not matter.
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
    """Say what this rank has too little memory for.

    Args:
        what: runs inside ``with``: the strategy.

    Raises:
        MemoryError: in place of what torch raises. The other ranks, which may stand in a
            collective, learn of it by the watchdog of their command.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        told = str(error).lower()
        is_memory = "out of memory" in told or "allocate memory" in told
        if not is_memory and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise MemoryError(
            f"too little memory for model {case.model.name}, layers {case.model.num_layers}, "
            f"tokens {case.num_tokens}, {what}: {error}"
        ) from error


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with weights, one batch of this rank, and what a training step does with them."""

    model: MoETransformer
    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    groups: ParallelGroups
    recorder: Recorder

    def use(self, strategy: AbstractStrategy) -> None:
        """Let the strategy run the routed experts of all layers from now on."""
        for layer in self._moe_layers():
            layer.strategy = strategy

    def step(self, optimizer: TrainingOptimizer) -> None:
        """Take a step as ``halley.train.step`` does, at learning rate 0; a collective.

        The optimizer does all its work, but the weights stay, and with them the routing: every
        step of every strategy has the same to do. Selection biases of sigmoid routers stay too.
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
        """Return what tells a right step from a wrong one; a collective. Leaves no gradient.

        These are the loss (of the routers too, mean over ranks), the global norm of the gradients,
        and that of the routed experts' gradients, which are a small part of the former.
        """
        loss = self._loss()
        loss.backward()
        loss = loss.detach() / self.groups.num_ranks
        if self.groups.world is not None:
            dist.all_reduce(loss, group=self.groups.world)
        names = expert_parameter_names(self.model)
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
        """Return tokens, routing and experts of each MoE layer, as forward makes them."""
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
    """Make weights from the seed, and random tokens from the seed and this rank.

    Raises:
        ValueError: sizes that do not fit the ranks.
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
