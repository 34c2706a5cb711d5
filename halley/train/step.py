"""One training step (forward, backward, gradient sum, update), and the objects that it needs."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist

from halley.core.config import RunConfig
from halley.core.placement import ExpertPlacement, load_placements, write_counts
from halley.core.timeline import Recorder
from halley.core.types import DTYPES
from halley.distributed.mesh import ParallelGroups, World, build_groups
from halley.moe.dense import next_token_loss
from halley.moe.memory_check import check_memory
from halley.moe.router import SigmoidRouter
from halley.moe.transformer import ModelOutput, MoETransformer
from halley.planner.step_plan import check_strategies, plan_run
from halley.strategies.registry import build_strategies, split_strategies
from halley.train.compiled_model import check_passes, compile_model
from halley.train.data import VOCAB_SIZE, BatchLoader, Corpus, find_text_files
from halley.train.optim import ModelOptimizer, learning_rate
from halley.train.save_requests import SaveRequests


if TYPE_CHECKING:
    from halley.planner.step_plan import StepPlan


@final
class ExpertCounter:
    """Counts the tokens that each expert of each MoE layer receives on this rank."""

    def __init__(self) -> None:
        self._total_ME: torch.Tensor | None = None
        self._num_steps = 0

    def add(self, counts_ME: torch.Tensor) -> None:
        """Add the counts of one step, without a read by the host.

        Args:
            counts_ME: int64, of this rank.
        """
        self._total_ME = counts_ME + (0 if self._total_ME is None else self._total_ME)
        self._num_steps += 1

    def write(self, path: Path, *, step: int) -> None:
        """Write the counts of all ranks since the last call, and start again from zero. Collective.

        A model without MoE layers writes no file.

        Args:
            path: the file, which is replaced; only rank 0 writes it.
            step: training steps done.
        """
        total_ME, num_steps = self._total_ME, self._num_steps
        self._total_ME, self._num_steps = None, 0
        if total_ME is None or not total_ME.numel():
            return
        if dist.is_initialized():
            dist.all_reduce(total_ME)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_counts(path, total_ME.tolist(), first_step=step - num_steps + 1, last_step=step)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The objects of a run on this rank.

    Attributes:
        config: the configuration, with the strategies that the model uses.
        forward: runs the model, compiled if there are passes.
        counts: counts of tokens per expert.
        requests: requests for checkpoints; a step sums those of all ranks.
        plan: the plan that chose the strategies; None if the user chose them.
    """

    config: RunConfig
    world: World
    groups: ParallelGroups
    recorder: Recorder
    model: MoETransformer
    forward: Callable[[torch.Tensor], ModelOutput]
    optimizer: ModelOptimizer
    loader: BatchLoader
    counts: ExpertCounter
    requests: SaveRequests
    plan: "StepPlan | None" = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one step."""
        train = self.config.train
        sequences = train.batch_size * train.num_microbatches * self.world.num_ranks
        return sequences * self.config.data.seq_len

    def routers(self) -> list[SigmoidRouter]:
        """Return the routers with a selection bias, in order of layer."""
        return [m for m in self.model.modules() if isinstance(m, SigmoidRouter)]

    def state(self) -> dict[str, object]:
        """Return the tensors of a checkpoint; loading writes into them."""
        biases = {str(index): router.bias for index, router in enumerate(self.routers())}
        return self.optimizer.state() | ({"router_bias": biases} if biases else {})


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step, averaged over ranks and microbatches.

    Attributes:
        loss: next-byte cross-entropy, nats per byte.
        router_loss: balance and z losses times their coefficients.
        grad_norm: global norm before clipping.
        learning_rate: the learning rate of the step.
    """

    loss: float
    router_loss: float
    grad_norm: float
    learning_rate: float


def open_corpus(config: RunConfig) -> Corpus:
    """Open the training text of a run.

    Raises:
        ValueError: it is missing, or too short for one sequence.
    """
    path = None if config.data.path is None else Path(config.data.path)
    return Corpus(find_text_files(path), window=config.data.seq_len + 1)


def check_vocabulary(config: RunConfig) -> None:
    """Check that the model's vocabulary has every byte.

    Raises:
        ValueError: the vocabulary is smaller than 256.
    """
    if config.model.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size ({config.model.vocab_size}) must be at least {VOCAB_SIZE}, for bytes"
        )


def read_placements(config: RunConfig, *, ep_size: int) -> list[ExpertPlacement] | None:
    """Return the expert placement of each MoE layer of a run, or None for contiguous ranges.

    Args:
        ep_size: ranks over which the experts are distributed.

    Raises:
        ValueError: the file is missing or damaged, or for other experts, ranks or layers.
    """
    if not config.placement:
        return None
    if config.expert_tp_size > 1:
        raise ValueError(
            f"placement ({config.placement}) must be empty with expert_tp_size "
            f"({config.expert_tp_size}): ranks that share experts have the plain one"
        )
    model = config.model
    return load_placements(
        Path(config.placement),
        num_experts=model.moe.num_experts,
        num_ranks=ep_size,
        num_layers=model.num_moe_layers,
    )


