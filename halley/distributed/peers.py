"""Name ranks that differ or are missing, by values that ranks exchange through a group's store.

A collective between ranks that differ aborts the process, hangs or gives wrong numbers, by backend.
The store needs no matching call of the other ranks, so it still answers after a collective failed.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

from halley.core.position import POSITION


_REPORT_WAIT_S = 3.0  # that a rank whose collective failed waits for the reports of the others
_HOST_STAYS_S = 1.0  # longer, since the store may go with the process of rank 0
_ANSWER_WAIT_S = 10.0  # after which a store that does not answer counts as lost
_VERDICT_MARGIN_S = 2.0  # that other ranks wait longer than rank 0, which compares
_POLL_S = 0.02


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of the store of a group, which is that of ``init_process_group``."""
    store: Any = group.get_group_store()  # whose stubs lack the attribute
    return store.timeout


@final
class Collective:
    """Run a collective inside ``with``; its error names the operation and the ranks that failed.

    The error that the backend raises becomes a RuntimeError that says which ranks failed in which
    operation, and which did not report anything.

    Args:
        operation: name of the collective in messages.
        group: its ranks; None for a rank on its own.
    """

    def __init__(self, operation: str, *, group: dist.ProcessGroup | None) -> None:
        self._operation, self._group = operation, group
        self._wait = POSITION.waiting(operation)

    def __enter__(self) -> None:
        self._wait.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wait.__exit__(kind, error, trace)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if isinstance(error, RuntimeError) and not is_memory and self._group is not None:
            raise _name_failure(error, self._operation, group=self._group) from error


def compare_ranks(
    what: str, values: Mapping[str, object], *, group: dist.ProcessGroup | None
) -> None:
    """Check that all ranks of the group came to the same point with the same values.

    A collective that runs through the store of the group, not through its backend: a rank that
    does not come is an error within the time limit of the group. Rank 0 of the group compares.

    Args:
        what: the point, in messages.
        values: by name; compared by their text.
        group: the ranks; None for a rank on its own.

    Raises:
        ValueError: on all ranks, the values differ; names the ranks and their values.
        RuntimeError: a rank did not come within the time limit.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    store, rank = group.get_group_store(), dist.get_rank(group)
    names = dist.get_process_group_ranks(group)
    limit_s = time_limit(group).total_seconds()
    # Each rank counts its comparisons; ranks that are in step have counted alike.
    number = store.add(f"halley/compared/{rank}", 1)
    keys = [f"halley/compared/{number}/{each}" for each in range(len(names))]
    verdict_key = f"halley/compared/{number}/verdict"
    own = {"what": what} | {name: str(value) for name, value in values.items()}
    store.set(keys[rank], json.dumps(own))
    with POSITION.waiting(f"the comparison of {what}"):
        if rank == 0:
            verdict = ""
            if _wait_for(store, keys, limit_s=limit_s):
                told = [json.loads(store.get(key)) for key in keys]
                verdict = _difference(what, told, names=names)
                store.set(verdict_key, verdict)
                is_complete = True
            else:
                is_complete = False
        else:
            is_complete = _wait_for(store, [verdict_key], limit_s=limit_s + _VERDICT_MARGIN_S)
            verdict = store.get(verdict_key).decode() if is_complete else ""
    if not is_complete:
        missing = [names[peer] for peer, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {names[rank]}: {name_ranks(missing or [names[0]])} did not come to the first "
            f"call of {what} within {limit_s:g} s: all ranks of a group must run the same layers, "
            "in the same order"
        )
    if verdict:
        raise ValueError(verdict)


def _wait_for(store: Any, keys: list[str], *, limit_s: float) -> bool:
    """Return whether all keys are set within the time; polls, since a blocking wait has a lock."""
    deadline_s, pause_s = time.monotonic() + limit_s, _POLL_S / 10
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)
    return True


def _difference(what: str, told: list[dict[str, str]], *, names: list[int]) -> str:
    """Return a sentence that names the ranks that differ and their values, or ""."""
    if all(each == told[0] for each in told):
        return ""
    found: list[str] = []
    for name in dict.fromkeys(name for each in told for name in each):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in zip(names, told, strict=True):
            ranks_of.setdefault(each.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            shown = ", ".join(f"{v} on {name_ranks(ranks)}" for v, ranks in ranks_of.items())
            title = "the layer" if name == "what" else name
            found.append(f"{title} ({shown})")
            if name == "what":  # what follows has other names
                break
    return f"{'; '.join(found)} must be the same on all ranks that run {what} together"


def _name_failure(error: RuntimeError, operation: str, *, group: dist.ProcessGroup) -> RuntimeError:
    """Return the error of a collective with the ranks that failed elsewhere, or did not report."""
    names, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    count = POSITION.num_operations
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
    """Tell the others where this rank failed; return what they told within a short time, by rank.

    Returns:
        With the report of this rank; nothing if the store did not answer even once.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    reports: dict[int, dict[str, object]] = {}
    stays_s = _HOST_STAYS_S if rank == 0 else 0.0

    def exchange() -> None:
        # Another connection: the group's own may be in use by a call that does not return.
        store: Any = group.get_group_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set(f"halley/failed/{rank}", json.dumps(own))
        end_s = time.monotonic() + _REPORT_WAIT_S
        while len(reports) < num_ranks and time.monotonic() < end_s:
            for peer in range(num_ranks):
                key = f"halley/failed/{peer}"
                if peer not in reports and store.check([key]):
                    reports[peer] = json.loads(store.get(key))
            time.sleep(_POLL_S + 1e-3 * num_ranks)
        time.sleep(stays_s)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # what all stores raise when their host is gone
            exchange()

    # A thread, since a store whose host is stopped never answers.
    thread = threading.Thread(target=run, name="halley-report", daemon=True)
    thread.start()
    thread.join(_REPORT_WAIT_S + stays_s + _ANSWER_WAIT_S)
    return dict(reports)
