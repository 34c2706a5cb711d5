"""The co-resident scheduler: ranks and programs are threads, and a seed picks the one that runs.

Exactly one thread runs at any time, the one that holds the baton. It hands the baton on at a switch
point: after an atomic operation or a volatile load, and between two programs. So every order in
which programs may see each other's flags can come up, each seed gives one of them, and the same
seed gives the same one again.

Memory is sequentially consistent: a missing fence, or a release that is not one, does not show.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from random import Random
from typing import Any, TypeVar, final


T = TypeVar("T")

# How long a starved thread stays unscheduled at most. Launches of tests have some hundred switches.
_MAX_STARVED_SWITCHES = 500


class _Stop(BaseException):
    """Ends a thread because another one failed; not an Exception, so that no test swallows it."""


@final
class _Task:
    """A thread that runs only while it holds the baton."""

    def __init__(self, scheduler: "Scheduler", *, index: int, name: str) -> None:
        self.scheduler = scheduler
        self.index = index
        self.name = name
        self.starved_until = 0
        self._baton = threading.Lock()
        self._baton.acquire()

    def wake(self) -> None:
        """Give the baton to this thread; the caller must run no more."""
        self._baton.release()

    def sleep(self) -> None:
        """Wait for the baton; called by the thread itself."""
        self._baton.acquire()


_TASK: ContextVar[_Task | None] = ContextVar("task", default=None)


def switch_point() -> None:
    """Let another thread run; without a scheduler, another process."""
    task = _TASK.get()
    if task is None:
        os.sched_yield()  # time.sleep(0) takes 50 us, as long as all the rest of a poll
    else:
        task.scheduler.step()


def current_scheduler() -> "Scheduler | None":
    """Return the scheduler that runs this thread, or None outside of ``run_ranks``."""
    task = _TASK.get()
    return task.scheduler if task else None


@final
class HostBarrier:
    """A barrier of all ranks of a scheduler, on the host; a waiting rank hands the baton on."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler

    def wait(self) -> None:
        """Return once every rank has come here.

        Raises:
            RuntimeError: the other ranks are done, or wait for something else for ever.
        """
        self._scheduler._meet()


@final
class Scheduler:
    """Runs ranks, and the programs of what they launch, one at a time in an order from a seed.

    Args:
        seed: picks the order.
        resident: programs of one launch that are under way at once, as many as a GPU would hold.
            They take program ids in order. A program that waits for one of a higher id needs both
            resident; if they are not, the run ends after ``max_switches``.
        starve: probability with which a thread that is picked stays unscheduled for a long stretch
            instead, as if it were delayed.
        max_switches: picks in one ``run_ranks`` after which it counts as endless.

    Attributes:
        trace: threads picked in the last ``run_ranks``, by number in the order of their creation.

    Raises:
        ValueError: an argument is out of range.
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
        self._barrier = HostBarrier(self)
        self._reset(num_ranks=0)

    @property
    def num_switches(self) -> int:
        """Return how often the last ``run_ranks`` picked a thread."""
        return len(self.trace)

    def barrier(self) -> HostBarrier:
        """Return the barrier of all ranks, the same at every call."""
        return self._barrier

    def run_ranks(self, num_ranks: int, fn: Callable[[int], T]) -> list[T]:
        """Call ``fn(rank)`` in one thread a rank and return the results by rank.

        Raises:
            BaseException: what the first rank to fail raised, with a note that tells rank and seed.
                All other ranks have ended then.
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

    def run_programs(self, run_program: Callable[[T], None], programs: Sequence[T]) -> None:
        """Call ``run_program`` for each of the programs, ``resident`` at once; called by a launch.

        Returns when all of them are done: on one rank, launches follow each other.
        """
        self.run_launches([(run_program, programs)])

    def run_launches(self, launches: Sequence[tuple[Callable[[Any], None], Sequence[Any]]]) -> None:
        """Run the programs of launches of which each begins when the one before has begun.

        That is when all programs of the one before are under way or done. There are ``resident``
        programs of each at once. Returns when all are done.
        """
        launcher = self._current()
        waiting = [(run_program, list(programs)) for run_program, programs in launches if programs]
        num_workers = 0

        def begin_next() -> None:
            nonlocal num_workers
            if not waiting:
                return
            run_program, programs = waiting.pop(0)
            todo = iter(enumerate(programs, start=1))

            def work() -> None:
                for number, program in todo:
                    if number == len(programs):
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
        self._runnable.remove(launcher)
        self._hand_on(launcher)

    def step(self) -> None:
        """Hand the baton to a thread that the seed picks, which may be the running one.

        Raises:
            RuntimeError: ``max_switches`` have been made.
        """
        self._raise_if_failed()
        if self.num_switches >= self.max_switches:
            raise RuntimeError(
                f"no end after {self.num_switches} switches with seed {self.seed} and "
                f"{self.resident} resident programs: what runs waits for what does not"
            )
        self._hand_on(self._current())

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
        """Make a thread that waits to be picked; it starts with the baton and ends without."""
        task = _Task(self, index=self._num_tasks, name=name)
        self._num_tasks += 1
        self._runnable.append(task)
        # Daemon: after Ctrl-C nobody hands these the baton any more.
        thread = threading.Thread(target=self._run, args=(task, body, on_end), daemon=True)
        thread.start()
        return thread

    def _run(
        self, task: _Task, body: Callable[[], None], on_end: Callable[[], None] | None
    ) -> None:
        _TASK.set(task)
        task.sleep()
        try:
            self._raise_if_failed()
            body()
        except _Stop:
            pass
        except BaseException as error:
            error.add_note(f"in {task.name}, with seed {self.seed}")
            self._fail(error)
        self._runnable.remove(task)
        if on_end:
            on_end()
        if self._runnable or self._at_barrier:
            self._next().wake()

    def _fail(self, error: BaseException) -> None:
        """Note the first error and let those at the barrier run, so that they end too."""
        if self._error is None:
            self._error = error
        self._runnable += self._at_barrier
        self._at_barrier.clear()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise _Stop

    def _meet(self) -> None:
        self._raise_if_failed()
        task = self._current()
        if len(self._at_barrier) + 1 == self._num_ranks:
            self._runnable += self._at_barrier
            self._at_barrier.clear()
            self.step()
        else:
            self._runnable.remove(task)
            self._at_barrier.append(task)
            self._hand_on(task)

    def _hand_on(self, task: _Task) -> None:
        """Let the next thread run until this one, which is ``task``, is picked again."""
        following = self._next()
        if following is not task:
            following.wake()
            task.sleep()
        self._raise_if_failed()

    def _next(self) -> _Task:
        if not self._runnable:
            names = ", ".join(task.name for task in self._at_barrier)
            self._fail(
                RuntimeError(f"{names} of {self._num_ranks} ranks wait at a barrier for the others")
            )
        return self._pick()

    def _pick(self) -> _Task:
        while True:
            awake = self._runnable
            if self.starve:
                awake = [t for t in awake if t.starved_until <= self.num_switches] or awake
            task = self._random.choice(awake)
            if len(awake) == 1 or not self.starve or self._random.random() >= self.starve:
                self.trace.append(task.index)
                return task
            task.starved_until = self.num_switches + self._random.randrange(_MAX_STARVED_SWITCHES)
