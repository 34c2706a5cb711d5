"""One training step (forward, backward, gradient sum, update), and the objects that it needs."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from halley.core.config import RunConfig, num_even_rows
from halley.core.placement import ExpertPlacement, load_placements, write_counts
from halley.core.timeline import Recorder
from halley.core.types import DTYPES
from halley.cost.hardware import default_path
from halley.distributed.launcher import signals_handled
from halley.distributed.mesh import ParallelGroups, World, build_groups
from halley.distributed.peers import compare_ranks
from halley.moe.dense import next_token_loss
from halley.moe.head_loss import needs_chunks
from halley.moe.memory_check import check_memory
from halley.moe.router import SigmoidRouter
from halley.moe.transformer import LossOutput, ModelOutput, MoETransformer
from halley.planner.step_plan import StepPlan, check_strategies, plan_run
from halley.strategies.registry import PLANNED, build_strategies, split_strategies
from halley.train.data import BatchLoader, Corpus, open_corpus, open_eval_corpus
from halley.train.optim import ModelOptimizer, learning_rate


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_COMPILE_TIMEOUT_S = 600.0  # longest wait for ranks that still compile, measure or plan
_IN_GRAPHS = ("functional", "unfused", "fused", PLANNED)  # strategies that a graph can include


@final
class ExpertCounter:
    """Counts the slots that routers give each expert of each MoE layer between two ``write``s."""

    def __init__(self) -> None:
        self._total_ME: torch.Tensor | None = None
        self._num_steps = 0

    def add(self, counts_ME: torch.Tensor) -> None:
        """Add this rank's slot counts of one step, int64, without a device-to-host copy."""
        self._total_ME = counts_ME + (0 if self._total_ME is None else self._total_ME)
        self._num_steps += 1

    def write(self, path: Path, *, step: int) -> None:
        """Sum the counts since the last call over all ranks; rank 0 writes the sums. Collective.

        ``step`` is the number of steps done. A model without MoE layers writes no file.
        """
        total_ME, num_steps = self._total_ME, self._num_steps
        self._total_ME, self._num_steps = None, 0
        if total_ME is None or not total_ME.numel():
            return
        if dist.is_initialized():
            dist.all_reduce(total_ME)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_counts(path, total_ME.tolist(), first_step=step - num_steps + 1, last_step=step)


@final
class SaveRequests:
    """Decides, with the same result on all ranks, when time or a signal requires a checkpoint.

    Slurm sends SIGTERM before it ends a job; a terminal sends SIGINT. After the first signal, the
    current step is completed. A second SIGINT interrupts at once. ``every_s`` is the time between
    checkpoints; 0 means that time requires none.
    """

    def __init__(self, *, every_s: float) -> None:
        self.is_due = False  # whether a checkpoint was due by time in the last step
        self.stop_signal = 0  # the signal that asks the run to end; 0 if none
        self._every_s = every_s
        self._saved_s = time.monotonic()
        self._signal = 0

    def catch_signals(self) -> AbstractContextManager[None]:
        """Return a context in which SIGINT and SIGTERM request a stop; main thread only."""

        def note(number: int, frame: object) -> None:
            if self._signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = self._signal or number

        return signals_handled(_SIGNALS, note)

    def local(self, *, is_first: bool, device: torch.device) -> torch.Tensor:
        """Return 0/1 flags ``(3,)``: checkpoint due (rank 0 only), SIGINT, SIGTERM."""
        is_due = bool(self._every_s) and time.monotonic() - self._saved_s >= self._every_s
        flags = (is_first and is_due, *(self._signal == number for number in _SIGNALS))
        return torch.tensor(flags, dtype=torch.float32, device=device)

    def decide(self, totals: Sequence[float]) -> None:
        """Set ``is_due`` and ``stop_signal`` from the sums of ``local`` over all ranks."""
        num_due, *num_signalled = totals
        numbers = [n for n, count in zip(_SIGNALS, num_signalled, strict=True) if count]
        self.is_due, self.stop_signal = num_due > 0, max(numbers, default=0)

    def saved(self) -> None:
        """Restart the clock for checkpoints by time; called after each checkpoint."""
        self._saved_s = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The model, data, optimizer and other objects that a training run has on this rank."""

    config: RunConfig  # with the strategies in use, never "planned"
    world: World
    groups: ParallelGroups
    recorder: Recorder
    model: MoETransformer
    forward: Callable[[torch.Tensor], ModelOutput]  # the model, compiled if compiler passes are on
    losses: Callable[[torch.Tensor, torch.Tensor], LossOutput]  # its ``losses``, compiled likewise
    optimizer: ModelOptimizer
    loader: BatchLoader
    counts: ExpertCounter
    requests: SaveRequests
    eval_corpus: Corpus | None = None
    plan: StepPlan | None = None  # plan that chose the strategies; None if the user chose them

    def routers(self) -> list[SigmoidRouter]:
        """Return the model's ``SigmoidRouter``s, which have a selection bias, in order of layer."""
        return [m for m in self.model.modules() if isinstance(m, SigmoidRouter)]

    def state(self) -> dict[str, object]:
        """Return weights, moments and router biases for a checkpoint; loading writes into them."""
        biases = {str(index): router.bias for index, router in enumerate(self.routers())}
        return self.optimizer.state() | ({"router_bias": biases} if biases else {})


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Losses (means over ranks and microbatches), gradient norm and learning rate of a step."""

    loss: float  # next-token cross-entropy, nats per token
    router_loss: float  # balance and z losses times their coefficients
    grad_norm: float  # L2 norm of the averaged gradients before clipping
    learning_rate: float


def read_placements(config: RunConfig, *, ep_size: int) -> list[ExpertPlacement] | None:
    """Return each MoE layer's expert placement from file ``config.placement``; None if it is ""."""
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


