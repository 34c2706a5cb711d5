# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""How the two parts of a fused kernel run: in one launch, one after the other, or side by side.

Side by side means two launches whose programs share multiprocessors: those that move rows take the
registers and the shared memory that those that multiply leave over, and work while the tensor cores
do. No program gives up a tile for a transfer.

Which of the two waits for the other is launched second, as a programmatic dependent launch: it
begins when all programs of the first have, and so cannot take the room that they need. Where
launches only run one by one, no one waits in vain.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.launch import LaunchOptions
from halley.kernels.switch import INTERPRETED


_COMPILED = tl.constexpr(not INTERPRETED)
_REGISTERS = 65536  # of a multiprocessor, by the CUDA programming guide, compute capability 9.0
_LANES = 32


@triton.jit
def let_second_begin():
    """Say that this program has begun, so that a launch behind this one may, if it overlaps."""
    if _COMPILED:
        gdc_launch_dependents()


@triton.jit
def end_with_first():
    """Wait, at the end of a program of the second launch, until the first has ended.

    Whatever comes next in the stream waits for the second alone.
    """
    if _COMPILED:
        gdc_wait()


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How a part is launched.

    Attributes:
        num_programs: of the launch.
        num_leaving: of all launches of the kernel; the last of these leaves all as it was found.
        num_warps: of a program.
        options: how it is compiled and launched.
    """

    num_programs: int
    num_leaving: int
    num_warps: int
    options: LaunchOptions


class LaunchPart(Protocol):
    """Launches a kernel, or one of its two parts."""

    def __call__(self, shape: LaunchShape, *, multiply: bool, move: bool) -> None: ...


def launch_parts(
    launch: LaunchPart,
    *,
    tile: GemmTile,
    knobs: Knobs,
    num_programs: int,
    fused: bool,
    moves_first: bool,
    movers: int,
    movers_after: int = 0,
    move_registers: int,
) -> None:
    """Launch a kernel of which one part multiplies and the other moves rows.

    Args:
        launch: launches both or one.
        tile: of the part that multiplies.
        num_programs: multiprocessors.
        fused: False runs one part after the other.
        moves_first: whether what multiplies waits for what moves, or the other way round.
        movers: programs of the part that moves on each multiprocessor, beside tiles.
        movers_after: more of them, which find room when those that multiply have ended.
        move_registers: the most registers of a thread of that part.
    """
    num_multiplying = num_programs * tile.per_sm
    num_moving = num_programs * (
        movers + movers_after if fused else max(movers, knobs.movers_alone)
    )
    both = fused and not tile.beside
    num_leaving = num_multiplying + (0 if both else num_moving)
    left = _REGISTERS - movers * move_registers * knobs.mover_warps * _LANES
    left //= tile.per_sm * tile.num_warps * _LANES

    def shape(*, moves: bool) -> LaunchShape:
        num_warps = knobs.mover_warps if moves else tile.num_warps
        options: LaunchOptions = {
            "num_warps": num_warps,
            "num_stages": 1 if moves else tile.num_stages,
            "max_registers": move_registers if moves else left // 8 * 8 if tile.beside else None,
            "shares": not both,
            "overlaps": fused and not both and moves != moves_first,
        }
        return LaunchShape(
            num_programs=num_moving if moves else num_multiplying,
            num_leaving=num_leaving,
            num_warps=num_warps,
            options=options,
        )

    if both:
        launch(shape(moves=False), multiply=True, move=True)
        return
    with _side_by_side() if fused else nullcontext():
        for moves in (moves_first, not moves_first):
            launch(shape(moves=moves), multiply=not moves, move=moves)


def _side_by_side() -> AbstractContextManager[None]:
    """Let the second of two launches begin as on a GPU, which needs no help with that."""
    if not INTERPRETED:
        return nullcontext()
    from halley.kernels.interpreter.launch import together

    return together()