def build_run(config: RunConfig, world: World) -> TrainingRun:
    """Create the model, its optimizer and its data loader. Collective.

    Raises:
        ValueError: the configuration does not fit the ranks or the data.
    """
    _check_run(config, world)
    if config.train.deterministic:
        _make_deterministic()
    groups = build_groups(
        config.ep_size, device_type=world.device.type, tp_size=config.expert_tp_size
    )
    plan = plan_run(config, world, groups)
    if plan is not None:
        config = replace(config, strategy=",".join(plan.strategies))
    recorder = Recorder(world.device, rank=world.rank)
    strategies = build_strategies(
        split_strategies(config.strategy, num_layers=config.model.num_moe_layers),
        groups.ep,
        recorder=recorder,
        device=world.device,
        tp_size=groups.tp_size,
        num_chunks=config.num_chunks,
        max_load=config.max_load,
    )
    model = MoETransformer(
        config.model,
        strategy=strategies,
        groups=groups,
        # The host cannot time the inside of a compiled graph.
        recorder=recorder if config.passes == "none" else Recorder(world.device, enabled=False),
        dtype=DTYPES[config.train.dtype],
        device=world.device,
        activation_checkpointing=config.train.activation_checkpointing,
        placements=read_placements(config, ep_size=groups.ep_size),
    )
    model.init_weights(seed=config.train.seed)
    return TrainingRun(
        config=config,
        world=world,
        groups=groups,
        recorder=recorder,
        model=model,
        forward=model if config.passes == "none" else compile_model(model, config, world.device),
        optimizer=ModelOptimizer(model, config.optimizer, groups=groups),
        loader=_build_loader(config, world),
        counts=ExpertCounter(),
        requests=SaveRequests(every_s=60.0 * config.checkpoint.every_minutes),
        plan=plan,
    )


def _check_run(config: RunConfig, world: World) -> None:
    check_vocabulary(config)
    check_strategies(config)
    check_passes(config)
    # CPU ranks of one host share its memory.
    num_sharing = 1 if world.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_memory(config, num_ranks=world.num_ranks, device=world.device, num_sharing=num_sharing)


def _build_loader(config: RunConfig, world: World) -> BatchLoader:
    return BatchLoader(
        open_corpus(config),
        seq_len=config.data.seq_len,
        batch_size=config.train.batch_size,
        num_microbatches=config.train.num_microbatches,
        rank=world.rank,
        num_ranks=world.num_ranks,
        seed=config.train.seed,
    )


def _make_deterministic() -> None:
    """Let torch choose kernels that give the same bits each time, for the rest of the process.

    Source: PyTorch's notes on reproducibility; cuBLAS needs the workspace setting.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Halley never reads uninitialized memory, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def train_step(run: TrainingRun, step: int) -> StepResult:
    """Run optimizer step number ``step``, from 0. Collective."""
    recorder, num_microbatches = run.recorder, run.config.train.num_microbatches
    losses = torch.zeros(2, device=run.world.device)
    counts_ME: torch.Tensor | None = None
    for microbatch in range(num_microbatches):
        tokens_BS, targets_BS = (
            part.to(run.world.device) for part in run.loader.batch(step, microbatch)
        )
        with recorder.span("forward"):
            output = run.forward(tokens_BS)
        with recorder.span("loss"):
            loss = next_token_loss(output.logits_BSV, targets_BS)
        with recorder.span("backward"):
            run.optimizer.backward(
                (loss + output.router_loss) / num_microbatches,
                last=microbatch + 1 == num_microbatches,
            )
        losses += torch.stack([loss.detach(), output.router_loss.detach()]) / num_microbatches
        counts_ME = output.counts_ME if counts_ME is None else counts_ME + output.counts_ME

    assert counts_ME is not None
    run.counts.add(counts_ME)
    requests = run.requests.local(is_first=run.world.is_first, device=run.world.device)
    totals = torch.cat([losses, requests])
    with recorder.span("gradients.wait", stream="exposed"):
        run.optimizer.sync()
        if dist.is_initialized():
            dist.all_reduce(totals)
    rate = learning_rate(run.config.optimizer, step, num_steps=run.config.train.num_steps)
    with recorder.span("optimizer"):
        norm = run.optimizer.clip()
        run.optimizer.step(rate)
        _update_router_bias(run, counts_ME)
    totals[:2] /= run.world.num_ranks
    mean, router_mean, *requested = totals.tolist()
    run.requests.agree(requested)
    return StepResult(loss=mean, router_loss=router_mean, grad_norm=float(norm), learning_rate=rate)


def _update_router_bias(run: TrainingRun, counts_ME: torch.Tensor) -> None:
    routers = run.routers()
    if not routers:
        return
    if dist.is_initialized():
        dist.all_reduce(counts_ME)
    for router, counts_E in zip(routers, counts_ME, strict=True):
        router.update_bias(counts_E)
