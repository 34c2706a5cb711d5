"""Which launches a fused kernel is made of, in which order, and which may begin before its turn."""

from dataclasses import replace

import pytest

from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.parts import LaunchShape, launch_parts


KNOBS = Knobs(movers_alone=3)
Launch = tuple[bool, bool, LaunchShape]  # whether it multiplies, whether it moves


def _launches(tile: GemmTile, *, fused: bool, moves_first: bool) -> list[Launch]:
    launches: list[Launch] = []

    def launch(shape: LaunchShape, *, multiply: bool, move: bool) -> None:
        launches.append((multiply, move, shape))

    launch_parts(
        launch, tile=tile, knobs=KNOBS, num_programs=10, fused=fused,
        moves_first=moves_first, movers=2, move_registers=80,
    )  # fmt: skip
    return launches


@pytest.mark.parametrize("moves_first", [False, True])
def test_whoever_waits_is_second_and_begins_beside_the_first(moves_first: bool) -> None:
    launches = _launches(GemmTile(), fused=True, moves_first=moves_first)
    parts = [(False, True), (True, False)]
    assert [found[:2] for found in launches] == (parts if moves_first else parts[::-1])
    assert [shape.options.get("overlaps") for *_, shape in launches] == [False, True]
    assert {shape.num_programs for *_, shape in launches} == {10, 20}
    assert {shape.num_leaving for *_, shape in launches} == {30}
    # 65536 registers, less two programs of 128 threads with 80 each, for 256 threads.
    limits = {multiply: shape.options.get("max_registers") for multiply, _, shape in launches}
    assert limits == {False: 80, True: 176}


@pytest.mark.parametrize("moves_first", [False, True])
def test_unfused_parts_wait_for_their_turn(moves_first: bool) -> None:
    launches = _launches(GemmTile(), fused=False, moves_first=moves_first)
    assert [move for _, move, _ in launches] == [moves_first, not moves_first]
    assert [shape.options.get("overlaps") for *_, shape in launches] == [False, False]
    assert {shape.num_programs for *_, shape in launches} == {10, 30}


@pytest.mark.parametrize("moves_first", [False, True])
def test_one_launch_waits_for_what_made_its_plan(moves_first: bool) -> None:
    tile = replace(GemmTile(), beside=0, per_sm=2)
    ((multiply, move, shape),) = _launches(tile, fused=True, moves_first=moves_first)
    assert (multiply, move) == (True, True)
    assert (shape.num_programs, shape.num_leaving) == (20, 20)
    assert not shape.options.get("overlaps")
    assert not shape.options.get("shares")
    assert shape.options.get("max_registers") is None
