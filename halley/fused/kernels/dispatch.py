# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Dispatch with the first GEMM: multiply tiles whose rows have arrived while others are fetched.

In forward, the rows are tokens, and the epilogue of a tile is the activation. In backward, the rows
are gradients of the output, and the epilogue is the gradient of the activation. Both run the same
two kernels side by side (``launch_pair.py``): ``fetch_kernel`` and ``arrived_gemm_kernel``.

Source: COMET (arXiv:2502.19811), sections 3.1 and 3.2, with readiness by tile instead of by rank.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused.config import KernelConfig
from halley.fused.kernels.dispatch_plan import usable_here
from halley.fused.kernels.fetch import (
    FROM_PEERS,
    FROM_PEERS_AND_SAVE,
    FROM_SAVED,
    end_dispatch,
    fetch_kernel,
    num_zero_rows,
)
from halley.fused.kernels.layout import (
    ANY_COPIES,
    FIRST_GEMM_TICKET,
    NUM_TILES,
    KernelContext,
    Layout,
)
from halley.fused.kernels.peer import DISPATCH, failure_code, fence_async, wait
from halley.fused.launch_pair import MOVE_WARPS, end_with_first, shape_launches, side_by_side
from halley.ops.kernels.launch import Launcher
from halley.ops.kernels.tiles import (
    GemmTile,
    describe,
    describe_rows,
    describe_weights,
    multiply_step,
    multiply_tile,
    prefetch_pre,
    store_activated,
    store_gradient,
    tile_of,
)


_FETCH_REGISTERS = 72  # per thread; the GEMM of backward leaves no more free


@dataclass(frozen=True, kw_only=True)
class DispatchMode:
    """Variant of the two kernels, passed to them as one constexpr.

    Attributes:
        gated: whether the activation has two projections, gate and up (SwiGLU).
        backward: whether the rows are gradients of the output instead of tokens.
        save_pre: whether forward stores the inputs of the activation for backward.
        row_source: one of the constants ``FROM_...`` of ``fetch.py``.
        zero_multiple: zero rows follow the rows of each expert up to this multiple; 0 for none.
    """

    gated: bool
    backward: bool = False
    save_pre: bool = False
    row_source: int = FROM_PEERS.value
    zero_multiple: int = 0

    @property
    def num_projections(self) -> int:
        """Projections that the activation consumes."""
        return 2 if self.gated else 1

    def tile_columns(self, tile: GemmTile) -> int:
        """Return how many columns of the activation a tile computes."""
        return tile.block_n if self.backward else tile.block_n // self.num_projections


