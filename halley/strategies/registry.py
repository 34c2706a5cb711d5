"""Build strategies by name, for configurations and command lines.

A name is one of ``STRATEGIES``, optionally with a variant. "fused:recompute" and "unfused:inputs"
select the activations that are saved for backward. "chunked:4" sets the number of chunks.
"hierarchical:8" sets the ranks of a node. "hierarchical:float8" and "deduplicated:float8" send
tokens in 8 bits between nodes; "hierarchical:8:float8" does both. "functional:deduplicated" sends a
token once to each rank that has any of its experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Save, check_tp_size
from halley.core.validation import check_type, parse_device, show_name
from halley.cost.hardware import predictor_of
from halley.distributed.nodes import Nodes, find_nodes
from halley.distributed.peers import all_gather_objects, peer_access, rank_and_size
from halley.ops.wire import WireDtype
from halley.strategies.all_gather import AllGatherStrategy
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import FUSED_CAPABILITY, AbstractStrategy
from halley.strategies.hierarchical import HierarchicalStrategy
from halley.strategies.part_orders import PIPELINES, SPLIT
from halley.strategies.traceable import TraceableStrategy


if TYPE_CHECKING:
    from halley.fused.buffers import Workspaces


STRATEGIES = (
    "sequential",
    "chunked",
    "all_gather",
    "functional",
    "unfused",
    "fused",
    "deduplicated",
    "hierarchical",
    "auto",
)
PLANNED = "planned"  # in the configuration of a run: a plan selects the strategy of each layer
# SMs that the kernels inside a node leave to NCCL. With 2 and with 6, forward and backward of
# Mixtral-8x7B and Phi-3.5-MoE took 1 to 6 % less time than with 0 (14 GB/s, two H100).
_NETWORK_SMS = 4
_FUSED = ("unfused", "fused")  # run Halley's kernels, one after another or overlapped
_OLD_NAMES = {"gathered": "all_gather"}


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The parsed name of a strategy, such as "chunked:4"; numbers are 0 if the name has none."""

    kind: str  # one of STRATEGIES
    save: Save = "all"
    num_chunks: int = 0
    ranks_per_node: int = 0
    wire_dtype: WireDtype = ""
    deduplicated: bool = False


def check_strategy(name: str) -> None:
    """Raise ``ValueError`` if there is no strategy of that name, or no such variant."""
    _parse(name)


def _parse(name: str) -> _Choice:
    check_type(name, str, name="strategy")
    kind, colon, option = name.partition(":")
    choice = _Choice(kind=_OLD_NAMES.get(kind, kind))
    if kind in ("hierarchical", "deduplicated") and name.endswith(":float8"):
        choice = replace(choice, wire_dtype="float8")
        _, colon, option = name.removesuffix(":float8").partition(":")
    names = ", ".join(STRATEGIES)
    if choice.kind not in STRATEGIES:
        raise ValueError(f"strategy ({show_name(name)}) must be one of {names}")
    if not colon:
        return choice
    if choice.kind in _FUSED and option in get_args(Save):
        return replace(choice, save=cast(Save, option))
    if choice.kind == "functional" and option == "deduplicated":
        return replace(choice, deduplicated=True)
    number = int(option) if option.isascii() and option.isdecimal() else 0
    if choice.kind == "chunked" and number:
        return replace(choice, num_chunks=number)
    if choice.kind == "hierarchical" and number:
        return replace(choice, ranks_per_node=number)
    variants = [f"{kind}:{save}" for kind in _FUSED for save in get_args(Save)]
    variants += ["functional:deduplicated", "hierarchical:<ranks of a node>"]
    variants += ["hierarchical:float8", "deduplicated:float8"]
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
    """Build a strategy by name, such as "chunked:4", for the ranks of ``group``.

    Args:
        group: the ranks over which experts are spread; None for a single rank.
        tp_size: adjacent ranks that share each expert, see ``core.routing``.
        num_chunks: chunks of "chunked"; 0 lets the cost model choose.
        max_load: most rows of a rank, as a multiple of the balanced load, for which the fused
            kernels allocate buffers; 0 lets buffers grow.
        timeout_s: how long a fused kernel waits for a peer.
        workspaces: buffers of the fused kernels that several strategies share, with their own
            ``max_load`` and ``timeout_s``; None for new buffers.

    Raises:
        ValueError: there is no such strategy, or an argument is out of range or of a wrong type.
    """
    choice = _parse(name)
    check_type(group, dist.ProcessGroup | None, name="group")
    check_type(recorder, Recorder, name="recorder")
    check_tp_size(tp_size, num_ranks=rank_and_size(group)[1])
    device = parse_device(device)
    _check_options(num_chunks=num_chunks, max_load=max_load, timeout_s=timeout_s)
    shared: dict[str, Any] = {"recorder": recorder, "tp_size": tp_size}
    if choice.kind in ("sequential", "chunked"):
        num_chunks = 1 if choice.kind == "sequential" else choice.num_chunks or num_chunks
        predictor = predictor_of(device)
        return AllToAllStrategy(group, num_chunks=num_chunks, predictor=predictor, **shared)
    if choice.kind == "all_gather":
        return AllGatherStrategy(group, **shared)
    if choice.kind == "functional":
        return TraceableStrategy(group, tp_size=tp_size, deduplicated=choice.deduplicated)
    options = {**shared, "device": device, "max_load": max_load, "timeout_s": timeout_s}
    if choice.kind in ("deduplicated", "hierarchical"):
        return _build_hierarchical(name, group, options)
    if choice.kind == "auto":
        options |= {"num_chunks": num_chunks, "workspaces": workspaces}
        return _build_auto(group, options)
    # Imported here: Triton is missing on some platforms, and its import takes about a second.
    from halley.fused.buffers import Workspaces
    from halley.strategies.fused import FusedStrategy

    buffers = workspaces or Workspaces(
        group, device, tp_size=tp_size, max_load=max_load, timeout_s=timeout_s
    )
    fused = choice.kind == "fused"
    return FusedStrategy(buffers, recorder=recorder, fused=fused, save=choice.save)


