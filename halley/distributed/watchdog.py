"""End a run if ranks are lost or deadlocked; name the lost ranks, or the operation of each rank.

Every rank increments a heartbeat counter in the store, and stores a report of its current
operation. Rank 0 watches all ranks and writes its verdict into the store. The other ranks watch
rank 0 and read the verdict. So traffic is linear in the number of ranks, and all ranks name the
same lost rank. If the store does not answer, the process that hosts it is lost.

A rank is lost if its heartbeats stop. Ranks are deadlocked if they run different operations and no
rank has begun another operation for some time. If every rank waits, this time is ``deadlock_s``.
If only some ranks wait, others may still compute, so it is the longer ``stall_s``.

                 rank 1                        store                     rank 0
                 heartbeat, report  ------->  beat/1, report/1  ------>  compares all ranks
                 raises or exits    <-------  verdict           <------  "lost rank 2 (...)"
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Self, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from halley.core.timeline import CURRENT_OPERATION
from halley.distributed.launcher import tell_failure_from_thread
from halley.distributed.peers import group_ranks, name_ranks, rank_and_size, time_limit


EXIT_LOST_PEER = 75  # EX_TEMPFAIL of sysexits.h: the run may succeed when started again

_LEFT = 1 << 40  # a rank that leaves adds this to its heartbeat counter, which never grows so large
_ASK_GPU_AFTER_S = 5.0  # after this time without a new operation, check if the GPU is busy
_LOST = "lost "  # start of a verdict that ranks, or the host of the store, are lost
_FINISHED = "its training was over"
_COLLECTIVES = "torch.distributed.distributed_c10d"  # with gloo, its functions block
_NUM_BEATS_ALIVE = 4  # a rank with so many heartbeats after an error is not lost


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The operation that a rank runs or began last, as its watchdog writes it to the store."""

    step: int  # step of training; 0 if steps are not counted
    num_operations: int
    name: str
    is_waiting: bool  # the rank waits for other ranks in the operation
    is_busy: bool = False  # the rank's GPU is known to have unfinished work


