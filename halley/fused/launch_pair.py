# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Launch a GEMM and a kernel that moves rows side by side, or one after the other.

Side by side, CTAs of both kernels share each SM. The kernel that moves rows uses the registers and
the shared memory that the GEMM leaves free, and works while the tensor cores multiply.

The kernel that waits for results of the other one is launched second, as a programmatic dependent
launch. It begins when all CTAs of the first kernel have begun, so it cannot occupy the SMs that
they need::

    stream: ---- first kernel (let_second_begin) -----------|
                  ---- second kernel (end_with_first) ------|---- next launch
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halley.interpreter.switch import INTERPRETED
from halley.ops.kernels.launch import LaunchOptions
from halley.ops.kernels.tiles import GemmTile


# The interpreter has no programmatic dependent launches; ``side_by_side`` takes their place.
_COMPILED = tl.constexpr(not INTERPRETED)
MOVE_WARPS = 4  # of a CTA that moves rows
_SM_REGISTERS = 65536  # CUDA programming guide, compute capability 9.0
_WARP_THREADS = 32
_UNFUSED_MOVE_CTAS = 2  # for each SM, at least, if the GEMM does not run at the same time


@triton.jit
def let_second_begin():
    """Let the next launch of the stream begin, if it is a programmatic dependent launch.

    It begins once all CTAs of this launch have called this function or have ended.
    """
    if _COMPILED:
        gdc_launch_dependents()


@triton.jit
def end_with_first():
    """Wait, at the end of a CTA of the second launch, until the first launch has ended.

    Otherwise the next launch could begin too early: it waits for the end of the second launch only.
    """
    if _COMPILED:
        gdc_wait()


@dataclass(frozen=True, kw_only=True)
class LaunchPair:
    """Sizes and options of the launches of a kernel that moves rows and of a GEMM.

    Attributes:
        num_move_ctas, num_gemm_ctas: CTAs of each launch.
        num_exits: CTAs of both launches. The last one that ends resets the plan's counters.
        move_options, gemm_options: see ``LaunchOptions``.
    """

    num_move_ctas: int
    num_gemm_ctas: int
    num_exits: int
    move_options: LaunchOptions
    gemm_options: LaunchOptions


def shape_launches(
    *,
    tile: GemmTile,
    num_sms: int,
    fused: bool,
    move_first: bool,
    move_registers: int,
    ctas_beside: int,
    ctas_after: int = 0,
) -> LaunchPair:
    """Compute the sizes and options of both launches.

    Args:
        tile: tile of the GEMM.
        num_sms: SMs to use.
        fused: False runs one kernel after the other.
        move_first: True if the GEMM waits for the kernel that moves rows, False if that kernel
            waits for the GEMM.
        move_registers: most registers of a thread that moves rows.
        ctas_beside: CTAs on each SM that move rows beside the GEMM's CTAs.
        ctas_after: further CTAs for each SM, which begin when CTAs of the GEMM have ended.
    """
    move_ctas = ctas_beside + ctas_after if fused else max(ctas_beside, _UNFUSED_MOVE_CTAS)
    num_move_ctas, num_gemm_ctas = num_sms * move_ctas, num_sms * tile.per_sm
    free_registers = _SM_REGISTERS - ctas_beside * move_registers * MOVE_WARPS * _WARP_THREADS
    gemm_registers = free_registers // (tile.per_sm * tile.num_warps * _WARP_THREADS)
    return LaunchPair(
        num_move_ctas=num_move_ctas,
        num_gemm_ctas=num_gemm_ctas,
        num_exits=num_move_ctas + num_gemm_ctas,
        move_options={
            "num_warps": MOVE_WARPS,
            "num_stages": 1,
            "max_registers": move_registers,
            "shares": True,
            "overlaps": fused and not move_first,
        },
        gemm_options={
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            # The compiler allocates registers in multiples of 8.
            "max_registers": gemm_registers // 8 * 8,
            "shares": True,
            "overlaps": fused and move_first,
        },
    )


def side_by_side(fused: bool) -> AbstractContextManager[None]:
    """Return a context whose two launches run side by side in the interpreter as well.

    Args:
        fused: False lets the second launch begin when the first has ended.
    """
    if not (fused and INTERPRETED):
        return nullcontext()
    # Imported here because compiled kernels do not need it.
    from halley.interpreter.coresident import together

    return together()
