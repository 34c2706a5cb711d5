"""Launch the GEMMs of a fused layer; all but weight gradients run beside a kernel that moves rows.

CTAs of both kernels share each SM. The kernel that moves rows uses the registers and the shared
memory that the GEMM leaves free, and works while the tensor cores multiply.

The kernel that waits for results of the other one is launched second, as a programmatic dependent
launch. It begins when all CTAs of the first kernel have begun, so it cannot occupy the SMs that
they need::

    stream: ---- first kernel (let_second_begin) -----------|
                  ---- second kernel (end_with_first) ------|---- next launch

With ``fused`` False, the second kernel begins after the first has ended.
"""

import torch

from halley.fused.config import KernelConfig
from halley.fused.kernels.combine import chunked_gemm_kernel, combine_kernel
from halley.fused.kernels.dispatch import (
    FROM_PEERS,
    FROM_PEERS_AND_SAVE,
    FROM_SAVED,
    DispatchMode,
    arrived_gemm_kernel,
    fetch_kernel,
)
from halley.fused.kernels.layout import ANY_COPIES, KernelContext, Layout
from halley.ops.kernels.launch import Launcher, LaunchOptions, aligned, side_by_side
from halley.ops.kernels.tiles import GemmTile, describe, describe_weights, weight_gemm


MOVE_WARPS = 4  # warps of a CTA that moves rows
_SM_REGISTERS = 65536  # CUDA programming guide, compute capability 9.0
_WARP_THREADS = 32
_UNFUSED_MOVE_CTAS = 2  # least number of row-moving CTAs per SM if no GEMM runs at the same time
_FETCH_REGISTERS = 72  # per thread; the GEMM of backward leaves no more free
_COMBINE_REGISTERS = 160  # per thread with one combining CTA per SM beside the GEMM; 160 / n with n


def shape_launches(
    *,
    tile: GemmTile,
    num_sms: int,
    fused: bool,
    move_first: bool,
    move_registers: int,
    ctas_beside: int,
    ctas_after: int = 0,
) -> tuple[int, int, LaunchOptions, LaunchOptions]:
    """Return numbers of CTAs of the row-moving kernel and of its GEMM, then launch options of both.

    With ``move_first``, the row-moving kernel is launched first and the GEMM waits for its rows;
    else the GEMM is first. On each SM, ``ctas_beside`` CTAs move rows beside those of the GEMM, and
    ``ctas_after`` begin when the GEMM's CTAs end. Without ``fused``, the kernels do not overlap.
    """
    move_ctas = ctas_beside + ctas_after if fused else max(ctas_beside, _UNFUSED_MOVE_CTAS)
    free_registers = _SM_REGISTERS - ctas_beside * move_registers * MOVE_WARPS * _WARP_THREADS
    gemm_registers = free_registers // (tile.per_sm * tile.num_warps * _WARP_THREADS)
    move_options: LaunchOptions = {
        "num_warps": MOVE_WARPS,
        "num_stages": 1,
        "max_registers": move_registers,
        "shares": True,
        "overlaps": fused and not move_first,
    }
    gemm_options: LaunchOptions = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "max_registers": gemm_registers // 8 * 8,  # the compiler allocates multiples of 8
        "shares": True,
        "overlaps": fused and move_first,
    }
    return num_sms * move_ctas, num_sms * tile.per_sm, move_options, gemm_options


