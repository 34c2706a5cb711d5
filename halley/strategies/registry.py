"""Strategies by name, for configurations and command lines."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
import torch.distributed as dist

from halley.core.field_types import check_type, show_name
from halley.core.sharding import check_tp_size
from halley.core.timeline import Recorder
from halley.core.torch_device import parse_device
from halley.core.types import Save
from halley.cost.hardware import CPU, H200, find_hardware
from halley.cost.predict import Predictor
from halley.strategies.all_gather import GatheredStrategy
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.chunked import ChunkedStrategy
from halley.strategies.functional import FunctionalStrategy
from halley.strategies.sequential import SequentialStrategy


if TYPE_CHECKING:
    from halley.fused.buffer_cache import Workspaces


STRATEGIES = ("sequential", "chunked", "gathered", "functional", "unfused", "fused", "auto")
PLANNED = "planned"  # in a run's configuration, until its plan says which of them
_SAVING = ("unfused", "fused")  # those that may say what they keep, as in "fused:inputs"


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
        name: one of ``STRATEGIES``; "fused" and "unfused" may be followed by what they keep for
            backward: "fused:inputs", "fused:recompute".
        group: the ranks over which experts are spread; None for a rank on its own.
        tp_size: neighbours in rank that share each expert, see ``core.sharding``.
        num_chunks: chunks of "chunked"; 0 lets the cost model choose.
        max_load: of the workspaces of the fused kernels, if none are given.
        timeout_s: how long a fused kernel waits for a peer, if no workspaces are given.
        workspaces: buffers of the fused kernels, which several strategies may share; None for its
            own, shared by all its layers. With None "auto" leaves out kernels that are interpreted.

    Raises:
        ValueError: there is no such strategy, or an argument is out of range or of a wrong type.
    """
    _check_arguments(name, group, recorder=recorder, tp_size=tp_size)
    device = parse_device(device)
    _check_options(num_chunks=num_chunks, max_load=max_load, timeout_s=timeout_s)
    if name == "sequential":
        return SequentialStrategy(group, recorder=recorder, tp_size=tp_size)
    if name == "chunked":
        options = {"predictor": predictor_of(device), "num_chunks": num_chunks}
        return ChunkedStrategy(group, recorder=recorder, tp_size=tp_size, **options)
    if name == "gathered":
        return GatheredStrategy(group, recorder=recorder, tp_size=tp_size)
    if name == "functional":
        return FunctionalStrategy(group, tp_size=tp_size)
    if name == "auto":
        build = partial(
            build_strategy, group=group, recorder=recorder, device=device, tp_size=tp_size,
            num_chunks=num_chunks, max_load=max_load, timeout_s=timeout_s, workspaces=workspaces,
        )  # fmt: skip
        interprets = device.type == "cpu" and workspaces is None
        names, left_out = _measured(tp_size, num_ranks=_count(group), interprets=interprets)
        candidates = {each: build(each) for each in names}
        options = {"left_out": left_out, "releases": workspaces is None}
        return AutoStrategy(candidates, group=group, device=device, recorder=recorder, **options)
    # Only here: Triton is not there on every platform, and slow to import.
    from halley.fused.buffer_cache import Workspaces
    from halley.strategies.fused import FusedStrategy

    workspaces = workspaces or Workspaces(
        group, device, tp_size=tp_size, max_load=max_load, timeout_s=timeout_s
    )
    kind, _, save = name.partition(":")
    options = {"fused": kind == "fused", "save": cast(Save, save or "all")}
    return FusedStrategy(workspaces, recorder=recorder, **options)


def _check_arguments(
    name: str, group: dist.ProcessGroup | None, *, recorder: Recorder, tp_size: int
) -> None:
    check_strategy(name)
    check_type(group, dist.ProcessGroup | None, name="group")
    check_type(recorder, Recorder, name="recorder")
    check_tp_size(tp_size, num_ranks=_count(group))


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


def build_strategies(
    names: Sequence[str],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    **options: Any,
) -> list[AbstractStrategy]:
    """Return a strategy for each layer; layers of one name share one, and all share buffers.

    Args:
        names: of each layer.
        group, device, options: as of ``build_strategy``.
    """
    built: dict[str, AbstractStrategy] = {}
    for name in dict.fromkeys(names):
        built[name] = build_strategy(name, group, device=device, **options)
        if name.partition(":")[0] in _SAVING:  # one turn, too: ranks run all passes in one order
            options["workspaces"] = cast(Any, built[name]).workspaces
    return [built[name] for name in names]


def split_strategies(text: str, *, num_layers: int) -> tuple[str, ...]:
    """Return the strategy of each MoE layer, of a name for all or of names by commas.

    Raises:
        ValueError: there is no such strategy, or they are for another number of layers.
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
    """Return the strategies of layers, those of neighbours that are alike once: "3 x fused"."""
    if len(set(names)) <= 1:
        return "".join(names[:1])
    runs = [(len(list(run)), name) for name, run in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for count, name in runs)


def _count(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _measured(
    tp_size: int, *, num_ranks: int, interprets: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the strategies of which auto takes the fastest, and why another is not of them."""
    names = ["sequential", "chunked"]
    left_out = {"fused": "its kernels are interpreted on a CPU"} if interprets else {}
    names += [] if left_out else ["fused"]
    if 1 < tp_size == num_ranks:  # elsewhere it makes room for slots of other ranks' experts
        names.append("gathered")
    return names, left_out


def check_strategy(name: str) -> None:
    """Check that there is a strategy of that name.

    Raises:
        ValueError: there is none, or it cannot keep what the name says.
    """
    check_type(name, str, name="strategy")
    kind, colon, save = name.partition(":")
    if kind not in STRATEGIES:
        raise ValueError(f"strategy ({show_name(name)}) must be one of {', '.join(STRATEGIES)}")
    if colon and (kind not in _SAVING or save not in get_args(Save)):
        names = ", ".join(f"{each}:{save}" for each in _SAVING for save in get_args(Save))
        listed = f"{', '.join(STRATEGIES)}, {names}"
        raise ValueError(f"strategy ({show_name(name)}) must be one of {listed}")


def predictor_of(device: torch.device | str) -> Predictor:
    """Return the cost model of ``device``; a GPU without figures is taken for an H200."""
    device = parse_device(device)
    if device.type == "cpu":
        return Predictor(CPU)
    try:
        return Predictor(find_hardware(torch.cuda.get_device_name(device)))
    except ValueError:
        return Predictor(H200)
