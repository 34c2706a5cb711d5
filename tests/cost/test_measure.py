"""Measured times, curves by hand, and contention from work with known times."""

import math
import threading
import time

import pytest
import torch

from halley.cost.measure import Curve, measure_contention, measure_curve, measure_us


CPU = torch.device("cpu")


def test_curve_between_below_and_beyond_its_points() -> None:
    curve = Curve(((1000, 10.0), (4000, 20.0), (8000, 60.0)))
    assert curve.at(0) == curve.at(1000) == 10.0
    assert math.isclose(curve.at(2000), 10.0 * math.sqrt(2.0))  # half of the way from 1000 to 4000
    assert math.isclose(curve.at(4000), 20.0)
    assert math.isclose(curve.at(9000), 70.0)  # 40 us for 4000 bytes, and 1000 more
    assert math.isclose(Curve(((1000, 10.0),)).at(3000), 30.0)


def test_curve_that_falls_at_its_end_does_not_go_on_falling() -> None:
    assert Curve(((1000, 10.0), (2000, 8.0))).at(100_000) == 8.0


def test_slower_work_is_measured_slower() -> None:
    small, large = torch.ones(8, 8), torch.ones(512, 512)
    assert measure_us(lambda: small @ small, device=CPU) < measure_us(
        lambda: large @ large, device=CPU
    )
    curve = measure_curve(lambda size: torch.ones(size // 4).sum(), [4, 4_000_000], device=CPU)
    assert [size for size, _ in curve.points] == [4, 4_000_000]
    assert curve.points[0][1] < curve.points[1][1]


class _Sleep:
    """A collective that sleeps on its own thread."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.Thread(target=time.sleep, args=(seconds,))
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


def test_factors_are_one_without_contention() -> None:
    def gemm(reserved_sms: int) -> None:
        time.sleep(0.002)

    def exchange() -> _Sleep:
        return _Sleep(0.03)

    found = measure_contention(gemm, exchange, device=torch.device("cpu"))
    assert found.compute == pytest.approx(1.0, abs=0.3)
    assert found.comm == pytest.approx(1.0, abs=0.3)


def test_ranks_synchronise_before_each_trial() -> None:
    polled: list[bool] = []  # for each collective, whether GEMMs overlapped it

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
    assert first - 1 == 20  # runs that measure the collective alone


def test_the_best_number_of_reserved_sms_is_chosen() -> None:
    """GEMMs under a collective are slow with 4 reserved SMs, fastest with 8, and slow with 16."""

    def gemm(reserved_sms: int) -> None:
        time.sleep({0: 0.002, 4: 0.006, 8: 0.003, 16: 0.005}[reserved_sms])

    device = torch.device("cpu")
    margins = (4, 8, 16)
    found = measure_contention(gemm, lambda: _Sleep(0.06), device=device, reserved_sms=margins)
    assert found.sm_margin == 8
    assert found.compute == pytest.approx(1.5, abs=0.25)  # 0.003 s over 0.002 s
