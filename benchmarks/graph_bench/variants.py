"""Prepare the variants of a training step that the graph benchmark compares."""

import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch

from benchmarks.gpu_memory import unused_pool_bytes
from benchmarks.graph_bench.case import (
    CHUNKED,
    DIVIDED,
    LANES,
    NONE,
    OVERLAP,
    SEQUENTIAL,
    Difference,
    GraphCase,
    GraphSubject,
    Loss,
    Step,
    Values,
    compare,
)
from halley.compiler import Backend, OrderReport
from halley.core.timeline import Recorder
from halley.cost.simulate import GraphTime
from halley.distributed.mesh import ParallelGroups
from halley.lanes import LaneStep, compile_step
from halley.strategies.registry import build_strategy


_NUM_DIVIDED = 2  # lanes of one batch in the variant "divided"
_MEET_S = 180.0  # limit for the difference between ranks at the end of the first step
_MAX_ERROR = 400  # characters
_ROOT = Path(__file__).parents[2]
_CODE_FOLDERS = (_ROOT / "halley", _ROOT / "benchmarks")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant whose first step has run.

    Attributes:
        run: runs one step.
        compile_s: time of the first step.
        difference: of loss and gradients from the first variant; for the first variant itself, the
            difference between two of its steps.
        reports: of the graphs that the passes have changed.
        predicted: time of a step, by variant, from the lanes' plan.
        lanes: the step in lanes, which has the plan.
        held_bytes: memory that the variant holds between steps, such as that of CUDA graphs.
        planned_bytes: memory of a step by the lanes' plan, without values of the first variant.
        optimise_s: of lanes, time from the end of the first step to the plan.
    """

    run: Callable[[], None]
    compile_s: float
    difference: Difference
    reports: tuple[OrderReport, ...] = ()
    predicted: tuple[tuple[str, GraphTime], ...] = ()
    lanes: LaneStep | None = None
    held_bytes: int = 0
    planned_bytes: int = 0
    optimise_s: float = 0.0


@final
class Workshop:
    """Prepare the variants of one case one after another; their steps alternate later.

    Args:
        case: the model and its options.
        groups: one expert-parallel group of all ranks.
        device: of this rank.
        profiles: file of measured times, which all variants extend.
    """

    def __init__(
        self, case: GraphCase, groups: ParallelGroups, device: torch.device, *, profiles: Path
    ) -> None:
        self.case, self.groups, self.device = case, groups, device
        self.subject = GraphSubject(case, groups, device)
        self._num_rows = self.subject.fullest_rows()
        self._profiles = profiles
        self._recorder = Recorder(device, enabled=False)
        self._wanted: Values | None = None

    def prepare(self, variant: str, setting: str) -> Variant | str:
        """Return a prepared variant, or the error that all ranks have in common; a collective.

        The values of each variant are compared with those of the first.

        Args:
            variant: one of ``VARIANTS``.
            setting: one of ``GraphCase.settings``.

        Raises:
            RuntimeError: the variant failed on some ranks only, or with different errors.
        """
        name = f"{variant} {setting}".strip()
        before = self._allocated_bytes()
        with warnings.catch_warnings(action="ignore"):  # warnings of torch about its tracing
            warnings.filterwarnings("default", message="halley|microbatches|the batch is not")
            ready = _alike_on_all(lambda: self._prepare(variant, setting), name, groups=self.groups)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(ready, str):
            return ready
        return replace(ready, held_bytes=max(0, self._allocated_bytes() - before))

    def _allocated_bytes(self) -> int:
        """Return the allocated memory of the device, without the first variant's values."""
        if self.device.type != "cuda":
            return 0
        allocated = torch.cuda.memory_allocated(self.device) + unused_pool_bytes(self.device)
        return allocated - self._value_bytes()

    def _value_bytes(self) -> int:
        return sum(each.nbytes for each in (self._wanted or {}).values())

    def forget_values(self) -> None:
        """Free the gradients of the first variant, which would count as memory of a step."""
        self._wanted = None

    def _prepare(self, variant: str, setting: str) -> Variant:
        if variant in (SEQUENTIAL, CHUNKED):
            return self._prepare_plain(variant, setting)
        one_after_another = self.subject.one_after_another
        if variant == OVERLAP:
            return self._first_step(one_after_another(self._overlapped()))
        if variant in (LANES, DIVIDED):
            return self._prepare_lanes(variant)
        backend = Backend()
        options = self.case.options(variant) | {"unknown_size": self._num_rows}
        if variant == NONE:
            return self._first_step(one_after_another(self._compiled(backend, options)))
        options |= {"profiles": self._profiles, "measure": True, "timeout_s": 600.0}
        ready = self._first_step(one_after_another(self._compiled(backend, options)))
        return replace(ready, reports=tuple(backend.reports))

    def _prepare_plain(self, name: str, setting: str) -> Variant:
        strategy = build_strategy(
            name,
            self.groups.ep,
            recorder=self._recorder,
            device=self.device,
            num_chunks=int(setting.removeprefix("n=") or 0),
        )
        plain = self.subject.plain

        def loss(tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
            plain.use(strategy)
            return plain(tokens_BS, targets_BS)

        return self._first_step(self.subject.one_after_another(loss))

    def _prepare_lanes(self, variant: str) -> Variant:
        """Prepare the step in lanes; its values are those of the planned order."""
        is_divided = variant == DIVIDED
        lanes = compile_step(
            self.subject.whole,
            _NUM_DIVIDED if is_divided else self.case.num_microbatches,
            divides_batch=is_divided,
            inner=self.case.inner,
            timeout_s=600.0,
        )

        def run() -> torch.Tensor:
            return lanes(self.subject.tokens_BS, self.subject.targets_BS).sum()

        times_s = [time.perf_counter()]
        while lanes.plan is None:
            self.subject.run(run)
            if lanes.fallback:
                raise RuntimeError(f"lanes do not run: {lanes.fallback}")
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times_s.append(time.perf_counter())
        # A lane of a batch may have more rows than ``max_load`` allows, even if the batch has not.
        self.subject.check_finite(run(), what="losses")
        self.subject.whole.zero_grad()
        predicted = [(variant, lanes.plan.time)]
        if not is_divided:  # lanes of one batch, one after another, are not the step of "none"
            predicted.append((NONE, lanes.plan.time_before))
        ready = self._first_step(run)
        return replace(
            ready,
            compile_s=times_s[1] - times_s[0],
            optimise_s=times_s[-1] - times_s[1],
            predicted=tuple(predicted),
            lanes=lanes,
            planned_bytes=lanes.plan.total_bytes - self._value_bytes(),
        )

    def _compiled(self, backend: Backend, options: dict[str, object]) -> Loss:
        compiled = torch.compile(
            self.subject.whole, backend=backend, fullgraph=True, options=cast(Any, options)
        )
        return cast(Loss, compiled)

    def _overlapped(self) -> Loss:
        """Return the model compiled by Inductor with its own overlap scheduler.

        Halley's operators are decomposed as after the passes. All other settings are defaults,
        except for the graph cache: the scheduler synchronises its estimates across ranks, so a rank
        with a cache hit would let the others hang.
        """
        from halley.compiler.inductor import decompose  # imports Triton

        options: dict[str, Any] = {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "fx_graph_cache": False,
            "post_grad_custom_post_pass": decompose,
        }
        compiled = torch.compile(
            self.subject.whole, backend="inductor", fullgraph=True, options=options
        )
        return cast(Loss, compiled)

    def _first_step(self, step: Step) -> Variant:
        subject = self.subject
        begin_s = time.perf_counter()
        values = subject.values(step)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        compile_s = time.perf_counter() - begin_s
        if self._wanted is None:
            self._wanted, values = values, subject.values(step)
        return Variant(
            run=lambda: subject.run(step),
            compile_s=compile_s,
            difference=compare(values, self._wanted),
        )


def _alike_on_all(make: Callable[[], _T], name: str, *, groups: ParallelGroups) -> _T | str:
    """Return the result of ``make``, or the text of its error if all ranks fail with the same type.

    Ranks exchange the outcome through the store of their group. A collective would not match,
    because a failed rank has skipped some collectives.
    """
    made: _T | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as caught:
        error = caught
    text = "" if error is None else _describe(error)
    kinds = _tell("" if error is None else type(error).__name__, groups)
    if kinds is None:
        told = text or "this one did"
        raise RuntimeError(
            f"{name}: not all ranks came to the end of its first step in {_MEET_S:g} s: {told}"
        ) from error
    if len(set(kinds)) > 1:
        failed = [rank for rank, kind in enumerate(kinds) if kind]
        raise RuntimeError(f"{name} failed on ranks {failed} alone or not alike: {text}") from error
    return cast(_T, made) if error is None else text


def _describe(error: Exception) -> str:
    """Return the message of an error, and the innermost line of Halley's code in its traceback."""
    cause: BaseException = error
    # Dynamo stores the error of a backend in an attribute, not as its cause.
    while inner := getattr(cause, "inner_exception", None) or cause.__cause__:
        cause = inner
    own = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if any(Path(frame.filename).is_relative_to(folder) for folder in _CODE_FOLDERS)
        if frame.name != _alike_on_all.__name__
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR]
    if not own:
        return text
    place = Path(own[-1].filename).relative_to(_ROOT).as_posix()
    return f"{text} ({place}:{own[-1].lineno})"


def _tell(kind: str, groups: ParallelGroups) -> list[str] | None:
    """Return the error type of each rank, "" for none; None if a rank does not answer."""
    if groups.world is None:
        return [kind]
    store = groups.world.get_group_store()
    number = store.add(f"halley/variants/{groups.rank}", 1)
    keys = [f"halley/variant/{number}/{rank}" for rank in range(groups.num_ranks)]
    store.set(keys[groups.rank], json.dumps(kind))
    try:
        store.wait(keys, timedelta(seconds=_MEET_S))
    except RuntimeError:
        return None
    return [json.loads(store.get(key)) for key in keys]
