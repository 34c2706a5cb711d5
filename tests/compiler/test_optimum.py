"""The greedy assignment of units against the optimum, on random instances."""

import random
import statistics

import pytest

from halley.compiler.wgrad.movable_nodes import Unit, assign


NUM_INSTANCES = 50


def _gemm(duration_us: float, windows: range) -> Unit:
    return Unit(nodes=[], is_gemm=True, windows=frozenset(windows), duration_us=duration_us)


def _instance(seed: int, *, has_large_output: bool) -> tuple[list[Unit], list[float]]:
    """Return GEMMs, each ready from its layer on, and the time of one all-to-all for each layer.

    With a large output, two more GEMMs are ready from the start, a long and a short one, like those
    of the output embedding and of the last router of a language model.
    """
    draw = random.Random(seed)
    num_layers = draw.randint(2, 6)
    times_us = [draw.uniform(50.0, 200.0) for _ in range(num_layers)]
    units = [
        _gemm(draw.uniform(5.0, 120.0), range(layer, num_layers))
        for layer in range(num_layers)
        for _ in range(draw.randint(1, 4))
    ]
    if has_large_output:
        bounds = ((150.0, 500.0), (1.0, 15.0))
        units = [*(_gemm(draw.uniform(*each), range(num_layers)) for each in bounds), *units]
    return units, times_us


def _hidden_us(units: list[Unit], times_us: list[float]) -> float:
    _, left_us = assign(units, times_us)
    return sum(times_us) - sum(left_us)


def _most_hidden_us(units: list[Unit], times_us: list[float]) -> float:
    """Return the most that an assignment hides: sum of min(time of a window, time of its units).

    Source: Lancet (arXiv:2404.19429), section 4.2, as a mixed integer programme.
    """
    optimize = pytest.importorskip(
        "scipy.optimize", reason="scipy finds the optimum: install scipy"
    )
    import numpy as np

    # Variables: 1 if unit i is in window j, then the hidden time of each window.
    num_units, num_windows = len(units), len(times_us)
    gain = np.repeat([0.0, -1.0], [num_units * num_windows, num_windows])
    durations_us = np.array([[unit.duration_us for unit in units]])
    allowed = [window in unit.windows for unit in units for window in range(num_windows)]
    once = np.kron(np.eye(num_units), np.ones(num_windows))
    once = np.hstack([once, np.zeros((num_units, num_windows))])
    hidden = np.hstack([np.kron(-durations_us, np.eye(num_windows)), np.eye(num_windows)])
    found = optimize.milp(
        gain,
        constraints=[
            optimize.LinearConstraint(once, ub=1.0),
            optimize.LinearConstraint(hidden, ub=0.0),
        ],
        bounds=optimize.Bounds(0.0, np.concatenate([allowed, times_us])),
        integrality=gain == 0.0,
        options={"mip_rel_gap": 1e-3, "time_limit": 5.0},
    )
    assert found.success, found.message
    return -found.fun


@pytest.mark.parametrize("has_large_output", [False, True])
def test_greedy_is_near_the_optimum(has_large_output: bool) -> None:
    ratios = []
    for seed in range(NUM_INSTANCES):
        units, times_us = _instance(seed, has_large_output=has_large_output)
        best_us = _most_hidden_us(units, times_us)
        hidden_us = _hidden_us(units, times_us)
        assert hidden_us <= best_us * 1.002  # the solver stops within 0.1 % of the optimum
        ratios.append(hidden_us / best_us)
    assert statistics.median(ratios) >= 0.99
    assert statistics.mean(ratios) >= 0.97
    assert min(ratios) >= 0.8
