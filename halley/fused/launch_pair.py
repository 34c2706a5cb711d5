# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Launch a GEMM and a kernel that moves rows side by side, or one after the other.

Side by side, CTAs of both kernels share the SMs. The kernel that moves rows uses the registers and
the shared memory that the GEMM leaves free, and works while the tensor cores multiply.

The kernel that waits for the other one is launched second, as a programmatic dependent launch: it
begins when all CTAs of the first kernel have begun, so it cannot occupy the SMs that they need.

    stream: ---- first (lets the second begin) ------------|
                  ---- second (waits for the first) -------|---- next launch
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halley.interpreter.switch import INTERPRETED
from halley.ops.kernels.launch import LaunchOptions
from halley.ops.kernels.tiles import GemmTile


_COMPILED = tl.constexpr(not INTERPRETED)
_REGISTERS = 65536  # of an SM, by the CUDA programming guide, compute capability 9.0
_WARP_THREADS = 32
_MOVE_WARPS = 4  # of a CTA that moves rows
_UNFUSED_MOVE_CTAS = 2  # on each SM, at least, if the GEMM does not run at the same time


@triton.jit
def let_second_begin():
    """Allow a programmatic dependent launch behind this one, now that this CTA has begun."""
    if _COMPILED:
        gdc_launch_dependents()


@triton.jit
def end_with_first():
    """Wait, at the end of a CTA of the second launch, until the first launch has ended.

    The next launch in the stream waits for the second launch only.
    """
    if _COMPILED:
        gdc_wait()


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """Size and options of the launch of one kernel.

    Attributes:
        num_programs: CTAs of the launch.
        num_leaving: CTAs of both launches; the last of them to end resets the plan's counters.
        num_warps: warps of a CTA.
        options: see ``LaunchOptions``.
    """

    num_programs: int
    num_leaving: int
    num_warps: int
    options: LaunchOptions


@dataclass(frozen=True, kw_only=True)
class LaunchPair:
    """Launches of the kernel that moves rows, and of the GEMM."""

    move: LaunchShape
    multiply: LaunchShape


def shape_launches(
    *,
    tile: GemmTile,
    num_programs: int,
    fused: bool,
    moves_first: bool,
    movers: int,
    movers_after: int = 0,
    move_registers: int,
) -> LaunchPair:
    """Return how the kernel that moves rows and the GEMM are launched.

    Args:
        tile: tile of the GEMM.
        num_programs: SMs to use.
        fused: False runs one kernel after the other.
        moves_first: True if the GEMM waits for the kernel that moves rows, False if that kernel
            waits for the GEMM.
        movers: CTAs on each SM that move rows next to the GEMM's CTAs.
        movers_after: more of them, which start when CTAs of the GEMM have ended.
        move_registers: most registers of a thread that moves rows.
    """
    num_multiplying = num_programs * tile.per_sm
    num_moving = num_programs * (
        movers + movers_after if fused else max(movers, _UNFUSED_MOVE_CTAS)
    )
    left = _REGISTERS - movers * move_registers * _MOVE_WARPS * _WARP_THREADS
    left //= tile.per_sm * tile.num_warps * _WARP_THREADS

    def shape(*, moves: bool) -> LaunchShape:
        num_warps = _MOVE_WARPS if moves else tile.num_warps
        options: LaunchOptions = {
            "num_warps": num_warps,
            "num_stages": 1 if moves else tile.num_stages,
            # The compiler allocates registers in multiples of 8.
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
    """Return a context whose two launches run side by side in the interpreter as well.

    Args:
        fused: False lets the second launch begin when the first has ended.
    """
    if not (fused and INTERPRETED):
        return nullcontext()
    # Optional: of use for interpreted kernels only.
    from halley.interpreter.coresident import together

    return together()
