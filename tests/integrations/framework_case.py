"""Checks that the plug-ins of all training frameworks share."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


TOLERANCE = 1e-5  # of losses
Losses = tuple[list[float], list[float], dict[str, str]]


def train_both(
    rank: int, num_ranks: int, train: Callable[..., Any], own: Any, halley: Any, num_steps: int
) -> Losses:
    """Train a framework's own layers, then Halley's; return both losses and Halley's paths."""
    expected, ran = train(rank, num_ranks, own, num_steps)
    assert ran == {}
    return expected, *train(rank, num_ranks, halley, num_steps)


def check_losses(by_rank: list[Losses], modules: str, path: str, *, reason: str = "") -> None:
    """Check that losses are equal and fall, and that both layers report ``path``.

    ``modules`` is like "layers.{}.moe"; ``reason`` is why the framework's own expert code ran.
    """
    if reason:
        path += f", with the framework's own expert code: {reason}"
    for expected, losses, ran in by_rank:
        assert expected[-1] < expected[0]
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        assert ran == {modules.format(index): path for index in range(2)}


@contextmanager
def messages() -> Iterator[list[str]]:
    """Yield a list that gets the error, or the warnings about what "must be" different."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        except ValueError as error:
            found[:] = [str(error)]
            return
    found += [str(warning.message) for warning in caught if "must be" in str(warning.message)]
