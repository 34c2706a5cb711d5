"""End a run, and name the rank to blame, when ranks are lost or wait for each other forever.

Every rank counts its heartbeats in the store and writes the operation that it is in beside them.
Rank 0 watches all ranks and writes its verdict into the store; the others watch rank 0 and read the
verdict. So the traffic is linear in the number of ranks, and all ranks name the same one. A store
that cannot be reached means that its host is lost.

A rank is lost if its heartbeats stop. Ranks are stuck if none of them has entered another operation
for some time and they are in different ones: soon if every rank waits, which is certain to last;
after the time limit of collectives if only some of them wait.
"""

import atexit
import os
import threading
import time
from types import TracebackType
from typing import Self, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from halley.distributed.failures import tell_failure_from_thread
from halley.distributed.peers import time_limit
from halley.distributed.places import Place, describe_places, differ, find_place
from halley.distributed.ranks import place_in


EXIT_LOST_PEER = 75  # EX_TEMPFAIL of sysexits.h: what failed may work when run again

_LEFT = 1 << 40  # added to the counter of a rank that leaves, far above what heartbeats reach
_ASK_GPU_AFTER_S = 5.0  # without a new operation
_LOST = "lost "  # how the verdict on lost ranks begins
_FINISHED = "its training was over"
_NUM_SIGNS_OF_LIFE = 4  # heartbeats after an error that show that a rank is not lost


