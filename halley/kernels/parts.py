"""How the two parts of a fused kernel run: in one launch, one after the other, or side by side.

Side by side means two launches whose programs share multiprocessors: those that move rows take the
registers and the shared memory that those that multiply leave over, and work while the tensor cores
do. No program gives up a tile for a transfer.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.launch import LaunchOptions
from halley.kernels.side import beside, open_gate
from halley.kernels.switch import INTERPRETED


_REGISTERS = 65536  # of a multiprocessor, by the CUDA programming guide, compute capability 9.0
_LANES = 32


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How a part is launched.

    Attributes:
        num_programs: of the launch.
        num_leaving: of all launches of the kernel; the last of these leaves all as it was found.
        num_warps: of a program.
        num_stages: steps in flight in the loops.
        max_registers: of a thread; None is as many as the compiler likes.
        shares: whether programs of another launch run on the same multiprocessors.
    """

    num_programs: int
    num_leaving: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    shares: bool = False

    @property
    def options(self) -> LaunchOptions:
        """Options of ``Launcher``."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "max_registers": self.max_registers,
            "shares": self.shares,
        }


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
    move_registers: int,
    tickets: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Launch a kernel of which one part multiplies and the other moves rows.

    Args:
        launch: launches both or one.
        tile: of the part that multiplies.
        num_programs: multiprocessors.
        fused: False runs one part after the other.
        moves_first: whether what multiplies waits for what moves, or the other way round.
        move_registers: of a thread of the part that moves, beside the other.
        tickets: those of the plan, in which programs count themselves when they start.
        status: see ``kernels.status``.
    """
    num_multiplying = num_programs * tile.per_sm
    num_moving = num_programs * knobs.side_programs
    both = fused and not tile.beside
    num_leaving = num_multiplying + (0 if both else num_moving)
    side_registers = move_registers * knobs.side_warps * _LANES
    left = (_REGISTERS - side_registers) // (tile.per_sm * tile.num_warps * _LANES)
    multiplying = LaunchShape(
        num_programs=num_multiplying,
        num_leaving=num_leaving,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=left // 8 * 8 if tile.beside else None,
        shares=bool(tile.beside),
    )
    moving = LaunchShape(
        num_programs=num_moving,
        num_leaving=num_leaving,
        num_warps=knobs.side_warps,
        num_stages=1,
        max_registers=move_registers,
        shares=True,
    )
    if both:
        launch(multiplying, multiply=True, move=True)
        return
    in_turn = [(moving, False), (multiplying, True)]
    if not moves_first:
        in_turn.reverse()
    (first, first_multiplies), (second, second_multiplies) = in_turn
    if INTERPRETED or not fused:
        launch(first, multiply=first_multiplies, move=not first_multiplies)
        launch(second, multiply=second_multiplies, move=not second_multiplies)
        return
    # The second waits for words of the first. It must not take the room that the first needs, so it
    # begins when all of the first have; where launches only run one by one, no one waits in vain.
    with beside() as side:
        with torch.cuda.stream(side) if moves_first else nullcontext():
            launch(first, multiply=first_multiplies, move=not first_multiplies)
        with nullcontext() if moves_first else torch.cuda.stream(side):
            open_gate(tickets, first.num_programs, status)
            launch(second, multiply=second_multiplies, move=not second_multiplies)
