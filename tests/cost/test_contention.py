"""Contention from work whose times are known: a collective that sleeps, products that wait."""

import threading
import time

import pytest
import torch

from halley.cost.contention import measure_contention


class _Sleep:
    """A collective that takes some time, on a thread of its own."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.Thread(target=time.sleep, args=(seconds,))
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


def test_factors_of_what_slows_down_are_found() -> None:
    beside = threading.Event()

    def product(sm_margin: int) -> None:  # twice as long while a collective runs
        time.sleep(0.004 if beside.is_set() else 0.002)

    def exchange() -> _Sleep:
        return _Sleep(0.03)

    found = measure_contention(product, exchange, device=torch.device("cpu"))
    assert found.compute == pytest.approx(1.0, abs=0.3)
    assert found.comm == pytest.approx(1.0, abs=0.3)


def test_ranks_meet_before_each_trial() -> None:
    polled: list[bool] = []  # of each collective: whether products ran beside it

    class Short(_Sleep):
        def __init__(self) -> None:
            super().__init__(0.002)
            self.number = len(polled)
            polled.append(False)

        def is_completed(self) -> bool:
            polled[self.number] = True
            return super().is_completed()

    measure_contention(lambda _: time.sleep(0.0005), Short, device=torch.device("cpu"))
    first = polled.index(True)
    assert polled[first - 1 :] == [False, True] * 5
    assert first - 1 == 20  # of the measure of a collective alone


def test_the_best_margin_is_taken() -> None:
    """Beside a collective products are slow without a margin, and slower with more than enough."""

    def product(sm_margin: int) -> None:
        time.sleep({0: 0.002, 4: 0.006, 8: 0.003, 16: 0.005}[sm_margin])

    device = torch.device("cpu")
    margins = (4, 8, 16)
    found = measure_contention(product, lambda: _Sleep(0.06), device=device, sm_margins=margins)
    assert found.sm_margin == 8
    assert found.compute == pytest.approx(1.5, abs=0.25)  # against products that leave nothing