@final
class Watchdog:
    """Detects lost and deadlocked ranks during its ``with`` block, and ends this rank if it hangs.

    In a script of your own, after ``torch.distributed.init_process_group``::

        with halley.Watchdog.of_group():
            train()

    A RuntimeError that leaves the block is replaced by one that names the lost rank, or the
    operation of each rank. If this rank hangs in a C++ call, the watchdog writes one line to stderr
    and ends the process with exit code 75. A training loop sets the attribute ``step``, from 1,
    for messages.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        num_ranks: int,
        interval_s: float = 1.0,
        timeout_s: float = 15.0,
        grace_s: float = 5.0,
        deadlock_s: float = 25.0,
        stall_s: float = 540.0,
    ) -> None:
        """Create this rank's watchdog; every rank must enter its watchdog right after rendezvous.

        Args:
            store: any store shared by all ranks; the watchdog opens a connection of its own.
            rank, num_ranks: this rank, and the number of ranks that enter a watchdog on this store.
            interval_s: seconds between two heartbeats.
            timeout_s: a rank without a heartbeat for so many seconds is lost.
            grace_s: seconds from the verdict until the watchdog ends the process.
            deadlock_s: seconds without a new operation on any rank, after which ranks that all wait
                in different operations are deadlocked.
            stall_s: the same limit if only some ranks wait, or if GPUs have unfinished work. It
                should be below the time limit of the process group.
        """
        times = {"interval_s": interval_s, "timeout_s": timeout_s, "grace_s": grace_s}
        for name, value in {**times, "deadlock_s": deadlock_s, "stall_s": stall_s}.items():
            if not value > 0:
                raise ValueError(f"{name} ({value}) must be above 0")
        self.step = 0
        self._rank, self._num_ranks = rank, num_ranks
        self._interval_s, self._timeout_s, self._grace_s = interval_s, timeout_s, grace_s
        self._deadlock_s, self._stall_s = deadlock_s, stall_s
        self._linger_s = 2 * interval_s + 1.0  # time for other ranks to read rank 0's store
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._beat_counters = [0] * num_ranks
        self._num_beats = [0] * num_ranks  # calls of _exchange that saw a new heartbeat
        self._num_silent = [0] * num_ranks  # calls of _exchange in a row without a new heartbeat
        self._reports: list[_Report | None] = [None] * num_ranks
        self._num_unchanged = [0] * num_ranks  # how often in a row a rank's report was the same
        self._num_unanswered = 0  # intervals (``interval_s``) since the store last answered
        self._explained: BaseException | None = None  # last result of ``explain``
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._exit_reasons: dict[int, str] = {}
        self._verdict: str | None = None
        self._explaining = False
        self._exit_reason = _FINISHED
        self._stopped = threading.Event()
        new_thread = partial(threading.Thread, daemon=True)
        self._heartbeat_thread = new_thread(target=self._run_heartbeats, name="halley-heartbeat")
        self._exit_thread = new_thread(target=self._end_if_lost, name="halley-guard")

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None, **options: float) -> Self:
        """Create this rank's watchdog in a process group; ``group`` None means the default group.

        ``options`` are the times of ``Watchdog``; the default of ``stall_s`` is 0.9 of the group's
        time limit. A missing default group is a RuntimeError.
        """
        if group is None and not dist.is_initialized():
            raise RuntimeError("torch.distributed.init_process_group must come before the watchdog")
        group = group or dist.group.WORLD
        rank, num_ranks = rank_and_size(group)
        assert group is not None
        options.setdefault("stall_s", 0.9 * time_limit(group).total_seconds())
        return cls(group.get_group_store(), rank=rank, num_ranks=num_ranks, **options)

    def __enter__(self) -> Self:
        # Each rank numbers its watchdogs on this store. The number is the same on all ranks.
        start = self._store.add(f"halley/watchdog/starts/{self._rank}", 1)
        self._store = PrefixStore(f"halley/watchdog/{start}", self._store)
        self._send_report()
        # A thread that uses the store while Python exits crashes Python: stop the thread first.
        atexit.register(self.stop)
        self._heartbeat_thread.start()
        self._exit_thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        explained = None
        if isinstance(error, RuntimeError) and error is not self._explained:
            explained = self.explain(error)
        self.stop(error)
        if explained is not None:
            raise explained from error

    def stop(self, error: BaseException | None = None) -> None:
        """Stop watching, and tell the other ranks why this rank leaves: an error, or a normal end.

        If there is a verdict and this rank hangs, the process still ends ``grace_s`` later.
        """
        if self._stopped.is_set():
            return
        if error is not None:
            self._exit_reason = _describe(error)
        self._stopped.set()
        atexit.unregister(self.stop)
        # The join has a time limit, because a store that does not answer blocks the thread.
        self._heartbeat_thread.join(timeout=2 * self._linger_s)

    def explain(self, error: Exception) -> RuntimeError:
        """Look for lost ranks for up to 2 * ``timeout_s``; return an error that replaces ``error``.

        The new error names the lost rank and the step. If no rank is lost, it repeats ``error`` and
        adds the operations of the ranks if these differ.
        """
        before = list(self._num_beats)
        self._explaining = True
        deadline_s = time.monotonic() + 2 * self._timeout_s
        while self._verdict is None:
            others_live = all(
                self._num_beats[peer] >= before[peer] + _NUM_BEATS_ALIVE
                for peer in range(self._num_ranks)
                if peer != self._rank
            )
            is_over = not self._heartbeat_thread.is_alive() or time.monotonic() > deadline_s
            if others_live or is_over:
                break
            time.sleep(self._interval_s / 4)
        if self._verdict is not None:
            text = self._message(self._verdict)
        else:
            reports = {rank: each for rank, each in enumerate(self._reports) if each is not None}
            where = f"; {_describe_reports(reports)}" if _differ(reports.values()) else ""
            reason = f"though no rank was lost: {_describe(error)}{where}"
            text = f"rank {self._rank} failed{self._when}, {reason}"
        self._explained = RuntimeError(text)
        return self._explained

    def _message(self, verdict: str) -> str:
        # A verdict about a deadlock already has the training step of each rank.
        when = self._when if verdict.startswith(_LOST) else ""
        return f"rank {self._rank} {verdict}{when}"

    @property
    def _when(self) -> str:
        return f" in step {self.step}" if self.step else ""

    def _run_heartbeats(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._exchange()
            self._leave()
        except RuntimeError:  # stores raise it when the connection is lost
            # If rank 0 ended normally, its store ended too: then a lost connection is no error.
            expected = self._stopped.is_set() or self._exit_reasons.get(0) == _FINISHED
            if not expected and self._verdict is None:
                self._verdict = f"{_LOST}{_store_host()} (connection lost)"

    def _exchange(self) -> None:
        """Send and read reports and heartbeats; judge whether ranks are lost or deadlocked."""
        self._send_report()
        watches_all = self._rank == 0 or self._explaining
        for peer in range(self._num_ranks) if watches_all else [0]:
            if peer == self._rank or peer in self._exit_reasons:
                continue
            count = self._store.add(_beat_key(peer), 0)
            if count >= _LEFT:
                self._exit_reasons[peer] = self._store.get(f"exit_reason/{peer}").decode()
            has_beaten = count != self._beat_counters[peer]
            self._num_beats[peer] += has_beaten
            self._num_silent[peer] = 0 if has_beaten else self._num_silent[peer] + 1
            self._beat_counters[peer] = count
            if watches_all and has_beaten and peer not in self._exit_reasons:
                report = json.loads(self._store.get(f"report/{peer}"))
                self._store_report(peer, _Report(**report))
        self._num_unanswered = 0
        if self._verdict is None:
            self._judge()

    def _send_report(self) -> None:
        name, is_waiting, is_busy = CURRENT_OPERATION.name, CURRENT_OPERATION.is_waiting, False
        main = threading.main_thread().ident
        frame = None if is_waiting or main is None else sys._current_frames().get(main)
        # With gloo, functions of torch.distributed block, so the main thread waits inside of one.
        if frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES:
            name, is_waiting = f"{frame.f_code.co_name} of torch.distributed", True
        # A stream query breaks a CUDA graph capture: query only after a time without progress.
        unchanged_s = self._num_unchanged[self._rank] * self._interval_s
        if self._gpu is not None and unchanged_s >= _ASK_GPU_AFTER_S:
            is_busy = not torch.cuda.default_stream(self._gpu).query()
        operation = {"step": self.step, "num_operations": CURRENT_OPERATION.num_operations}
        report = _Report(**operation, name=name, is_waiting=is_waiting, is_busy=is_busy)
        self._store_report(self._rank, report)
        # Set the report before the heartbeat: a rank that sees the heartbeat then finds the report.
        self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
        self._store.add(_beat_key(self._rank), 1)

    def _store_report(self, rank: int, report: _Report) -> None:
        before = self._reports[rank]
        is_unchanged = before is not None and not _differ((before, report))
        self._num_unchanged[rank] = self._num_unchanged[rank] + 1 if is_unchanged else 0
        self._reports[rank] = report

    def _judge(self) -> None:
        if self._rank != 0 and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
            return
        # Silence is counted in calls of _exchange, not in seconds, so a suspended job can continue.
        limit = self._timeout_s / self._interval_s
        silent = [
            f"rank {peer} (no heartbeat for {self._timeout_s:g} s)"
            for peer in range(self._num_ranks)
            if peer not in self._exit_reasons and self._num_silent[peer] >= limit
        ]
        # A rank that ended normally counts as lost only if this rank has an error to explain.
        departed = {
            peer: f"rank {peer} (rank {peer} ended early: {exit_reason})"
            for peer, exit_reason in sorted(self._exit_reasons.items())
            if self._explaining or exit_reason != _FINISHED
        }
        # Name no rank that ended because it had lost another one of them, unless all did.
        causes = [
            text
            for peer, text in departed.items()
            if not any(f": rank {peer} {_LOST}rank {other} " in text for other in departed)
        ]
        lost = " and ".join(silent or causes or departed.values())
        verdict = f"{_LOST}{lost}" if lost else self._find_stuck()
        if verdict and self._rank == 0:
            self._store.set("verdict", verdict)
        self._verdict = verdict or None

    def _find_stuck(self) -> str:
        """Return a sentence that describes a deadlock or stall; "" if none or if rank is not 0."""
        live = [rank for rank in range(self._num_ranks) if rank not in self._exit_reasons]
        reports = {rank: p for rank in live if (p := self._reports[rank]) is not None}
        unchanged_s = min(self._num_unchanged[rank] for rank in live) * self._interval_s
        num_waiting = sum(report.is_waiting for report in reports.values())
        someone_waits = any(report.is_waiting or report.is_busy for report in reports.values())
        is_mixed = _differ(reports.values()) or bool(self._exit_reasons)
        if self._rank != 0 or len(reports) < len(live) or not (someone_waits and is_mixed):
            return ""
        limit_s = self._deadlock_s if num_waiting == len(live) else self._stall_s
        if unchanged_s < limit_s:
            return ""
        ended = "".join(
            f", rank {peer} has ended ({why})" for peer, why in self._exit_reasons.items()
        )
        return (
            f"cannot go on, since no rank has begun another operation for {limit_s:g} s: "
            f"{_describe_reports(reports)}{ended}"
        )

    def _leave(self) -> None:
        self._store.set(f"exit_reason/{self._rank}", self._exit_reason)
        self._store.add(_beat_key(self._rank), _LEFT)
        if self._rank != 0:
            return
        # The store may end with this process, so wait until the other ranks have left.
        deadline_s = time.monotonic() + self._linger_s
        peers = range(1, self._num_ranks)
        while time.monotonic() < deadline_s and not all(
            self._store.add(_beat_key(peer), 0) >= _LEFT for peer in peers
        ):
            time.sleep(0.05)

    def _end_if_lost(self) -> None:
        """Wait in a thread for a verdict; ``grace_s`` later, end this process, as it may hang."""
        thread = self._heartbeat_thread
        while thread.is_alive() and not self._stopped.is_set() and self._verdict is None:
            thread.join(timeout=self._interval_s)
            self._num_unanswered += 1
            if self._num_unanswered * self._interval_s > self._timeout_s:
                self._verdict = f"{_LOST}{_store_host()} (no answer for {self._timeout_s:g} s)"
        if self._verdict is None:
            return
        # Rank 0 waits longer, so that the others can read the verdict from its store.
        time.sleep(self._grace_s + (self._linger_s if self._rank == 0 else 0.0))
        tell_failure_from_thread(self._message(self._verdict))
        os._exit(EXIT_LOST_PEER)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _describe(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _store_host() -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the launcher of rank 0, which hosts the store"
    return "rank 0, which hosts the store"


def _differ(reports: Iterable[_Report]) -> bool:
    return len({(report.step, report.num_operations, report.name) for report in reports}) > 1


def _describe_reports(reports: Mapping[int, _Report]) -> str:
    """Return the operations of ranks in words, such as "rank 3 waits in dispatch (operation 5)"."""
    clauses: list[str] = []
    for report, ranks in group_ranks(dict(sorted(reports.items()))).items():
        waits = "waits in" if len(ranks) == 1 else "wait in"
        verb = waits if report.is_waiting else "last began"
        step = f"step {report.step}, " if report.step else ""
        place = f"({step}operation {report.num_operations})"
        clauses.append(f"{name_ranks(ranks)} {verb} {report.name or 'no operation'} {place}")
    return ", ".join(clauses)