@final
class Watchdog:
    """Watch the other ranks while its ``with`` block runs; end this rank when it waits forever.

    In a script of your own, after ``torch.distributed.init_process_group``::

        with halley.Watchdog.of_group():
            train()

    A RuntimeError that leaves the block is replaced by one that names the lost rank, or the
    operation that each rank was in. A rank that is stuck in a call of C++ is ended, with exit code
    75, after one line on stderr.

    Attributes:
        step: training step that messages name, from 1; the training loop sets it.
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
        """Make the watchdog of this rank; every rank enters its own right after rendezvous.

        Args:
            store: any store of all ranks; the watchdog talks over a connection of its own.
            rank: this rank.
            num_ranks: ranks that enter a watchdog on this store.
            interval_s: seconds between two heartbeats.
            timeout_s: seconds without a heartbeat after which a rank is lost.
            grace_s: seconds from the verdict until the watchdog ends the process itself.
            deadlock_s: seconds without a new operation on any rank after which ranks that all wait,
                in different operations, are stuck.
            stall_s: the same where only some of the ranks wait, or where GPUs have work that may
                end: others may compute, or write a checkpoint. Shorter than the time limit of the
                process group, to come before it.

        Raises:
            ValueError: a time is not above 0.
        """
        times = {"interval_s": interval_s, "timeout_s": timeout_s, "grace_s": grace_s}
        for name, value in {**times, "deadlock_s": deadlock_s, "stall_s": stall_s}.items():
            if not value > 0:
                raise ValueError(f"{name} ({value}) must be above 0")
        self.step = 0
        self._rank = rank
        self._num_ranks = num_ranks
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._deadlock_s, self._stall_s = deadlock_s, stall_s
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._counts = [0] * num_ranks
        self._num_moves = [0] * num_ranks  # rounds in which the counter had moved
        self._num_silent = [0] * num_ranks  # rounds since it last had
        self._places: list[Place | None] = [None] * num_ranks
        self._num_still = [0] * num_ranks  # rounds since the place last changed
        self._num_unanswered = 0  # rounds since the store last answered
        self._explained: BaseException | None = None
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._left: dict[int, str] = {}
        self._verdict: str | None = None
        self._explaining = False
        self._farewell = _FINISHED
        self._stopped = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="halley-heartbeat", daemon=True)
        self._guard = threading.Thread(target=self._end_if_lost, name="halley-guard", daemon=True)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None, **options: float) -> Self:
        """Return the watchdog of this rank among those of a process group.

        Args:
            group: None for the default group, which must be initialised.
            options: as of ``Watchdog``; ``stall_s`` is 0.9 of the group's time limit if not given.

        Raises:
            RuntimeError: there is no default group.
            ValueError: this process is no member of the group.
        """
        if group is None and not dist.is_initialized():
            raise RuntimeError("torch.distributed.init_process_group must come before the watchdog")
        group = group or dist.group.WORLD
        rank, num_ranks = place_in(group)
        assert group is not None
        options.setdefault("stall_s", 0.9 * time_limit(group).total_seconds())
        return cls(group.get_group_store(), rank=rank, num_ranks=num_ranks, **options)

    def __enter__(self) -> Self:
        # How often this rank began counts alike on all ranks, and keeps runs on one store apart.
        start = self._store.add(f"halley/watchdog/starts/{self._rank}", 1)
        self._store = PrefixStore(f"halley/watchdog/{start}", self._store)
        self._tell_place()
        atexit.register(self.stop)  # no thread may be inside the store when the interpreter goes
        self._talker.start()
        self._guard.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        explained = None
        if isinstance(error, RuntimeError) and error is not self._explained:
            explained = self.explain(error)
        self.stop(error)
        if explained is not None:
            raise explained from error

    def stop(self, error: BaseException | None = None) -> None:
        """Stop watching and tell the others why this rank leaves.

        A rank that has lost another is still ended ``grace_s`` after the verdict, should it hang.

        Args:
            error: what ended the training, None if it came to its end.
        """
        if self._stopped.is_set():
            return
        if error is not None:
            self._farewell = _describe(error)
        self._stopped.set()
        atexit.unregister(self.stop)
        # A bounded wait: the thread may hang in a store that does not answer.
        self._talker.join(timeout=2 * self._linger_s)

    def explain(self, error: Exception) -> RuntimeError:
        """Say whether an error of a collective comes from a lost rank; takes up to ``timeout_s``.

        Args:
            error: what a collective raised.

        Returns:
            The error to raise in its place. It names the lost rank and the step, or says that no
            rank is lost, repeats ``error``, and names the operations that the ranks are in.
        """
        self._explained = self._explain(error)
        return self._explained

    def _explain(self, error: Exception) -> RuntimeError:
        before = list(self._num_moves)
        self._explaining = True
        deadline_s = time.monotonic() + 2 * self._timeout_s
        while True:
            if self._verdict is not None:
                return RuntimeError(self._message(self._verdict))
            others_live = all(
                self._num_moves[peer] >= before[peer] + _NUM_SIGNS_OF_LIFE
                for peer in range(self._num_ranks)
                if peer != self._rank
            )
            if others_live or not self._talker.is_alive() or time.monotonic() > deadline_s:
                break
            time.sleep(self._interval_s / 4)
        places = {rank: place for rank, place in enumerate(self._places) if place is not None}
        where = f"; {describe_places(places)}" if differ(places.values()) else ""
        return RuntimeError(
            f"rank {self._rank} failed{self._when}, though no rank was lost: "
            f"{_describe(error)}{where}"
        )

    @property
    def _linger_s(self) -> float:
        return 2 * self._interval_s + 1.0

    def _message(self, verdict: str) -> str:
        when = self._when if verdict.startswith(_LOST) else ""  # else it is told of each rank
        return f"rank {self._rank} {verdict}{when}"

    @property
    def _when(self) -> str:
        return f" in step {self.step}" if self.step else ""

    def _talk(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._exchange()
            self._leave()
        except RuntimeError:  # what all stores raise
            # A host that finished its training takes the store with it, and that is no loss.
            expected = self._stopped.is_set() or self._left.get(0) == _FINISHED
            if not expected and self._verdict is None:
                self._verdict = f"{_LOST}{_store_host()} (connection lost)"

    def _exchange(self) -> None:
        self._tell_place()
        watches_all = self._rank == 0 or self._explaining
        for peer in range(self._num_ranks) if watches_all else [0]:
            if peer == self._rank or peer in self._left:
                continue
            count = self._store.add(_beat_key(peer), 0)
            if count >= _LEFT:
                self._left[peer] = self._store.get(f"farewell/{peer}").decode()
            moved = count != self._counts[peer]
            self._num_moves[peer] += moved
            self._num_silent[peer] = 0 if moved else self._num_silent[peer] + 1
            self._counts[peer] = count
            if watches_all and moved and peer not in self._left:
                text = self._store.get(f"place/{peer}")
                self._note_place(peer, Place.from_json(text))
        self._num_unanswered = 0
        if self._verdict is None:
            self._judge()

    def _tell_place(self) -> None:
        # Only after some time: the question would spoil the capture of a CUDA graph.
        is_still = self._num_still[self._rank] * self._interval_s >= _ASK_GPU_AFTER_S
        place = find_place(self.step, busy_device=self._gpu if is_still else None)
        self._note_place(self._rank, place)
        # Before the heartbeat: who has seen that finds a place.
        self._store.set(f"place/{self._rank}", place.to_json())
        self._store.add(_beat_key(self._rank), 1)

    def _note_place(self, rank: int, place: Place) -> None:
        before = self._places[rank]
        is_still = before is not None and not differ((before, place))
        self._num_still[rank] = self._num_still[rank] + 1 if is_still else 0
        self._places[rank] = place

    def _judge(self) -> None:
        if self._rank != 0 and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
            return
        # Rounds are counted and not seconds, so that a job that was suspended may go on.
        limit = self._timeout_s / self._interval_s
        silent = [
            f"rank {peer} (no heartbeat for {self._timeout_s:g} s)"
            for peer in range(self._num_ranks)
            if peer not in self._left and self._num_silent[peer] >= limit
        ]
        # To end first is an early end only for those that still had something to send.
        departed = [
            f"rank {peer} (rank {peer} ended early: {farewell})"
            for peer, farewell in sorted(self._left.items())
            if self._explaining or farewell != _FINISHED
        ]
        lost = " and ".join(silent) or " and ".join(departed)
        verdict = f"{_LOST}{lost}" if lost else self._find_stuck()
        if verdict and self._rank == 0:
            self._store.set("verdict", verdict)
        self._verdict = verdict or None

    def _find_stuck(self) -> str:
        """Return where the ranks wait for each other, or "" if they do not, as far as is known."""
        live = [rank for rank in range(self._num_ranks) if rank not in self._left]
        places = {rank: p for rank in live if (p := self._places[rank]) is not None}
        still_s = min(self._num_still[rank] for rank in live) * self._interval_s
        num_waiting = sum(place.is_waiting for place in places.values())
        someone_waits = any(place.is_waiting or place.is_busy for place in places.values())
        is_mixed = differ(places.values()) or bool(self._left)
        if self._rank != 0 or len(places) < len(live) or not (someone_waits and is_mixed):
            return ""
        limit_s = self._deadlock_s if num_waiting == len(live) else self._stall_s
        if still_s < limit_s:
            return ""
        ended = "".join(f", rank {peer} has ended ({why})" for peer, why in self._left.items())
        return (
            f"cannot go on, since no rank has begun another operation for {limit_s:g} s: "
            f"{describe_places(places)}{ended}"
        )

    def _leave(self) -> None:
        self._store.set(f"farewell/{self._rank}", self._farewell)
        self._store.add(_beat_key(self._rank), _LEFT)
        if self._rank != 0:
            return
        # The store goes with this process: the others must have read it first.
        deadline_s = time.monotonic() + self._linger_s
        peers = range(1, self._num_ranks)
        while time.monotonic() < deadline_s and not all(
            self._store.add(_beat_key(peer), 0) >= _LEFT for peer in peers
        ):
            time.sleep(0.05)

    def _end_if_lost(self) -> None:
        while self._talker.is_alive() and not self._stopped.is_set() and self._verdict is None:
            self._talker.join(timeout=self._interval_s)
            self._num_unanswered += 1
            if self._num_unanswered * self._interval_s > self._timeout_s:
                self._verdict = f"{_LOST}{_store_host()} (no answer for {self._timeout_s:g} s)"
        if self._verdict is None:
            return
        # Rank 0 stays until the others have read the verdict from its store.
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
