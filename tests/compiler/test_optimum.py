"""The greedy against the best assignment there is, on random instances."""

import random
import statistics

import pytest

from halley.compiler.wgrad.movable_nodes import Unit, assign


NUM_INSTANCES = 200


def _instance(seed: int) -> tuple[list[Unit], list[float]]:
    """Return gradients, each free from its layer on, and the time of an all-to-all a layer."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 6)
    times_us = [draw.uniform(50.0, 200.0) for _ in range(num_layers)]
    units = [
        Unit(
            nodes=[],
            is_gemm=True,
            hides=(1 << num_layers) - (1 << layer),
            duration_us=draw.uniform(5.0, 120.0),
        )
        for layer in range(num_layers)
        for _ in range(draw.randint(1, 4))
    ]
    return units, times_us


def _hidden_us(units: list[Unit], times_us: list[float]) -> float:
    return sum(times_us) - sum(assign(units, times_us).left_us)


def _most_hidden_us(units: list[Unit], times_us: list[float]) -> float:
    """Return the most that any assignment hides: sum over all-to-alls of min(its time, its units').

    Source: Lancet (arXiv:2404.19429), section 4.2, as a mixed integer programme.
    """
    optimize = pytest.importorskip("scipy.optimize", reason="the optimum is scipy's: install scipy")
    import numpy as np

    num_units, num_windows = len(units), len(times_us)
    num_chosen = num_units * num_windows
    # Variables: unit i behind all-to-all j (0 or 1), then what is hidden of each all-to-all.
    gain = np.concatenate([np.zeros(num_chosen), -np.ones(num_windows)])
    once = np.zeros((num_units, num_chosen + num_windows))
    hidden = np.zeros((num_windows, num_chosen + num_windows))
    upper = np.zeros(num_chosen)
    for i, unit in enumerate(units):
        once[i, i * num_windows : (i + 1) * num_windows] = 1.0
        for j in range(num_windows):
            upper[i * num_windows + j] = unit.hides >> j & 1
            hidden[j, i * num_windows + j] = -unit.duration_us
    hidden[:, num_chosen:] = np.eye(num_windows)
    found = optimize.milp(
        gain,
        constraints=[
            optimize.LinearConstraint(once, ub=1.0),
            optimize.LinearConstraint(hidden, ub=0.0),
        ],
        bounds=optimize.Bounds(0.0, np.concatenate([upper, times_us])),
        integrality=np.concatenate([np.ones(num_chosen), np.zeros(num_windows)]),
        options={"mip_rel_gap": 1e-3, "time_limit": 5.0},
    )
    assert found.success, found.message
    return -found.fun


def _with_a_large_output(seed: int) -> tuple[list[Unit], list[float]]:
    """Return an instance with gradients that are free from the start: a long one, a short one.

    So are those of a language model's output embedding and of its last router.
    """
    units, times_us = _instance(seed)
    draw, hides = random.Random(seed), (1 << len(times_us)) - 1
    first = [
        Unit(nodes=[], is_gemm=True, hides=hides, duration_us=draw.uniform(*bounds))
        for bounds in ((150.0, 500.0), (1.0, 15.0))
    ]
    return first + units, times_us


@pytest.mark.parametrize("make", [_instance, _with_a_large_output])
def test_greedy_is_near_the_optimum(make) -> None:
    ratios = []
    for seed in range(NUM_INSTANCES):
        units, times_us = make(seed)
        best_us = _most_hidden_us(units, times_us)
        hidden_us = _hidden_us(units, times_us)
        assert hidden_us <= best_us * 1.002  # what the solver may be away from the optimum
        ratios.append(hidden_us / best_us)
    assert statistics.median(ratios) >= 0.99
    assert statistics.mean(ratios) >= 0.97
    assert min(ratios) >= 0.75


def test_greedy_reaches_the_optimum_where_it_is_obvious() -> None:
    units = [Unit(nodes=[], is_gemm=True, hides=0b11, duration_us=time) for time in (10.0, 20.0)]
    assert _hidden_us(units, [20.0, 10.0]) == 30.0