@triton.jit
def _store_tile(
    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RJ, MODE: tl.constexpr,
    SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if MODE.backward:
        store_gradient(
            acc, num_rows, h, pre, dpre, weight_R, dweight_RJ, row, column, index,
            MODE.gated, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        store_activated(acc, h, pre, row, column, MODE.gated, MODE.save_pre, BLOCK_M, BLOCK_N)


@triton.jit
def _first_gemm_run(
    row, expert, first, columns, num_rows, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
    MODE: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Compute ``columns`` neighbouring tiles of one row tile, from column tile ``first`` on.

    One loop runs over the steps of all these tiles, so that the loads of the next tile start during
    the last steps of the previous one.
    """
    TRANSPOSED: tl.constexpr = MODE.backward
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    NUM_COLUMNS: tl.constexpr = (SIZE + BLOCK_F - 1) // BLOCK_F
    if RUN == 1:
        column = first * BLOCK_F
        if MODE.backward:
            # The epilogue needs these values; they are loaded into the cache during the main loop.
            prefetch_pre(pre, row, column, MODE.gated, SIZE, BLOCK_M, BLOCK_N)
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _store_tile(
            acc, row, column, first, num_rows, h, pre, dpre, weight_R, dweight_RJ,
            MODE, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            index = first + step // STEPS
            column = index * BLOCK_F
            k = (step % STEPS) * BLOCK_K
            if MODE.backward:
                if k == 0:
                    prefetch_pre(pre, row, column, MODE.gated, SIZE, BLOCK_M, BLOCK_N)
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TRANSPOSED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                _store_tile(
                    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RJ,
                    MODE, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit(do_not_specialize=["capacity", "copy_capacity", "num_exits", "timeout_ns"])
def arrived_gemm_kernel(
    plan, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
    capacity, copy_capacity, num_exits, status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, MODE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply the tiles of the plan, each once all its rows have arrived.

    CTAs take tiles by tickets of one counter. A CTA waits for ``tile_arrived`` of its tile::

        fetch_kernel: store rows, tile_arrived[t] += n (release)
                                  |
        arrived_gemm_kernel: wait for tile_arrived[t] >= rows of tile t (acquire), load, multiply

    There is no deadlock. The fetch kernel waits for nothing and is launched first. This kernel
    begins only when all CTAs of the fetch kernel run, so it cannot occupy the SMs that they need.

    ``h``, ``pre`` and ``dpre`` are tensor descriptors in forward and pointers in backward. Backward
    stores four parts of a tile to three tensors each. With TMA it would wait for each store.

    Example: 300 rows of one expert are tiles 0, 1 and 2 with 128, 128 and 44 rows. With 2 column
    tiles and ``GROUP`` 8, tickets 0-2 are the tiles of column 0, tickets 3-5 those of column 1.
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    ZERO_MULTIPLE: tl.constexpr = MODE.zero_multiple
    num_columns: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_F - 1) // BLOCK_F
    num_runs: tl.constexpr = (num_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs
    tickets = plan + LAYOUT.tickets + FIRST_GEMM_TICKET
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        tile, run = tile_of(ticket, num_tiles, num_runs, GROUP)
        expert = tl.load(plan + LAYOUT.tile_expert + tile)
        num_rows = tl.load(plan + LAYOUT.tile_rows + tile)
        need = num_rows
        if ZERO_MULTIPLE > 0:
            need += num_zero_rows(num_rows, ZERO_MULTIPLE)
        arrived = plan + LAYOUT.tile_arrived + tile
        code = failure_code(DISPATCH, 0, tile)
        if wait(arrived, need, timeout_ns, status, host_status, code, "gpu"):
            fence_async()
            first = run * RUN
            _first_gemm_run(
                tile * BLOCK_M, expert, first, tl.minimum(num_columns - first, RUN), num_rows,
                a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
                MODE, HIDDEN_SIZE, INTERMEDIATE_SIZE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_F,
            )  # fmt: skip
            ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        else:
            ticket = total  # a wait failed, so this CTA ends
    end_dispatch(plan, num_tiles, num_exits, LAYOUT)
    end_with_first()


_launch_fetch = Launcher(fetch_kernel)
_launch_first_gemm = Launcher(arrived_gemm_kernel)


def dispatch_gemm(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    x_RD: torch.Tensor,
    h_RF: torch.Tensor,
    pre_RG: torch.Tensor | None,
    up_LGD: torch.Tensor,
    gated: bool,
    fused: bool = True,
    copies_PD: torch.Tensor | None = None,
    copies_saved: bool = False,
) -> None:
    """Fetch the rows of this rank's experts and multiply them by the first projection.

    Args:
        context: buffers of this rank, with the layout of the plan.
        plan: made by ``make_plan`` for this call.
        x_RD: written: rows sorted by expert, padded to tiles. If ``pre_RG`` is given, the padding
            that ``weight_gemm`` reads becomes zero.
        h_RF: written: activations of these rows.
        pre_RG: written if given: inputs of the activation (gate, up), for backward.
        up_LGD: stacked weights, ``(L, 2F, D)`` if gated (gate first), else ``(L, F, D)``.
        gated: True for SwiGLU, False for GELU.
        fused: False fetches all rows before the GEMM starts.
        copies_PD: written if given: each token copy once, in the order of the fetch list.
        copies_saved: True reads the rows from ``copies_PD``, which an earlier launch with this plan
            has written. No other rank takes part.

    The kernels do nothing if the plan has more rows than ``x_RD`` or ``h_RF``, or more token copies
    than ``copies_PD``. The caller compares the sizes in ``host_status`` and launches again.
    """
    source = FROM_PEERS
    if copies_PD is not None:
        source = FROM_SAVED if copies_saved else FROM_PEERS_AND_SAVE
    copy_capacity = ANY_COPIES if copies_PD is None or copies_saved else len(copies_PD)
    save_pre = pre_RG is not None
    mode = DispatchMode(
        gated=gated,
        save_pre=save_pre,
        row_source=source.value,
        zero_multiple=context.config.weight.block_k if save_pre else 0,
    )
    tile, block_m = context.config.up, context.layout.block_m
    columns = mode.tile_columns(tile)
    h_desc = pre_desc = describe_rows(h_RF, block_rows=block_m, block_columns=columns)
    if pre_RG is not None:
        pre_desc = _describe_projections(pre_RG, mode, columns, context.layout)
    x_desc = describe_rows(x_RD, block_rows=block_m, block_columns=tile.block_k)
    up_desc = describe_weights(up_LGD, num_projections=mode.num_projections, tile=tile)
    unused = context.status
    _launch_fetch_and_gemm(
        context,
        plan,
        mode=mode,
        tile=tile,
        copies_PD=x_RD if copies_PD is None else copies_PD,
        x_RD=x_RD,
        gemm_args=(x_desc, up_desc, h_desc, pre_desc, pre_desc, unused, unused),
        capacities=(min(len(x_RD), len(h_RF)), copy_capacity),
        intermediate_size=h_RF.shape[1],
        fused=fused,
    )


def dispatch_dgrad(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    dy_RD: torch.Tensor,
    dpre_RG: torch.Tensor,
    weighted_RF: torch.Tensor,
    dweight_RJ: torch.Tensor,
    pre_RG: torch.Tensor,
    weight_R: torch.Tensor,
    down_LDF: torch.Tensor,
    gated: bool,
    fused: bool = True,
) -> None:
    """Fetch gradients of the output; compute gradients of the activation's inputs.

    In all outputs, the padding that ``weight_gemm`` reads becomes zero.

    Args:
        context: buffers of this rank, with the layout of the plan; ``publish_rows`` has published
            the gradients of all ranks.
        plan: made by ``make_plan`` in forward.
        dy_RD: written: gradients of the output, one row for each expert of a token.
        dpre_RG: written: gradients of the activation's inputs.
        weighted_RF: written: activations times routing weights. With ``dy_RD`` they give the
            gradient of the second projection.
        dweight_RJ: written: summands of the gradient of each row's routing weight, float32, one
            for each of ``num_dweight_columns`` column tiles.
        pre_RG: inputs of the activation, from forward.
        weight_R: routing weight of each row, float32, written by ``publish_rows``.
        down_LDF: stacked weights of the second projection.
        gated: True for SwiGLU, False for GELU.
        fused: False fetches all rows before the GEMM starts.
    """
    mode = DispatchMode(gated=gated, backward=True, zero_multiple=context.config.weight.block_k)
    tile = context.config.down_grad
    dy_desc = describe_rows(dy_RD, block_rows=context.layout.block_m, block_columns=tile.block_k)
    down_desc = describe_weights(down_LDF, num_projections=1, tile=tile, transposed=True)
    _launch_fetch_and_gemm(
        context,
        plan,
        mode=mode,
        tile=tile,
        copies_PD=dy_RD,
        x_RD=dy_RD,
        gemm_args=(dy_desc, down_desc, weighted_RF, pre_RG, dpre_RG, weight_R, dweight_RJ),
        capacities=(len(dy_RD), ANY_COPIES),
        intermediate_size=weighted_RF.shape[1],
        fused=fused,
    )


def num_dweight_columns(intermediate_size: int, config: KernelConfig) -> int:
    """Return how many summands the gradient of a routing weight has; see ``dispatch_dgrad``."""
    return -(-intermediate_size // config.down_grad.block_n)


def _launch_fetch_and_gemm(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    mode: DispatchMode,
    tile: GemmTile,
    copies_PD: torch.Tensor,
    x_RD: torch.Tensor,
    gemm_args: tuple[object, ...],
    capacities: tuple[int, int],
    intermediate_size: int,
    fused: bool,
) -> None:
    """Launch the kernel that fetches ``x_RD``, and the GEMM of these rows beside it."""
    hidden_size, send = x_RD.shape[1], context.send_buffer
    pair = shape_launches(
        tile=tile,
        num_sms=context.num_sms,
        fused=fused,
        move_first=True,
        move_registers=_FETCH_REGISTERS,
        ctas_beside=1,
    )
    fetch_block = context.config.fetch_block(hidden_size, num_warps=MOVE_WARPS)
    with side_by_side(fused):
        _launch_fetch(
            pair.num_move_ctas,
            (send.ptrs_W, send.local.shape[1], copies_PD, x_RD, plan, *capacities, pair.num_exits),
            (context.layout, mode, hidden_size, *fetch_block),
            dtypes=(x_RD.dtype,), **pair.move_options,
        )  # fmt: skip
        _launch_first_gemm(
            pair.num_gemm_ctas,
            (plan, *gemm_args, *capacities, pair.num_exits,
             context.status, context.host_status, context.timeout_ns),
            (context.layout, mode, hidden_size, intermediate_size, mode.tile_columns(tile),
             tile.block_n, tile.block_k, tile.group, tile.run),
            dtypes=(x_RD.dtype,), **pair.gemm_options,
        )  # fmt: skip


def _describe_projections(
    pre_RG: torch.Tensor, mode: DispatchMode, block_columns: int, layout: Layout
) -> TensorDescriptor:
    """Return the descriptor of the activation's inputs as (rows, projections, columns)."""
    pre = pre_RG.view(pre_RG.shape[0], mode.num_projections, -1)
    return describe(pre, list(pre.shape), list(pre.stride()), [layout.block_m, 1, block_columns])
