"""Names a rank that was lost, so that no rank waits for it forever.

Every rank counts heartbeats up in the store. Rank 0 watches all ranks and writes its verdict into
the store; the others watch rank 0 and read the verdict. So the traffic is linear in the number of
ranks, and all ranks name the same one. A store that cannot be reached means that its host is lost.
"""

import atexit
import os
import threading
import time
from types import TracebackType
from typing import Self, final

from torch.distributed.distributed_c10d import PrefixStore, Store


EXIT_LOST_PEER = 75  # EX_TEMPFAIL of sysexits.h: what failed may work when run again

_LEFT = 1 << 40  # added to the counter of a rank that leaves, far above what heartbeats reach
_FINISHED = "its training was over"
_NUM_SIGNS_OF_LIFE = 4  # heartbeats after an error that show that a rank is not lost


@final
class Watchdog:
    """Watches the other ranks while its ``with`` block runs.

    Attributes:
        step: training step that messages name; the training loop sets it.
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
    ) -> None:
        """Make the watchdog of this rank; every rank enters its own right after rendezvous.

        Args:
            store: any store of all ranks; the watchdog talks over a connection of its own.
            rank: this rank.
            num_ranks: ranks that enter a watchdog on this store.
            interval_s: seconds between two heartbeats.
            timeout_s: seconds without a heartbeat after which a rank is lost.
            grace_s: seconds from the verdict until the watchdog ends the process itself.
        """
        self.step = 0
        self._rank = rank
        self._num_ranks = num_ranks
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._counts = [0] * num_ranks
        self._num_moves = [0] * num_ranks  # rounds in which the counter had moved
        self._num_silent = [0] * num_ranks  # rounds since it last had
        self._num_unanswered = 0  # rounds since the store last answered
        self._left: dict[int, str] = {}
        self._verdict: str | None = None
        self._explaining = False
        self._farewell = _FINISHED
        self._stopped = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="halley-heartbeat", daemon=True)
        self._guard = threading.Thread(target=self._end_if_lost, name="halley-guard", daemon=True)

    def __enter__(self) -> Self:
        # How often this rank began counts alike on all ranks, and keeps runs on one store apart.
        start = self._store.add(f"halley/watchdog/starts/{self._rank}", 1)
        self._store = PrefixStore(f"halley/watchdog/{start}", self._store)
        self._store.add(_beat_key(self._rank), 1)
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
        self.stop(error)

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
            rank is lost and repeats ``error``.
        """
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
        return RuntimeError(
            f"rank {self._rank} failed in step {self.step}, though no rank was lost: "
            f"{_describe(error)}"
        )

    @property
    def _linger_s(self) -> float:
        return 2 * self._interval_s + 1.0

    def _message(self, verdict: str) -> str:
        return f"rank {self._rank} lost {verdict} in step {self.step}"

    def _talk(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._exchange()
            self._leave()
        except RuntimeError:  # what all stores raise
            # A host that finished its training takes the store with it, and that is no loss.
            expected = self._stopped.is_set() or self._left.get(0) == _FINISHED
            if not expected and self._verdict is None:
                self._verdict = f"{_store_host()} (connection lost)"

    def _exchange(self) -> None:
        self._store.add(_beat_key(self._rank), 1)
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
        self._num_unanswered = 0
        if self._verdict is None:
            self._judge()

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
        verdict = " and ".join(silent) or " and ".join(departed)
        if verdict and self._rank == 0:
            self._store.set("verdict", verdict)
        self._verdict = verdict or None

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
                self._verdict = f"{_store_host()} (no answer for {self._timeout_s:g} s)"
        if self._verdict is None:
            return
        # Rank 0 stays until the others have read the verdict from its store.
        time.sleep(self._grace_s + (self._linger_s if self._rank == 0 else 0.0))
        # One write to the descriptor: the lock of sys.stderr may be held by the stuck thread.
        os.write(2, f"halley: {self._message(self._verdict)}\n".encode())
        os._exit(EXIT_LOST_PEER)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _describe(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _store_host() -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the launcher of rank 0, which hosts the store"
    return "rank 0, which hosts the store"