_launch_fetch = Launcher(fetch_kernel)
_launch_first_gemm = Launcher(arrived_gemm_kernel)
_launch_second_gemm = Launcher(chunked_gemm_kernel)
_launch_combine = Launcher(combine_kernel)


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
    """Launch the fetch of the rows of this rank's experts, and their first GEMM with activation.

    Args:
        context: buffers of this rank, with the layout of ``plan``, which ``make_plan`` made.
        fused: False fetches all rows before the GEMM starts.
        x_RD: written: rows sorted by expert, padded to tiles. If ``pre_RG`` is given, the padding
            that ``weight_gemm`` reads becomes zero.
        h_RF: written: activations of these rows.
        pre_RG: written if given: inputs of the activation (gate, up), for backward.
        up_LGD: stacked weights, ``(L, 2F, D)`` if gated (gate first), else ``(L, F, D)``.
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
    mode = DispatchMode(
        gated=gated,
        save_pre=pre_RG is not None,
        row_source=source.value,
        zero_multiple=0 if pre_RG is None else context.config.weight.block_k,
    )
    tile, block_m = context.config.up, context.layout.block_m
    columns = mode.tile_columns(tile)
    h_desc = pre_desc = describe(h_RF, [block_m, columns])
    if pre_RG is not None:
        pre = pre_RG.view(len(pre_RG), mode.num_projections, -1)
        pre_desc = describe(pre, [block_m, 1, columns])
    x_desc = describe(x_RD, [block_m, tile.block_k])
    up_desc = describe_weights(up_LGD, num_projections=mode.num_projections, tile=tile)
    unused = context.status
    _launch_fetch_and_gemm(
        context,
        plan,
        mode=mode,
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
    """Launch the fetch of output gradients, and the GEMM for gradients of the activation's inputs.

    In all outputs, the padding that ``weight_gemm`` reads becomes zero.

    Args:
        dy_RD: written: gradients of the output, one row for each expert of a token. All ranks
            have published them (``publish_rows``).
        dpre_RG: written: gradients of the activation's inputs.
        weighted_RF: written: activations times routing weights.
        dweight_RJ: written: summands of the gradient of each row's routing weight, float32, one
            for each of ``num_dweight_columns`` column tiles.
    """
    mode = DispatchMode(gated=gated, backward=True, zero_multiple=context.config.weight.block_k)
    tile = context.config.down_grad
    dy_desc = describe(dy_RD, [context.layout.block_m, tile.block_k])
    down_desc = describe_weights(down_LDF, num_projections=1, tile=tile, transposed=True)
    _launch_fetch_and_gemm(
        context,
        plan,
        mode=mode,
        copies_PD=dy_RD,
        x_RD=dy_RD,
        gemm_args=(dy_desc, down_desc, weighted_RF, pre_RG, dpre_RG, weight_R, dweight_RJ),
        capacities=(len(dy_RD), ANY_COPIES),
        intermediate_size=weighted_RF.shape[1],
        fused=fused,
    )


def num_dweight_columns(intermediate_size: int, config: KernelConfig) -> int:
    """Return the number of columns of ``dweight_RJ``: summands per routing-weight gradient."""
    return -(-intermediate_size // config.down_grad.block_n)


def _launch_fetch_and_gemm(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    mode: DispatchMode,
    copies_PD: torch.Tensor,
    x_RD: torch.Tensor,
    gemm_args: tuple[object, ...],
    capacities: tuple[int, int],
    intermediate_size: int,
    fused: bool,
) -> None:
    hidden_size, send = x_RD.shape[1], context.send_buffer
    tile = context.config.down_grad if mode.backward else context.config.up
    num_move_ctas, num_gemm_ctas, move_options, gemm_options = shape_launches(
        tile=tile,
        num_sms=context.num_sms,
        fused=fused,
        move_first=True,
        move_registers=_FETCH_REGISTERS,
        ctas_beside=1,
    )
    num_exits = num_move_ctas + num_gemm_ctas  # the last CTA to end zeroes both kernels' counters
    fetch_block = context.config.fetch_block(hidden_size, num_warps=MOVE_WARPS)
    with side_by_side(fused):
        _launch_fetch(
            num_move_ctas,
            (send.ptrs_W, send.local.shape[1], copies_PD, x_RD, plan, *capacities, num_exits,
             context.status),
            (context.layout, mode, hidden_size, *fetch_block),
            dtypes=(x_RD.dtype,), **move_options,
        )  # fmt: skip
        _launch_first_gemm(
            num_gemm_ctas,
            (plan, *gemm_args, *capacities, num_exits,
             context.status, context.host_status, context.timeout_ns),
            (context.layout, mode, hidden_size, intermediate_size, mode.tile_columns(tile),
             tile.block_n, tile.block_k, tile.group, tile.run),
            dtypes=(x_RD.dtype,), **gemm_options,
        )  # fmt: skip


def gemm_combine(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    fused: bool = True,
    copy_capacity: int = ANY_COPIES,
    weight_gradients: tuple[torch.Tensor, ...] = (),
) -> None:
    """Launch the second GEMM and combine: send partial sums to source ranks, add those that arrive.

    Args:
        y_TD: written: output of the layer or gradient of the tokens, for this rank's tokens.
        z_RD: scratch, written: output rows of the GEMM.
        rows: ``h_RF`` from ``dispatch_gemm``, or ``dpre_RG`` from ``dispatch_dgrad``.
        weights: stacked weights of the second projection, or of the first one in backward.
        copy_capacity: capacity in token copies of ``dispatch_gemm``, if it saved them.
        weight_gradients: in backward ``dweight_RJ`` from ``dispatch_dgrad``, the expert ids, and
            the gradient of the routing weights, float32, which is written; 0 for dropped slots.

    As in ``dispatch_gemm``, the kernels do nothing if the plan has more rows than ``rows`` or
    ``z_RD``, or more token copies than ``copy_capacity``.
    """
    layout, config, backward = context.layout, context.config, bool(weight_gradients)
    tile = config.up_grad if backward else config.down
    routing, combine = context.routing_buffer, context.combine_buffer
    capacities = (min(len(z_RD), len(rows)), copy_capacity)
    num_summands, unused = 0, context.status
    dweight_RJ = idx_TK = dweights_TK = unused
    if backward:
        dweight_RJ, idx_TK, dweights_TK = weight_gradients
        num_summands, idx_TK = dweight_RJ.shape[1], aligned(idx_TK)
    num_move_ctas, num_gemm_ctas, move_options, gemm_options = shape_launches(
        tile=tile,
        num_sms=context.num_sms,
        fused=fused,
        move_first=False,
        move_registers=_COMBINE_REGISTERS // config.combiners_beside,
        ctas_beside=config.combiners_beside,
        ctas_after=config.combiners_after,
    )
    num_exits = num_move_ctas + num_gemm_ctas
    hidden_size, depth = z_RD.shape[1], rows.shape[1]
    a_desc = describe(rows, [layout.block_m, tile.block_k])
    b_desc = describe_weights(weights, num_projections=1, tile=tile, transposed=backward)
    z_desc = describe(z_RD, [layout.block_m, tile.block_n])
    with side_by_side(fused):
        _launch_second_gemm(
            num_gemm_ctas,
            (z_desc, plan, a_desc, b_desc, routing.local, *capacities,
             num_exits, context.status, context.host_status),
            (layout, backward, hidden_size, depth, config.chunk_columns,
             tile.block_n, tile.block_k, tile.group, tile.run),
            dtypes=(z_RD.dtype,), **gemm_options,
        )  # fmt: skip
        _launch_combine(
            num_move_ctas,
            (y_TD, z_RD, plan, combine.local, combine.ptrs_W, routing.local, routing.ptrs_W,
             dweight_RJ, idx_TK, dweights_TK, context.dweight_buffer.ptrs_W, y_TD.shape[0],
             combine.local.shape[1], *capacities, context.rank, num_exits,
             context.status, context.host_status, context.timeout_ns),
            (layout, num_summands, hidden_size, config.combine_rows, config.combine_stages,
             config.sum_rows, config.chunk_columns, tile.block_n),
            dtypes=(z_RD.dtype, idx_TK.dtype), **move_options,
        )  # fmt: skip


def find_experts(layout: Layout, plan: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a plan: first row and number of rows of each expert, int32 ``(L,)`` each."""
    begin, num_rows = layout.expert_begin, layout.expert_rows
    num_local = layout.num_local
    return plan[begin : begin + num_local], plan[num_rows : num_rows + num_local]


def launch_weight_gradient(
    context: KernelContext,
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    main_grad: torch.Tensor | None = None,
    *,
    experts: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Launch one projection's weight-gradient GEMM; return the gradient (None with ``main_grad``).

    The gradient ``(L, M, N)`` is summed in float32. With ``main_grad`` it is added to that buffer.
    Else its dtype is ``dtype``, float32 or that of the rows, which is the default.
    ``experts`` are the results of ``find_experts``, stacked ``(P, L)`` for a layer of P parts.
    """
    begin, num_rows = experts
    out_LMN = main_grad
    if out_LMN is None:
        shape = (begin.shape[-1], grad_RM.shape[1], rows_RN.shape[1])
        out_LMN = rows_RN.new_empty(shape, dtype=dtype)
    weight_gemm(
        out_LMN,
        grad_RM,
        rows_RN,
        expert_begin=begin,
        expert_rows=num_rows,
        tile=context.config.weight,
        block_m=context.config.block_m,
        num_programs=context.num_sms,
        accumulate=main_grad is not None,
    )
    return out_LMN if main_grad is None else None