def build_pipelines(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    recorder: Recorder,
    device: torch.device | str,
    tp_size: int = 1,
    max_load: float = 0.0,
    timeout_s: float = 600.0,
    nodes: Nodes | None = None,
) -> dict[str, HierarchicalStrategy]:
    """Return a strategy across nodes for each of ``PIPELINES``, by pipeline name.

    All share buffers. Inside a node they run "fused" where its kernels can run, else "sequential".
    ``name`` is "hierarchical" or "deduplicated", with variants. Without ``nodes``, a collective of
    all ranks of the job finds them.
    """
    choice, device = _parse(name), parse_device(device)
    if nodes is None:
        size = 1 if choice.kind == "deduplicated" else choice.ranks_per_node
        nodes = find_nodes(group, ranks_per_node=size)
    if nodes.ranks_per_node % tp_size:
        raise ValueError(
            f"tp_size ({tp_size}) must divide the ranks of a node ({nodes.ranks_per_node}) with "
            f"strategy {choice.kind}"
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    operation = "the check of compute capability"
    found = all_gather_objects(capability, group=nodes.local, operation=operation)
    if min(found) >= FUSED_CAPABILITY and not peer_access(nodes.local, device):
        from halley.fused.buffers import Workspaces
        from halley.strategies.fused import FusedStrategy

        reserved_sms = _NETWORK_SMS if nodes.num_nodes > 1 else 0
        limits: dict[str, Any] = {"tp_size": tp_size, "max_load": max_load, "timeout_s": timeout_s}
        workspaces = Workspaces(nodes.local, device, reserved_sms=reserved_sms, **limits)
        inner: AbstractStrategy = FusedStrategy(workspaces, recorder=recorder)
    else:
        inner = AllToAllStrategy(nodes.local, recorder=recorder, tp_size=tp_size)
    return {
        pipeline.name: HierarchicalStrategy(
            group,
            nodes=nodes,
            inner=inner,
            recorder=recorder,
            pipeline=pipeline,
            max_load=max_load,
            wire_dtype=choice.wire_dtype,
        )
        for pipeline in PIPELINES
    }


def _build_hierarchical(
    name: str, group: dist.ProcessGroup | None, options: dict[str, Any]
) -> AbstractStrategy:
    """Return "auto" with a candidate per pipeline; on a CPU or one node, pipeline ``SPLIT``."""
    device, recorder = options["device"], options["recorder"]
    pipelines = build_pipelines(name, group, **options)
    # CPU times say nothing about GPUs, and with one node no rows cross: use one pipeline.
    if device.type == "cpu" or pipelines[SPLIT.name].nodes.num_nodes == 1:
        return pipelines[SPLIT.name]
    return AutoStrategy(dict(pipelines), group=group, device=device, recorder=recorder)


def _build_auto(group: dist.ProcessGroup | None, options: dict[str, Any]) -> AutoStrategy:
    """Return "auto" with candidates "sequential", "chunked" and, where useful, others."""
    device, shares_workspaces = options["device"], options["workspaces"] is not None
    rank, num_ranks = rank_and_size(group)
    across_hosts: dict[str, AbstractStrategy] = {}
    names, left_out = ["sequential", "chunked"], dict[str, str]()
    if device.type == "cpu" and not shares_workspaces:
        left_out["fused"] = "its kernels are interpreted on a CPU"
    else:
        names.append("fused")
    # "all_gather" is a candidate if all ranks share all experts, so each rank needs all tokens.
    # Otherwise it allocates rows for slots of other ranks' experts.
    if 1 < options["tp_size"] == num_ranks:
        names.append("all_gather")
    candidates = {name: build_strategy(name, group, **options) for name in names}
    if "fused" in names and options["tp_size"] == 1 < num_ranks:
        # "hierarchical" is left out: it creates process groups, a collective of the whole job.
        where = {key: options[key] for key in ("recorder", "device", "max_load", "timeout_s")}
        nodes = Nodes(node=rank, num_nodes=num_ranks)
        pipelines = build_pipelines("deduplicated", group, nodes=nodes, **where)
        across_hosts |= {f"deduplicated {name}": each for name, each in pipelines.items()}
    return AutoStrategy(
        candidates,
        group=group,
        device=device,
        recorder=options["recorder"],
        across_hosts=across_hosts,
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
    """Return each layer's strategy. Equal names share one object; fused and unfused share buffers.

    ``names`` has one name for each layer; the other arguments are as for ``build_strategy``.
    """
    built: dict[str, AbstractStrategy] = {}
    for name in dict.fromkeys(names):
        built[name] = build_strategy(name, group, device=device, **options)
        # Shared workspaces save memory, and order the passes of all layers on all ranks.
        if _parse(name).kind in _FUSED:
            options["workspaces"] = cast(Any, built[name]).workspaces
    return [built[name] for name in names]


def split_strategies(text: str, *, num_layers: int) -> tuple[str, ...]:
    """Return the strategy name of each MoE layer, from one name or names separated by commas.

    An unknown strategy, or a wrong number of names, is a ``ValueError``.
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
    """Return a short text for the strategies of consecutive layers: "3 x fused, auto"."""
    if len(set(names)) <= 1:
        return "".join(names[:1])
    runs = [(len(list(run)), name) for name, run in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for count, name in runs)


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
