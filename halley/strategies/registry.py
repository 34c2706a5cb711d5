"""Build strategies by name, for configurations and command lines.

A name is one of ``STRATEGIES``. "fused" and "unfused" may add which activations they save for
backward, as in "fused:recompute"; "chunked" may add its number of chunks, as in "chunked:4".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
import torch.distributed as dist

from halley.core.field_types import check_type, parse_device, show_name
from halley.core.sharding import check_tp_size
from halley.core.timeline import Recorder
from halley.core.types import Save
from halley.cost.hardware import CPU, H200, Predictor, find_hardware
from halley.strategies.all_gather import AllGatherStrategy
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.traceable import TraceableStrategy


if TYPE_CHECKING:
    from halley.fused.buffer_cache import Workspaces


STRATEGIES = ("sequential", "chunked", "all_gather", "functional", "unfused", "fused", "auto")
PLANNED = "planned"  # in a run's configuration: the plan of the run names the strategy
_OLD_NAMES = {"gathered": "all_gather"}


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A strategy's name, parsed.

    Attributes:
        kind: one of ``STRATEGIES``.
        save: activations that "fused" and "unfused" save.
        num_chunks: chunks of "chunked"; 0 if the name does not say.
    """

    kind: str
    save: Save = "all"
    num_chunks: int = 0

    @property
    def is_fused(self) -> bool:
        """Whether the strategy runs the fused kernels, one at a time or overlapped."""
        return self.kind in ("unfused", "fused")


def check_strategy(name: str) -> None:
    """Check that there is a strategy of that name.

    Raises:
        ValueError: there is none, or it has no such variant.
    """
    _parse(name)


def _parse(name: str) -> _Choice:
    check_type(name, str, name="strategy")
    kind, colon, option = name.partition(":")
    choice = _Choice(kind=_OLD_NAMES.get(kind, kind))
    names = ", ".join(STRATEGIES)
    if choice.kind not in STRATEGIES:
        raise ValueError(f"strategy ({show_name(name)}) must be one of {names}")
    if not colon:
        return choice
    if choice.is_fused and option in get_args(Save):
        return replace(choice, save=cast(Save, option))
    if choice.kind == "chunked" and option.isascii() and option.isdecimal() and int(option):
        return replace(choice, num_chunks=int(option))
    variants = [f"{kind}:{save}" for kind in ("unfused", "fused") for save in get_args(Save)]
    listed = ", ".join([names, "chunked:<number>", *variants])
    raise ValueError(f"strategy ({show_name(name)}) must be one of {listed}")


def build_strategy(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    recorder: Recorder,
    device: torch.device | str,
    tp_size: int = 1,
    num_chunks: int = 0,
    max_load: float = 0.0,
    timeout_s: float = 600.0,
    workspaces: "Workspaces | None" = None,
) -> AbstractStrategy:
    """Return the strategy of that name for the ranks of ``group``.

    Args:
        name: as the module describes; see ``check_strategy``.
        group: the ranks over which experts are spread; None for a single rank.
        recorder: takes the strategy's spans.
        device: device of this rank.
        tp_size: adjacent ranks that share each expert, see ``core.sharding``.
        num_chunks: chunks of "chunked"; 0 lets the cost model choose.
        max_load: bound on a rank's rows, as a multiple of the balanced load, for which the fused
            kernels allocate buffers; 0 lets buffers grow.
        timeout_s: how long a fused kernel waits for a peer.
        workspaces: buffers of the fused kernels, which several strategies may share, with their own
            ``max_load`` and ``timeout_s``; None for new ones. With None, "auto" does not try fused
            kernels that would be interpreted.

    Raises:
        ValueError: there is no such strategy, or an argument is out of range or of a wrong type.
    """
    choice = _parse(name)
    check_type(group, dist.ProcessGroup | None, name="group")
    check_type(recorder, Recorder, name="recorder")
    check_tp_size(tp_size, num_ranks=_count(group))
    device = parse_device(device)
    _check_options(num_chunks=num_chunks, max_load=max_load, timeout_s=timeout_s)
    if choice.kind in ("sequential", "chunked"):
        return AllToAllStrategy(
            group,
            recorder=recorder,
            tp_size=tp_size,
            num_chunks=1 if choice.kind == "sequential" else choice.num_chunks or num_chunks,
            predictor=predictor_of(device),
        )
    if choice.kind == "all_gather":
        return AllGatherStrategy(group, recorder=recorder, tp_size=tp_size)
    if choice.kind == "functional":
        return TraceableStrategy(group, tp_size=tp_size)
    options: dict[str, Any] = {"tp_size": tp_size, "max_load": max_load, "timeout_s": timeout_s}
    if choice.kind == "auto":
        options |= {"num_chunks": num_chunks, "workspaces": workspaces}
        return _build_auto(group, recorder=recorder, device=device, options=options)
    # Imported here: Triton is missing on some platforms, and its import takes seconds.
    from halley.fused.buffer_cache import Workspaces
    from halley.strategies.fused import FusedStrategy

    workspaces = workspaces or Workspaces(group, device, **options)
    fused = choice.kind == "fused"
    return FusedStrategy(workspaces, recorder=recorder, fused=fused, save=choice.save)


