"""Run collectives whose errors name failed ranks; compare values of ranks; check peer access.

When ranks differ or a rank is missing, a plain collective aborts, hangs or gives wrong numbers,
depending on the backend. These helpers exchange values through the key-value store of the group
and name the ranks. A call of the store needs no matching call on other ranks, so the store works
even after a collective has failed.
"""

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist

from halley.core.timeline import CURRENT_OPERATION


T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

SHM = Path("/dev/shm")  # a folder of Linux whose files are shared memory

# If this environment variable of PyTorch is 1, ranks may share a GPU, which runs them alternately.
# Sharing is slow, and only for tests on a machine with one GPU.
MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_REPORT_WAIT_S = 3.0  # time to wait for other ranks' reports after a failed collective
_HOST_STAYS_S = 1.0  # extra wait of rank 0, because its process may host the store
_ANSWER_WAIT_S = 10.0  # a store is lost if it does not answer within this time
_VERDICT_MARGIN_S = 2.0  # extra wait of the other ranks, because rank 0 first compares the values
_POLL_S = 0.02
_FOLDER_OPERATION = "work on the run's folder"  # in messages of on_rank_zero and on_all_ranks


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words, such as "rank 3" or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def group_ranks(values: Mapping[int, Key]) -> dict[Key, list[int]]:
    """Return a dict from each value to the ranks that have it; ``values`` maps ranks to values."""
    ranks_of: dict[Key, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def host_name() -> str:
    """Return the name of this host, or ``NCCL_HOSTID`` where it is set, as NCCL does."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a group's collectives, which is the timeout of its store."""
    store: Any = group.get_group_store()  # the type stubs lack ``timeout``
    return store.timeout


@final
class Collective:
    """A context for one collective: an error of NCCL or gloo becomes an error that names ranks.

    The RuntimeError names the ranks that failed, their operations, and the ranks that sent no
    report. ``operation`` names the collective; the group is None for a single process.
    """

    def __init__(self, operation: str, *, group: dist.ProcessGroup | None) -> None:
        self._operation, self._group = operation, group
        self._wait = CURRENT_OPERATION.waiting(operation)

    def __enter__(self) -> None:
        self._wait.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._wait.__exit__(None, error, None)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if isinstance(error, RuntimeError) and not is_memory and self._group is not None:
            raise _name_failure(error, self._operation, group=self._group) from error


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank in a group and the group's size; ``(0, 1)`` for the group None.

    A process that is not in the group gets a ``ValueError``.
    """
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"group ({group}) must be one that this process belongs to: rank {dist.get_rank()} of "
            "the default group is no member"
        )
    return rank, dist.get_world_size(group)


def all_gather_objects(
    value: T, *, group: dist.ProcessGroup | None, operation: str = "gather"
) -> list[T]:
    """Return the values of all ranks of the group, by rank; they are sent as pickles. Collective.

    ``operation`` names the collective in messages. The group is None for a single process.
    """
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    with Collective(operation, group=group):
        dist.all_gather_object(values, value, group=group)
    return values


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run a function on rank 0; all ranks return its result or raise its error. Collective.

    An OSError becomes a RuntimeError.
    """
    group = dist.group.WORLD  # None without a process group
    outcome: list[object] = [None, None]
    if rank_and_size(group)[0] == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = RuntimeError(str(error))
        except Exception as error:
            outcome[1] = error
    if group is not None:
        with Collective(_FOLDER_OPERATION, group=group):
            dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if isinstance(error, Exception):
        raise error
    return cast(T, result)


def on_all_ranks(action: Callable[[int], T]) -> list[T]:
    """Call ``action(rank)`` on each rank; return the results of all ranks, by rank. Collective.

    An OSError on some rank becomes a RuntimeError on all ranks that names the first such rank.
    """
    group = dist.group.WORLD  # None without a process group
    outcome: tuple[T | None, str] = (None, "")
    try:
        outcome = (action(rank_and_size(group)[0]), "")
    except OSError as error:
        outcome = (None, error.strerror or str(error))
    outcomes = all_gather_objects(outcome, group=group, operation=_FOLDER_OPERATION)
    for rank, (_, problem) in enumerate(outcomes):
        if problem:
            raise RuntimeError(f"rank {rank}: {problem}")
    return cast(list[T], [result for result, _ in outcomes])


def compare_ranks(
    what: str, values: Mapping[str, object], *, group: dist.ProcessGroup | None
) -> None:
    """Raise ``ValueError`` if ranks of the group call this with different arguments. Collective.

    Args:
        what: name of the point in the program, for messages.
        values: values by name; their ``str`` is compared.

    Raises:
        ValueError: the values differ; names the ranks and their values. Raised on all ranks.
        RuntimeError: a rank did not arrive within the time limit of the group.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    store, rank = group.get_group_store(), dist.get_rank(group)
    names = dist.get_process_group_ranks(group)
    limit_s = time_limit(group).total_seconds()
    # The keys contain the number of the comparison, because the store keeps earlier keys. Each rank
    # counts its own comparisons; ranks that run the same program have equal counts.
    number = store.add(f"halley/compared/{rank}", 1)
    keys = [f"halley/compared/{number}/{each}" for each in range(len(names))]
    verdict_key = f"halley/compared/{number}/verdict"
    own = {"what": what} | {name: str(value) for name, value in values.items()}
    store.set(keys[rank], json.dumps(own))
    with CURRENT_OPERATION.waiting(f"the comparison of {what}"):
        if rank == 0 and _wait_for(store, keys, limit_s=limit_s):
            values_W = [json.loads(store.get(key)) for key in keys]
            store.set(verdict_key, _difference(what, values_W, names=names))
        limit_s_here = 0.0 if rank == 0 else limit_s + _VERDICT_MARGIN_S
        has_verdict = _wait_for(store, [verdict_key], limit_s=limit_s_here)
    if not has_verdict:
        missing = [names[peer] for peer, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {names[rank]}: {name_ranks(missing or [names[0]])} did not come to the first "
            f"call of {what} within {limit_s:g} s: all ranks of a group must run the same layers, "
            "in the same order"
        )
    if verdict := store.get(verdict_key).decode():
        raise ValueError(verdict)


def _wait_for(store: Any, keys: list[str], *, limit_s: float) -> bool:
    # Poll in a loop, because ``Store.wait`` blocks other threads on the same connection.
    deadline_s, pause_s = time.monotonic() + limit_s, _POLL_S / 10
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)
    return True


def _difference(what: str, values_W: list[dict[str, str]], *, names: list[int]) -> str:
    if all(each == values_W[0] for each in values_W):
        return ""
    found: list[str] = []
    for name in dict.fromkeys(name for each in values_W for name in each):
        shown_W = [each.get(name, "none") for each in values_W]
        ranks_of = group_ranks(dict(zip(names, shown_W, strict=True)))
        if len(ranks_of) > 1:
            shown = ", ".join(f"{v} on {name_ranks(ranks)}" for v, ranks in ranks_of.items())
            title = "the layer" if name == "what" else name
            found.append(f"{title} ({shown})")
            if name == "what":  # the values of different layers need not be equal
                break
    return f"{'; '.join(found)} must be the same on all ranks that run {what} together"


def _name_failure(error: RuntimeError, operation: str, *, group: dist.ProcessGroup) -> RuntimeError:
    """Build an error from ``error``, ranks that failed in other operations, and silent ranks."""
    names, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    count = CURRENT_OPERATION.num_operations
    lines = str(error).splitlines() or [type(error).__name__]
    reason = re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". This is typically")[0]
    reports = _collect_reports(group, {"at": operation, "count": count})
    silent = [names[peer] for peer in range(len(names)) if peer not in reports]
    clauses = [
        f"rank {names[peer]} failed in {report['at']} (operation {report['count']})"
        for peer, report in sorted(reports.items())
        if peer != rank and report["at"] != operation
    ]
    if not reports:
        clauses = [
            "the store of the group does not answer, so the process that hosts it, rank 0 or its "
            "launcher, has ended or is stopped"
        ]
    elif silent:
        clauses.append(
            f"{name_ranks(silent)} did not report within {_REPORT_WAIT_S:g} s: lost, stopped, or "
            "in another operation"
        )
    found = f": {'; '.join(clauses)}" if clauses else ""
    return RuntimeError(
        f"rank {names[rank]} failed in {operation} (operation {count} of this process){found}; "
        f"{reason}"
    )


def _collect_reports(
    group: dist.ProcessGroup, own: dict[str, object]
) -> dict[int, dict[str, object]]:
    """Publish this rank's failure, ``own``; return the failures published in time, by rank."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    reports: dict[int, dict[str, object]] = {}
    stays_s = _HOST_STAYS_S if rank == 0 else 0.0

    def exchange() -> None:
        # A store raises a RuntimeError when the process that hosts it has ended.
        with contextlib.suppress(RuntimeError):
            # Clone the store: another thread's blocked call may hold the shared store's connection.
            shared: Any = group.get_group_store()  # the type stubs of a store lack ``clone``
            store = shared.clone()
            store.set(f"halley/failed/{rank}", json.dumps(own))
            end_s = time.monotonic() + _REPORT_WAIT_S
            while len(reports) < num_ranks and time.monotonic() < end_s:
                for peer in range(num_ranks):
                    key = f"halley/failed/{peer}"
                    if peer not in reports and store.check([key]):
                        reports[peer] = json.loads(store.get(key))
                time.sleep(_POLL_S + 1e-3 * num_ranks)
            time.sleep(stays_s)

    # Use a thread, to have a time limit: calls to a store whose host is stopped never return.
    thread = threading.Thread(target=exchange, name="halley-report", daemon=True)
    thread.start()
    thread.join(_REPORT_WAIT_S + stays_s + _ANSWER_WAIT_S)
    return dict(reports)


@dataclass(frozen=True, kw_only=True)
class MemoryLocation:
    """Host and device of a rank's memory, and the other GPUs whose memory its GPU can address."""

    host: str
    boot_id: str  # of the kernel, because two hosts may have the same name; "" if unknown
    device: str  # "cpu" or "cuda:<index>"
    # Device number (st_dev) of /dev/shm, equal on ranks that share it; None without it or on a GPU.
    shm_id: int | None = None
    uuid: str = ""  # uuid of the GPU
    reachable: tuple[str, ...] = ()  # uuids of the GPUs whose memory this GPU can address
    may_share: bool = False  # the rank may use the GPU of another rank, see ``MAY_SHARE``


def peer_access(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """Return "" if all ranks can address each other's memory, else the reason why not. Collective.

    All ranks of the group get the same answer, which does not change while the processes live.
    With NCCL, a CUDA device must be the current one.
    """
    operation = "the check of peer access"
    location = _locate(torch.device(device))
    return find_access_problem(all_gather_objects(location, group=group, operation=operation))


def find_access_problem(locations_W: list[MemoryLocation]) -> str:
    """Return the first reason why these ranks cannot address each other's memory; "" if none."""
    for rank, location in enumerate(locations_W):
        if location.device == "cpu" and location.shm_id is None:
            return f"rank {rank} has no shared memory: {location.host} has no {SHM}"
    for (rank, here), (peer, there) in itertools.permutations(enumerate(locations_W), 2):
        both = f"ranks {rank} and {peer}"
        if (here.host, here.boot_id) != (there.host, there.boot_id):
            return f"{both} are on different hosts, {here.host} and {there.host}"
        if here.device.partition(":")[0] != there.device.partition(":")[0]:
            return f"{both} are on different kinds of device, {here.device} and {there.device}"
        if here.shm_id != there.shm_id:
            return f"{both} have different {SHM}: they are in different containers"
        if here.device == "cpu":
            continue
        if here.uuid == there.uuid:
            if here.may_share and there.may_share:
                continue
            return f"{both} share one GPU, {here.device} and {there.device}"
        if here.device == there.device:  # torch's symmetric memory would confuse the GPUs
            return (
                f"{both} both call their GPU {here.device}: let every rank see all GPUs "
                "(CUDA_VISIBLE_DEVICES)"
            )
        if there.uuid not in here.reachable:
            return (
                f"no peer access from {here.device} of rank {rank} to {there.device} of rank {peer}"
            )
    return ""


def _locate(device: torch.device) -> MemoryLocation:
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    host: dict[str, Any] = {"host": host_name(), "boot_id": boot_id}
    if device.type == "cpu":
        # None: the host has no /dev/shm, which ``find_access_problem`` reports on all ranks.
        shm_id = SHM.stat().st_dev if SHM.is_dir() else None
        return MemoryLocation(**host, device="cpu", shm_id=shm_id)
    index = torch.cuda.current_device() if device.index is None else device.index
    reachable = tuple(
        _uuid(peer)
        for peer in range(torch.cuda.device_count())
        if peer != index and torch.cuda.can_device_access_peer(index, peer)
    )
    gpu = host | {"device": f"cuda:{index}", "uuid": _uuid(index), "reachable": reachable}
    return MemoryLocation(**gpu, may_share=os.environ.get(MAY_SHARE) == "1")


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
