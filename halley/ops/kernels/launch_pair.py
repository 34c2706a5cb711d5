# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Launch two kernels of a fused layer side by side, or one after the other.

One kernel moves rows between ranks, the other multiplies. Side by side their programs share
multiprocessors: the kernel that moves rows takes the registers and the shared memory that the GEMM
leaves over, and works while the tensor cores do.

The kernel that waits for the other is launched second, as a programmatic dependent launch: it
begins when all programs of the first have begun, and so cannot take the room that they need.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halley.interpreter.switch import INTERPRETED
from halley.ops.kernels.gemm_config import GemmTile, Knobs
from halley.ops.kernels.launch import LaunchOptions


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
    """How one of the two kernels is launched.

    Attributes:
        num_programs: of the launch.
        num_leaving: programs of both launches; the last one to end resets the plan's counters.
        num_warps: of a program.
        options: how it is compiled and launched.
    """

    num_programs: int
    num_leaving: int
    num_warps: int
    options: LaunchOptions


@dataclass(frozen=True, kw_only=True)
class LaunchPair:
    """How the two kernels are launched.

    Attributes:
        move: of the kernel that moves rows.
        multiply: of the GEMM.
    """

    move: LaunchShape
    multiply: LaunchShape


def shape_launches(
    *,
    tile: GemmTile,
    knobs: Knobs,
    num_programs: int,
    fused: bool,
    moves_first: bool,
    movers: int,
    movers_after: int = 0,
    move_registers: int,
) -> LaunchPair:
    """Return how the kernel that moves rows and the GEMM are launched.

    Args:
        tile: of the GEMM.
        num_programs: multiprocessors.
        fused: False runs one kernel after the other.
        moves_first: whether the GEMM waits for the kernel that moves rows, or the other way round.
        movers: programs that move rows on each multiprocessor, beside those of the GEMM.
        movers_after: more of them, which find room when programs of the GEMM have ended.
        move_registers: the most registers of a thread that moves rows.
    """
    num_multiplying = num_programs * tile.per_sm
    num_moving = num_programs * (
        movers + movers_after if fused else max(movers, knobs.movers_alone)
    )
    left = _REGISTERS - movers * move_registers * knobs.mover_warps * _LANES
    left //= tile.per_sm * tile.num_warps * _LANES

    def shape(*, moves: bool) -> LaunchShape:
        num_warps = knobs.mover_warps if moves else tile.num_warps
        options: LaunchOptions = {
            "num_warps": num_warps,
            "num_stages": 1 if moves else tile.num_stages,
            "max_registers": move_registers if moves else left // 8 * 8,
            "shares": True,
            "overlaps": fused and moves != moves_first,
        }
        return LaunchShape(
            num_programs=num_moving if moves else num_multiplying,
            num_leaving=num_multiplying + num_moving,
            num_warps=num_warps,
            options=options,
        )

    return LaunchPair(move=shape(moves=True), multiply=shape(moves=False))


def side_by_side(fused: bool) -> AbstractContextManager[None]:
    """Start the second of two launches in the block while the first runs, in the interpreter too.

    Args:
        fused: False lets it begin when the first has ended.
    """
    if not (fused and INTERPRETED):
        return nullcontext()
    from halley.interpreter.coresident import together

    return together()
