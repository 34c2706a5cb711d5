"""The scheduler gives the same order for the same seed, and leaves no thread behind."""

import threading
import time
from collections.abc import Iterator

import pytest

from halley.interpreter.scheduler import Scheduler, current_scheduler, switch_point


def _interleave(scheduler: Scheduler, num_steps: int = 20) -> list[int]:
    """Return the ranks in the order of their steps."""
    order: list[int] = []

    def run(rank: int) -> None:
        for _ in range(num_steps):
            order.append(rank)
            switch_point()

    scheduler.run_ranks(3, run)
    return order


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """Check that all threads of the test have ended."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not set(threading.enumerate()) - before


def test_results_are_in_the_order_of_ranks() -> None:
    scheduler = Scheduler(0, resident=1)
    assert scheduler.run_ranks(4, lambda rank: rank * rank) == [0, 1, 4, 9]
    assert scheduler.run_ranks(0, lambda rank: rank) == []


def test_same_seed_gives_the_same_order() -> None:
    scheduler = Scheduler(5, resident=1)
    first, trace = _interleave(scheduler), scheduler.trace
    assert _interleave(scheduler) == first
    assert scheduler.trace == trace
    assert scheduler.num_switches == len(trace) == 1 + 3 * 20 + 2
    again = Scheduler(5, resident=1)
    assert _interleave(again) == first
    assert again.trace == trace


def test_other_seeds_give_other_orders() -> None:
    orders = {tuple(_interleave(Scheduler(seed, resident=1), 2)) for seed in range(40)}
    assert len(orders) > 25  # 6! / 2!**3 = 90 orders are possible
    assert {order[0] for order in orders} == {0, 1, 2}


@pytest.mark.parametrize(("seed", "resident"), [(0, 1), (1, 3), (2, 8)])
def test_programs_start_in_the_order_of_their_ids(seed: int, resident: int) -> None:
    scheduler = Scheduler(seed, resident=resident)
    started: list[int] = []
    running: list[int] = []

    def run_program(program: int) -> None:
        started.append(program)
        running.append(program)
        assert len(running) <= resident
        switch_point()
        running.remove(program)

    def run(rank: int) -> None:
        assert current_scheduler() is scheduler
        scheduler.run_launches([(run_program, range(5))])
        assert not running
        scheduler.run_launches([(run_program, [])])

    scheduler.run_ranks(1, run)
    assert started == list(range(5))
    assert current_scheduler() is None


@pytest.mark.parametrize(("seed", "resident"), [(0, 1), (1, 2), (2, 8)])
def test_a_launch_begins_when_all_programs_of_the_previous_one_have_begun(
    resident: int, seed: int
) -> None:
    scheduler = Scheduler(seed, resident=resident)
    begun: list[int] = []
    ended: list[int] = []
    both: list[bool] = []

    def first(program: int) -> None:
        begun.append(program)
        for _ in range(20):
            switch_point()
        ended.append(program)

    def second(program: int) -> None:
        assert begun == list(range(3))
        both.append(len(ended) < 3)
        while len(ended) < 3:  # ends only if programs of the first launch run meanwhile
            switch_point()

    scheduler.run_ranks(
        1, lambda _: scheduler.run_launches([(first, range(3)), (second, range(4)), (first, [])])
    )
    assert len(both) == 4
    assert any(both)


@pytest.mark.parametrize("seed", range(5))
def test_barrier_waits_for_all(seed: int) -> None:
    scheduler = Scheduler(seed, resident=1)
    arrived = [0, 0, 0]

    def run(rank: int) -> None:
        for step in range(1, 4):
            for _ in range(rank):
                switch_point()
            arrived[rank] = step
            scheduler.barrier()
            assert min(arrived) == step
            scheduler.barrier()

    scheduler.run_ranks(3, run)


@pytest.mark.usefixtures("no_threads_left")
def test_barrier_that_others_never_reach_is_an_error() -> None:
    scheduler = Scheduler(0, resident=1)
    with pytest.raises(RuntimeError, match=r"rank [02], rank [02] of 3 ranks wait at a barrier"):
        scheduler.run_ranks(3, lambda rank: None if rank == 1 else scheduler.barrier())


@pytest.mark.usefixtures("no_threads_left")
def test_endless_run_is_an_error_that_names_the_seed() -> None:
    def run(rank: int) -> None:
        while rank == 1:
            switch_point()

    scheduler = Scheduler(11, resident=1, max_switches=500)
    with pytest.raises(RuntimeError, match="no end after 500 switches with seed 11"):
        scheduler.run_ranks(2, run)
    assert scheduler.run_ranks(2, lambda rank: rank) == [0, 1]


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize("seed", range(2))
def test_error_of_one_rank_ends_all_others(seed: int) -> None:
    """Rank 0 fails; others poll forever, wait at a barrier, and wait for a launch that polls."""
    scheduler = Scheduler(seed, resident=2)
    done: list[str] = []

    def spin(_: int) -> None:
        while True:
            switch_point()

    def run(rank: int) -> None:
        switch_point()
        if rank == 0:
            switch_point()
            raise KeyError("mine")
        elif rank == 1:
            spin(0)
        elif rank == 2:
            scheduler.barrier()
        else:
            scheduler.run_launches([(spin, range(3))])
        done.append("passed the wait")

    with pytest.raises(KeyError, match="mine") as error:
        scheduler.run_ranks(4, run)
    assert error.value.__notes__ == [f"in rank 0, with seed {seed}"]
    assert not done


def test_error_of_a_program_is_raised_and_first_wins() -> None:
    scheduler = Scheduler(0, resident=4)

    def run_program(program: int) -> None:
        switch_point()
        raise ValueError(program)

    def run(rank: int) -> None:
        try:
            scheduler.run_launches([(run_program, range(4))])
        except Exception:  # _Stop must not be an Exception
            pytest.fail("a launch that was stopped raised an Exception")

    with pytest.raises(ValueError, match=r"^[0-3]\nin rank [01], worker") as error:
        scheduler.run_ranks(2, run)
    assert len(error.value.__notes__) == 1


def _longest_absence(trace: list[int], num_tasks: int) -> int:
    """Return the most consecutive picks in which some thread was not picked."""
    longest, last = 0, dict.fromkeys(range(num_tasks), 0)
    for pick, task in enumerate(trace):
        longest = max(longest, pick - last[task])
        last[task] = pick
    return longest


def test_starved_threads_pause_for_long() -> None:
    even, starved = Scheduler(0, resident=1), Scheduler(0, resident=1, starve=0.01)
    _interleave(even, 1000)
    order = _interleave(starved, 1000)
    assert sorted(order) == [0] * 1000 + [1] * 1000 + [2] * 1000
    assert _longest_absence(even.trace, 3) < 50
    assert _longest_absence(starved.trace, 3) > 200
    assert _interleave(Scheduler(0, resident=1, starve=0.01), 1000) == order


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"resident": 0}, r"resident \(0\) must be at least 1"),
        ({"resident": 1, "starve": 1.0}, r"starve \(1.0\) must be at least 0 and below 1"),
    ],
)
def test_argument_out_of_range_is_an_error(kwargs: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Scheduler(0, **kwargs)