def check_passes(config: RunConfig) -> None:
    """Raise ``ValueError`` if compiler passes are on, but the model cannot become one graph."""
    if config.passes == "none":
        return
    for name in config.strategy.split(","):
        if name.strip().partition(":")[0] not in _IN_GRAPHS:
            raise ValueError(
                f"strategy ({name.strip()}) must be functional, unfused or fused for passes "
                f"{config.passes}: others are no part of a graph"
            )
    if config.model.moe.expert_bias:
        raise ValueError(
            f"model.moe.expert_bias (true) must be false for passes {config.passes}: strategies "
            "that are part of a graph add no bias"
        )
    if config.train.activation_checkpointing:
        raise ValueError(
            f"train.activation_checkpointing (true) must be false for passes {config.passes}"
        )
    if config.placement:
        raise ValueError(
            f"placement ({config.placement}) must be '' for passes {config.passes}: the sum of the "
            "gradients of replicas is no part of a graph"
        )


def build_run(config: RunConfig, world: World) -> TrainingRun:
    """Return a new ``TrainingRun`` at step 0. Collective.

    ``ValueError`` for an unfit configuration, or if ranks have different text.
    """
    corpus = open_corpus(config)
    eval_corpus = open_eval_corpus(config, corpus, num_ranks=world.num_ranks)
    _compare_text({"data.path": corpus, "data.eval_path": eval_corpus})
    check_strategies(config)
    check_passes(config)
    # CPU ranks of a host share its memory, so ``check_memory`` gets their number.
    num_sharing = 1 if world.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_memory(config, num_ranks=world.num_ranks, device=world.device, num_sharing=num_sharing)
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
        # The host cannot record spans inside a compiled graph: disable the model's recorder.
        recorder=recorder if config.passes == "none" else Recorder(world.device, enabled=False),
        dtype=DTYPES[config.train.dtype],
        device=world.device,
        activation_checkpointing=config.train.activation_checkpointing,
        placements=read_placements(config, ep_size=groups.ep_size),
    )
    model.init_weights(seed=config.train.seed)
    compiled = config.passes != "none"
    return TrainingRun(
        config=config,
        world=world,
        groups=groups,
        recorder=recorder,
        model=model,
        forward=_compile(model, config, world.device) if compiled else model,
        losses=_compile(model.losses, config, world.device) if compiled else model.losses,
        optimizer=ModelOptimizer(model, config.optimizer, groups=groups),
        loader=BatchLoader(corpus, config.train, rank=world.rank, num_ranks=world.num_ranks),
        counts=ExpertCounter(),
        requests=SaveRequests(every_s=60.0 * config.checkpoint.every_minutes),
        eval_corpus=eval_corpus,
        plan=plan,
    )