def _build_auto(
    group: dist.ProcessGroup | None,
    *,
    recorder: Recorder,
    device: torch.device,
    options: dict[str, Any],
) -> AutoStrategy:
    """Return strategy "auto" with its candidates, built with ``options``."""
    tp_size, shares_workspaces = options["tp_size"], options["workspaces"] is not None
    names, left_out = ["sequential", "chunked"], dict[str, str]()
    if device.type == "cpu" and not shares_workspaces:
        left_out["fused"] = "its kernels are interpreted on a CPU"
    else:
        names.append("fused")
    if 1 < tp_size == _count(group):  # else it allocates rows for slots of other ranks' experts
        names.append("all_gather")
    build = partial(build_strategy, group=group, recorder=recorder, device=device, **options)
    return AutoStrategy(
        {name: build(name) for name in names},
        group=group,
        device=device,
        recorder=recorder,
        left_out=left_out,
        releases=not shares_workspaces,
    )


def build_strategies(
    names: Sequence[str],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    **options: Any,
) -> list[AbstractStrategy]:
    """Return a strategy for each layer. Layers with the same name share one; all share buffers.

    Args:
        names: one name a layer.
        group, device, options: as for ``build_strategy``.
    """
    built: dict[str, AbstractStrategy] = {}
    for name in dict.fromkeys(names):
        built[name] = build_strategy(name, group, device=device, **options)
        if _parse(name).is_fused:  # shared workspaces also keep one order of calls on all ranks
            options["workspaces"] = cast(Any, built[name]).workspaces
    return [built[name] for name in names]


def split_strategies(text: str, *, num_layers: int) -> tuple[str, ...]:
    """Return the strategy of each MoE layer, from one name or from names separated by commas.

    Raises:
        ValueError: there is no such strategy, or the number of names is not that of the layers.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        check_strategy(name)
    if len(names) == 1:
        return names * num_layers
    if len(names) != num_layers:
        given = show_name(text)
        raise ValueError(f"strategy ({given}) must be one, or as many as MoE layers ({num_layers})")
    return names


def describe_strategies(names: Sequence[str]) -> str:
    """Return the strategies of consecutive layers in short: "3 x fused, auto"."""
    if len(set(names)) <= 1:
        return "".join(names[:1])
    runs = [(len(list(run)), name) for name, run in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for count, name in runs)


def predictor_of(device: torch.device | str) -> Predictor:
    """Return the cost model of a device; for a GPU without figures, that of an H200."""
    device = parse_device(device)
    if device.type == "cpu":
        return Predictor(CPU)
    try:
        return Predictor(find_hardware(torch.cuda.get_device_name(device)))
    except ValueError:
        return Predictor(H200)


def _check_options(*, num_chunks: int, max_load: float, timeout_s: float) -> None:
    check_type(num_chunks, int, name="num_chunks")
    check_type(max_load, float, name="max_load")
    check_type(timeout_s, float, name="timeout_s")
    if num_chunks < 0:
        raise ValueError(f"num_chunks ({num_chunks}) must be at least 0")
    if max_load != 0 and max_load < 1:
        raise ValueError(f"max_load ({max_load}) must be 0 or at least 1")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s ({timeout_s}) must be above 0")


def _count(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
