"""Schedule ranks and Triton programs as threads in an order that a seed determines.

Exactly one thread runs at any time. It may switch to another one after an atomic operation, after a
volatile load, and between two programs. So every order in which programs can see each other's flags
is possible. A seed gives one of these orders, the same in each run.

Memory is sequentially consistent here, so a missing fence or a missing release has no effect.
tests/fused/test_compiled.py checks both in the PTX.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from random import Random
from typing import Any, TypeVar, final


T = TypeVar("T")

# Longest pause of a starved thread, in switches between threads. A test launch has a few hundred.
_MAX_STARVED_SWITCHES = 500


class _Stop(BaseException):
    """Raised to end a thread after another one failed; ``except Exception`` does not catch it."""


@final
class _Task:
    """A thread of a scheduler; the thread runs only from a ``wake`` to its next ``sleep``."""

    def __init__(self, scheduler: "Scheduler", *, index: int, name: str) -> None:
        self.scheduler = scheduler
        self.index = index
        self.name = name
        self.starved_until = 0
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.wake = self._asleep.release  # lets this thread run; the caller must then sleep or end
        self.sleep = self._asleep.acquire  # stops the calling thread until ``wake``


_TASK: ContextVar[_Task | None] = ContextVar("task", default=None)


def switch_point() -> None:
    """Let the scheduler switch threads; without a scheduler, yield the CPU to another process."""
    task = _TASK.get()
    if task is None:
        os.sched_yield()  # not time.sleep(0), which takes 50 us and would double the time of a poll
    else:
        task.scheduler.step()


def current_scheduler() -> "Scheduler | None":
    """Return the scheduler that runs this thread; None outside of ``Scheduler.run_ranks``."""
    task = _TASK.get()
    return task.scheduler if task else None


@final
class Scheduler:
    """Runs ranks and their Triton programs as threads, one at a time, in an order from a seed.

    Args:
        resident: how many programs of a launch run concurrently, as on a GPU that holds this many
            CTAs. Programs start in the order of their ids. If a program waits for one that cannot
            start, the run ends after ``max_switches``.
        starve: probability with which a picked thread pauses for a long time instead of running.
        max_switches: a ``run_ranks`` with more switches between threads is an error.

    Attributes:
        trace: the threads picked in the last ``run_ranks``, numbered in the order of creation.
    """

    def __init__(
        self, seed: int, *, resident: int, starve: float = 0.0, max_switches: int = 200_000
    ) -> None:
        if resident < 1:
            raise ValueError(f"resident ({resident}) must be at least 1")
        if not 0 <= starve < 1:
            raise ValueError(f"starve ({starve}) must be at least 0 and below 1")
        self.seed = seed
        self.resident = resident
        self.starve = starve
        self.max_switches = max_switches
        self._reset(num_ranks=0)

    @property
    def num_switches(self) -> int:
        return len(self.trace)

    def run_ranks(self, num_ranks: int, fn: Callable[[int], T]) -> list[T]:
        """Call ``fn(rank)`` in one thread for each rank; return the results by rank.

        The error of the first rank that failed is raised, with a note that names rank and seed. All
        other ranks have ended by then.
        """
        self._reset(num_ranks=num_ranks)
        results: dict[int, T] = {}

        def run_rank(rank: int) -> None:
            results[rank] = fn(rank)

        threads = [self._start(f"rank {r}", partial(run_rank, r)) for r in range(num_ranks)]
        if threads:
            self._pick().wake()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(num_ranks)]

    def run_launches(self, launches: Sequence[tuple[Callable[[Any], None], Sequence[Any]]]) -> None:
        """Run all programs of kernel launches to their end; called in the thread of a rank.

        A launch is a function and the programs that it is called with. It begins when all programs
        of the launch before it have begun, and runs at most ``resident`` programs at a time.
        """
        launcher = self._current()
        waiting = [(run_program, list(programs)) for run_program, programs in launches if programs]
        num_workers = 0

        def begin_next() -> None:
            nonlocal num_workers
            if not waiting:
                return
            run_program, programs = waiting.pop(0)
            todo = iter(enumerate(programs, start=1))  # all workers of the launch share it

            def work() -> None:
                for number, program in todo:
                    if number == len(programs):  # the last program, so the next launch begins
                        begin_next()
                    run_program(program)
                    self.step()

            for index in range(min(self.resident, len(programs))):
                num_workers += 1
                self._start(f"{launcher.name}, worker {index}", work, on_end=end_worker)

        def end_worker() -> None:
            nonlocal num_workers
            num_workers -= 1
            if num_workers == 0:
                self._runnable.append(launcher)

        self._raise_if_failed()
        if not waiting:
            return
        begin_next()
        self._runnable.remove(launcher)  # the last ``end_worker`` adds the launcher again
        self._switch_from(launcher)

    def step(self) -> None:
        """Switch to a thread that the seed picks, which may be the running one."""
        self._raise_if_failed()
        if self.num_switches >= self.max_switches:
            raise RuntimeError(
                f"no end after {self.num_switches} switches with seed {self.seed} and "
                f"{self.resident} resident programs: a wait or a loop never ends"
            )
        self._switch_from(self._current())

    def barrier(self) -> None:
        """Wait until every rank has called this; it is an error if a rank ends without a call."""
        self._raise_if_failed()
        task = self._current()
        if len(self._at_barrier) + 1 == self._num_ranks:
            self._runnable += self._at_barrier
            self._at_barrier.clear()
            self.step()
        else:
            self._runnable.remove(task)
            self._at_barrier.append(task)
            self._switch_from(task)

    def _reset(self, *, num_ranks: int) -> None:
        self.trace: list[int] = []
        self._random = Random(self.seed)
        self._num_ranks = num_ranks
        self._num_tasks = 0
        self._runnable: list[_Task] = []
        self._at_barrier: list[_Task] = []
        self._error: BaseException | None = None

    def _current(self) -> _Task:
        task = _TASK.get()
        assert task is not None, "called outside of run_ranks"
        return task

    def _start(
        self, name: str, body: Callable[[], None], *, on_end: Callable[[], None] | None = None
    ) -> threading.Thread:
        """Start and return a thread that sleeps until it is picked and then runs ``body``."""
        task = _Task(self, index=self._num_tasks, name=name)
        self._num_tasks += 1
        self._runnable.append(task)

        def run() -> None:
            _TASK.set(task)
            task.sleep()
            try:
                self._raise_if_failed()
                body()
            except _Stop:
                pass
            except BaseException as error:
                error.add_note(f"in {name}, with seed {self.seed}")
                self._fail(error)
            self._runnable.remove(task)
            if on_end:
                on_end()
            if self._runnable or self._at_barrier:
                self._next().wake()

        # Use daemon threads: after Ctrl-C nothing wakes them, and Python must still exit.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _fail(self, error: BaseException) -> None:
        """Keep the first error; make the ranks at the barrier runnable, so that they end too."""
        if self._error is None:
            self._error = error
        self._runnable += self._at_barrier
        self._at_barrier.clear()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise _Stop

    def _switch_from(self, task: _Task) -> None:
        """Let other threads run until the running thread, ``task``, is picked again."""
        following = self._next()
        if following is not task:
            following.wake()
            task.sleep()
        self._raise_if_failed()

    def _next(self) -> _Task:
        if not self._runnable:  # a deadlock: all live ranks are at the barrier
            names = ", ".join(task.name for task in self._at_barrier)
            self._fail(
                RuntimeError(f"{names} of {self._num_ranks} ranks wait at a barrier for the others")
            )
        return self._pick()

    def _pick(self) -> _Task:
        """Return a random runnable thread; with probability ``starve``, pause it and pick again."""
        while True:
            awake = self._runnable
            if self.starve:
                awake = [t for t in awake if t.starved_until <= self.num_switches] or awake
            task = self._random.choice(awake)
            if len(awake) == 1 or not self.starve or self._random.random() >= self.starve:
                self.trace.append(task.index)
                return task
            task.starved_until = self.num_switches + self._random.randrange(_MAX_STARVED_SWITCHES)