def _compare_text(corpora: Mapping[str, Corpus | None]) -> None:
    # Ranks with different text would train on other windows, or evaluate different numbers of them.
    values: dict[str, str] = {}
    for key, corpus in corpora.items():
        if corpus is not None:
            values[f"tokens of {key}"] = f"{corpus.num_tokens}, checksum {corpus.fingerprint}"
            values[f"tokenizer of {key}"] = corpus.tokenizer_checksum
    compare_ranks("training", values, group=dist.group.WORLD)


def _compile(
    function: Callable[..., Any], config: RunConfig, device: torch.device
) -> Callable[..., Any]:
    """Return a function of the model, which its first call compiles with the run's passes.

    With profiles, passes plan by measured times, since the speed of the network is not known
    otherwise. On a CPU, operators run one by one: Inductor would take minutes.
    """
    # Imported here, because the imports of Triton and of torch's compiler take seconds.
    from halley.compiler import compile_function

    options: dict[str, Any] = {
        "passes": config.passes,
        "inner": "inductor" if device.type == "cuda" else "eager",
        "unknown_size": num_even_rows(config),
        "timeout_s": _COMPILE_TIMEOUT_S,
    }
    if profiles := _find_profiles(config, device):
        options |= {"profiles": profiles, "measure": True}
    return compile_function(function, **options)


def _find_profiles(config: RunConfig, device: torch.device) -> str:
    """Return the path of the profiles from which passes plan, or "" to plan without profiles."""
    if config.profiles != "auto":
        return config.profiles
    return str(default_path()) if device.type == "cuda" else ""


def _make_deterministic() -> None:
    """Make torch use deterministic kernels, or raise where it has none, until the process ends.

    Source: PyTorch's notes on reproducibility. cuBLAS needs the workspace setting.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Do not fill new memory, which takes time: Halley reads no uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def _forward(run: TrainingRun, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> LossOutput:
    """Return a microbatch's losses and counts; large logits are computed in chunks. Collective."""
    model, recorder = run.model.config, run.recorder
    sizes = {"vocab_size": model.vocab_size, "hidden_size": model.hidden_size}
    if needs_chunks(tokens_BS.numel(), itemsize=DTYPES[run.config.train.dtype].itemsize, **sizes):
        with recorder.span("forward"):
            return run.losses(tokens_BS, targets_BS)
    with recorder.span("forward"):
        output = run.forward(tokens_BS)
    with recorder.span("loss"):
        loss = next_token_loss(output.logits_BSV, targets_BS)
    return LossOutput(loss, output.router_loss, output.counts_ME)


def train_step(run: TrainingRun, step: int) -> StepResult:
    """Run step ``step`` (0 is the first): train on its microbatches, update once. Collective."""
    recorder, num_microbatches = run.recorder, run.config.train.num_microbatches
    losses = torch.zeros(2, device=run.world.device)
    counts: list[torch.Tensor] = []
    for microbatch in range(num_microbatches):
        tokens_BS, targets_BS = (
            part.to(run.world.device) for part in run.loader.batch(step, microbatch)
        )
        loss, router_loss, counts_ME = _forward(run, tokens_BS, targets_BS)
        with recorder.span("backward"):
            run.optimizer.backward(
                (loss + router_loss) / num_microbatches,
                last=microbatch + 1 == num_microbatches,
            )
        losses += torch.stack([loss.detach(), router_loss.detach()]) / num_microbatches
        counts.append(counts_ME)

    counts_ME = torch.stack(counts).sum(dim=0)
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
        if routers := run.routers():
            if dist.is_initialized():
                dist.all_reduce(counts_ME)
            for router, counts_E in zip(routers, counts_ME, strict=True):
                router.update_bias(counts_E)
    totals[:2] /= run.world.num_ranks
    mean, router_mean, *requested = totals.tolist()
    run.requests.decide(requested)
    return StepResult(loss=mean, router_loss=router_mean, grad_norm=float(norm), learning_rate=rate)
