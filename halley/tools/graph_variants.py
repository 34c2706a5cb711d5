"""The ways to run a training step that the benchmark of graphs compares, each made ready to run."""

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

from halley.compiler import Backend, OrderReport
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.strategies.registry import build_strategy
from halley.tools.graph_case import (
    CHUNKED,
    NONE,
    OVERLAP,
    SEQUENTIAL,
    Difference,
    GraphCase,
    GraphSubject,
    Loss,
    Values,
    compare,
)


_MEET_S = 180.0  # that ranks may come to the end of a first step one after another
_MAX_ERROR = 400  # characters
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way that is ready: its first step is behind it.

    Attributes:
        run: a step.
        compile_s: of the first step.
        difference: from the first variant; of that, between two steps of its own.
        reports: of the graphs that passes have changed.
    """

    run: Callable[[], None]
    compile_s: float
    difference: Difference
    reports: tuple[OrderReport, ...] = ()


@final
class Workshop:
    """Makes the variants of one case ready, one after another, for steps that then take turns.

    Args:
        case: the model.
        groups: one expert-parallel group of all ranks.
        device: of this rank.
        profiles: file of measured times, which grows.
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
        """Return a variant that is ready, or what went wrong alike on all ranks; a collective.

        Values of all are compared with those of the first.

        Args:
            variant: of ``VARIANTS``.
            setting: of ``GraphCase.settings``.

        Raises:
            RuntimeError: something went wrong on some ranks alone, or not alike.
        """
        name = f"{variant} {setting}".strip()
        ready = _alike_on_all(lambda: self._prepare(variant, setting), name, groups=self.groups)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return ready

    def forget_values(self) -> None:
        """Let go of the first variant's gradients: they would count as memory of a step."""
        self._wanted = None

    def _prepare(self, variant: str, setting: str) -> Variant:
        if variant in (SEQUENTIAL, CHUNKED):
            return self._prepare_plain(variant, setting)
        if variant == OVERLAP:
            return self._first_step(self._overlapped())
        backend = Backend()
        options = self.case.options(variant) | {"unknown_size": self._num_rows}
        if variant == NONE:
            return self._first_step(self._compiled(backend, options))
        options |= {"profiles": self._profiles, "measure": True, "timeout_s": 600.0}
        ready = self._first_step(self._compiled(backend, options))
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
            plain.model.use(strategy)
            return plain(tokens_BS, targets_BS)

        return self._first_step(loss)

    def _compiled(self, backend: Backend, options: dict[str, object]) -> Loss:
        compiled = torch.compile(
            self.subject.whole, backend=backend, fullgraph=True, options=cast(Any, options)
        )
        return cast(Loss, compiled)

    def _overlapped(self) -> Loss:
        """Return the model compiled by Inductor with its own scheduler of overlap.

        It sees Halley's operators as it does behind the passes. Its other settings are Inductor's
        own. A rank that found a graph in the cache would not come to where the others compare their
        estimates, so there is none.
        """
        from halley.compiler.inductor import ExpandPass  # imports Triton

        options: dict[str, Any] = {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "fx_graph_cache": False,
            "post_grad_custom_post_pass": ExpandPass(),
        }
        compiled = torch.compile(
            self.subject.whole, backend="inductor", fullgraph=True, options=options
        )
        return cast(Loss, compiled)

    def _first_step(self, loss: Loss) -> Variant:
        subject = self.subject
        begin_s = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of how it traces
            warnings.filterwarnings("default", message="halley")
            values = subject.values(loss)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        compile_s = time.perf_counter() - begin_s
        if self._wanted is None:
            self._wanted, values = values, subject.values(loss)
        return Variant(
            run=lambda: subject.step(loss),
            compile_s=compile_s,
            difference=compare(values, self._wanted),
        )


def _alike_on_all(make: Callable[[], _T], name: str, *, groups: ParallelGroups) -> _T | str:
    """Return what ``make`` makes, or its error's text if it fails alike on all ranks.

    Ranks tell each other through the store of their group: one that failed would not come to a
    collective in the order in which the others do.
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
    """Return what an error says, and the innermost line of this package that it came through."""
    cause: BaseException = error
    # Dynamo keeps what a backend has raised, without its cause, in an attribute.
    while inner := getattr(cause, "inner_exception", None) or cause.__cause__:
        cause = inner
    package = Path(__file__).parents[1]
    own = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if Path(frame.filename).is_relative_to(package) and frame.name != _alike_on_all.__name__
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR]
    if not own:
        return text
    place = Path(own[-1].filename).relative_to(package.parent).as_posix()
    return f"{text} ({place}:{own[-1].lineno})"


def _tell(kind: str, groups: ParallelGroups) -> list[str] | None:
    """Return what each rank tells, an empty word if it did not fail; None if one tells nothing."""
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
