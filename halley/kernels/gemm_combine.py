# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Sum and send home the columns that are multiplied while the next are.

Forward, rows of the activation are multiplied by the down projection and weighted (layer1).
Backward, rows of gradients are multiplied by the up projection, turned, and only summed; the
gradients of the routing weights go home beside them: the same kernel.

Tiles go columns first, in chunks; when the rows of a (token, source rank) stand in a chunk, they
are weighted, summed in float32 and stored in the home buffer of the token's rank; when the last of
a chunk is sent, a flag goes after it, and home adds up what its ranks sent. All three kinds
of work are taken by atomic tickets, by persistent programs: tiles in one launch, the rest in
another beside it (``kernels.parts``), or all in one. Programs wait for tiles that were taken
before, and for ranks that obey the same rule.

Source: COMET (arXiv:2502.19811), section 3.1 (columns first) and 3.2.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.kernels.combine import combine_task, count_sent, send_weight_gradients
from halley.kernels.combine_tiles import (
    count_ready,
    count_tiles,
    counter_of,
    groups_of_task,
    multiply_tiles,
    nth_task,
)
from halley.kernels.home import (
    chunk_came,
    look_for_overflow,
    take_home,
    take_the_rest_home,
)
from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.launch import Launcher, aligned
from halley.kernels.layout import ANY_SENDS, MAX_CHUNKS, TASK_ROWS, Layout
from halley.kernels.parts import LaunchShape, end_with_first, launch_parts, let_second_begin
from halley.kernels.peer import failure, wait
from halley.kernels.plan_words import EPOCH, NUM_SENDS, NUM_TILES, usable_here
from halley.kernels.status import COMBINE
from halley.kernels.tiles import describe_rows, describe_weights


_COMBINE = tl.constexpr(COMBINE)
_TASK_ROWS = tl.constexpr(TASK_ROWS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
# Words of the tickets; dispatch_gemm has the others.
_TILE_TICKET = tl.constexpr(2)
_TASK_TICKET = tl.constexpr(3)
_HOME_TICKET = tl.constexpr(4)
_EXITED = tl.constexpr(6)
_COMBINE_REGISTERS = 160  # of a thread, of all programs that combine on a multiprocessor together


@triton.jit
def _reset(plan, LAYOUT: tl.constexpr):
    """Leave the counters as the plan had them, for whoever runs on this plan again."""
    tickets = plan + LAYOUT.tickets
    tl.store(tickets + _TILE_TICKET, 0)
    tl.store(tickets + _TASK_TICKET, 0)
    tl.store(tickets + _HOME_TICKET, 0)
    tl.store(tickets + _EXITED, 0)
    tl.store(plan + LAYOUT.chunk_done + tl.arange(0, _MAX_CHUNKS * LAYOUT.num_groups), 0)
    tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, _MAX_CHUNKS), 0)


@triton.jit
def _leave(num_leaving, plan, words, status, host_words, LAYOUT: tl.constexpr):
    """Count a program that ends; the last one of all launches leaves all as it was found."""
    tickets = plan + LAYOUT.tickets
    before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
    if before == num_leaving - 1:
        _reset(plan, LAYOUT)
        look_for_overflow(words, status, host_words, LAYOUT)


@triton.jit(do_not_specialize=[
    "num_tokens", "home_tokens", "capacity", "send_capacity", "rank", "num_combiners",
    "num_leaving", "timeout_ns",
])  # fmt: skip
def gemm_combine_kernel(
    y_TD, z_RD, plan, a_desc, b_desc, z_desc, home_WTD, home_ptrs_W, words, words_ptrs_W,
    dweight_RC, idx_TK, dweights_TK, weights_home_WTK, weights_home_ptrs_W,
    num_tokens, home_tokens, capacity, send_capacity, marks, rank, num_combiners, num_leaving,
    status, host_words, timeout_ns: tl.int64,
    MULTIPLY: tl.constexpr, COMBINE: tl.constexpr,
    LAYOUT: tl.constexpr, NUM_PARTS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, HOME_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    LINK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply, combine and sum at home by tickets, or one of the two.

    ``NUM_PARTS`` are those of the gradient of a routing weight, in backward; 0 is forward.
    """
    let_second_begin()
    BACKWARD: tl.constexpr = NUM_PARTS > 0
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    epoch = tl.load(marks + EPOCH)
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    tasks_a_chunk = tl.load(plan + LAYOUT.summary + NUM_SENDS) // _TASK_ROWS * usable
    last_columns: tl.constexpr = num_columns - (num_chunks - 1) * per_chunk
    runs_a_chunk: tl.constexpr = (per_chunk + RUN - 1) // RUN
    num_runs: tl.constexpr = (num_chunks - 1) * runs_a_chunk + (last_columns + RUN - 1) // RUN
    total = num_tiles * num_runs * MULTIPLY
    num_tasks = tasks_a_chunk * num_chunks * COMBINE
    tickets = plan + LAYOUT.tickets
    tickets_a_chunk = num_tiles * runs_a_chunk
    ticket = 0
    multiplying = total > 0
    task = num_tasks
    homes_a_chunk = tl.cdiv(num_tokens, HOME_ROWS)
    num_homes = homes_a_chunk * num_chunks * usable * COMBINE
    home = num_homes
    if (tl.program_id(0) < num_combiners) | (total == 0):
        task = tl.atomic_add(tickets + _TASK_TICKET, COMBINE, sem="relaxed", scope="gpu")
    if (tl.program_id(0) * 4 < num_combiners) | (total == 0):
        home = tl.atomic_add(tickets + _HOME_TICKET, COMBINE, sem="relaxed", scope="gpu")
    arrived = -1  # the last chunk that all ranks have sent, as far as this program knows
    pending = 0  # chunk and number of the tiles made last, until they are counted
    ready = 0  # groups of experts that this program has seen to be whole, those of all chunks
    which = 0
    while multiplying | (task < num_tasks):
        chunk = task // tl.maximum(tasks_a_chunk, 1)
        columns = tl.minimum(num_columns - chunk * per_chunk, per_chunk)
        combine = task < num_tasks
        if multiplying:
            # In pace with the tiles of the next chunk, of which all take one while this makes one.
            taken = ticket + tl.num_programs(0) - (chunk + 1) * tickets_a_chunk
            combine &= taken * tasks_a_chunk >= (task - chunk * tasks_a_chunk) * tickets_a_chunk
        if combine:
            which = nth_task(task - chunk * tasks_a_chunk, tasks_a_chunk, plan, LAYOUT)
            wanted = chunk * LAYOUT.num_groups + groups_of_task(which, plan, LAYOUT)
            ready = count_ready(ready, chunk, wanted, columns, plan, LAYOUT)
            combine = ready >= wanted
        going_home = False
        if not combine:
            going_home = chunk_came(
                home, num_homes, homes_a_chunk, arrived, plan, words, epoch, LAYOUT
            )
        if combine:
            if COMBINE:
                combine_task(
                    which, chunk, z_RD, plan, home_ptrs_W, home_tokens, rank, status,
                    LAYOUT, HIDDEN_SIZE, ROWS, CHUNK, STAGES, not BACKWARD, LINK,
                )  # fmt: skip
                if BACKWARD:
                    if chunk == 0:
                        send_weight_gradients(
                            which, dweight_RC, plan, weights_home_ptrs_W, home_tokens, rank,
                            LAYOUT, NUM_PARTS, ROWS,
                        )  # fmt: skip
                count_sent(chunk, tasks_a_chunk, plan, words, words_ptrs_W, rank, epoch, LAYOUT)
                task = tl.atomic_add(tickets + _TASK_TICKET, 1, sem="relaxed", scope="gpu")
        elif going_home:
            if COMBINE:
                arrived = home // homes_a_chunk
                take_home(
                    home % homes_a_chunk, arrived, y_TD, home_WTD, home_tokens, plan, num_tokens,
                    idx_TK, dweights_TK, weights_home_WTK,
                    LAYOUT, BACKWARD, HIDDEN_SIZE, HOME_ROWS, CHUNK,
                )  # fmt: skip
                home = tl.atomic_add(tickets + _HOME_TICKET, 1, sem="relaxed", scope="gpu")
        elif multiplying:
            if MULTIPLY:
                # Taken only now: a tile that waits in the hand of a program holds up its chunk.
                ticket = tl.atomic_add(tickets + _TILE_TICKET, 1, sem="relaxed", scope="gpu")
                multiplying = ticket < total
                if multiplying:
                    pending = multiply_tiles(
                        ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
                        LAYOUT, HIDDEN_SIZE, DEPTH, BACKWARD, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
                    )  # fmt: skip
                # Tiles are counted when the next are begun: by then their stores are done.
                if (not multiplying) | (task < num_tasks):
                    count_tiles(pending, plan, LAYOUT)
                    pending = 0
                if (not multiplying) & (task >= num_tasks):
                    task = tl.atomic_add(
                        tickets + _TASK_TICKET, COMBINE, sem="relaxed", scope="gpu"
                    )
        else:
            code = failure(_COMBINE, 0, chunk)
            done, need = counter_of(ready, columns, plan, LAYOUT)
            if not wait(done, need, timeout_ns, status, host_words, code, "gpu"):
                task = num_tasks
    if COMBINE:
        take_the_rest_home(
            home, num_homes, homes_a_chunk, arrived, tickets + _HOME_TICKET, y_TD,
            home_WTD, home_tokens, plan, num_tokens, idx_TK, dweights_TK, weights_home_WTK, words,
            epoch, rank, status, host_words, timeout_ns,
            LAYOUT, BACKWARD, HIDDEN_SIZE, HOME_ROWS, CHUNK,
        )  # fmt: skip
    _leave(num_leaving, plan, words, status, host_words, LAYOUT)
    if not MULTIPLY:
        end_with_first()


_launch = Launcher(gemm_combine_kernel)


def gemm_combine(
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    h_RF: torch.Tensor,
    *,
    plan: torch.Tensor,
    down_LDF: torch.Tensor,
    home_WTD: torch.Tensor,
    home_ptrs_W: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    rank: int,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
    send_capacity: int = ANY_SENDS,
) -> None:
    """Multiply by the second projection, sum over each token's experts, bring the sums home.

    Args:
        y_TD: written: the layer's output for this rank's tokens.
        z_RD: written: rows of the second projection, scratch.
        h_RF: activations of ``dispatch_gemm``.
        plan: made by ``make_plan`` for this call.
        down_LDF: stacked weights, ``(L, D, F)``.
        home_WTD: this rank's copy of the symmetric home buffer, ``(W, tokens, D)``: each rank
            writes its own part of it on every rank.
        home_ptrs_W: addresses of all ranks' home buffers.
        marks: as for ``make_plan``.
        fused: False runs the three parts one after another.
        send_capacity: for how many sends ``dispatch_gemm`` had room, if it wrote them.

    A plan with more rows than ``h_RF`` or ``z_RD``, or more sends, does nothing, as in
    ``dispatch_gemm``.
    """
    tile = knobs.down
    descs = _describe(h_RF, down_LDF, z_RD, tile, layout, turned=False)

    def launch(shape: LaunchShape, *, multiply: bool, move: bool) -> None:
        _launch(
            shape.num_programs,
            (y_TD, z_RD, plan, *descs, home_WTD, home_ptrs_W, words, words_ptrs_W,
             status, status, status, status, status, y_TD.shape[0], home_WTD.shape[1],
             min(z_RD.shape[0], h_RF.shape[0]), send_capacity, marks, rank,
             knobs.num_combiners, shape.num_leaving, status, host_words, timeout_ns),
            (multiply, move, *_constants(z_RD, h_RF, 0, tile, layout, knobs)),
            dtypes=(z_RD.dtype,), **shape.options,
        )  # fmt: skip

    launch_parts(
        launch, tile=tile, knobs=knobs, num_programs=num_programs, fused=fused,
        moves_first=False, movers=knobs.combiners_beside,
        movers_after=knobs.combiners_after,
        move_registers=_COMBINE_REGISTERS // knobs.combiners_beside,
    )  # fmt: skip


def dgrad_combine(
    dx_TD: torch.Tensor,
    dweights_TK: torch.Tensor,
    z_RD: torch.Tensor,
    dpre_RG: torch.Tensor,
    dweight_RC: torch.Tensor,
    *,
    plan: torch.Tensor,
    up_LGD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    home_WTD: torch.Tensor,
    home_ptrs_W: torch.Tensor,
    weights_home_WTK: torch.Tensor,
    weights_home_ptrs_W: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    rank: int,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
) -> None:
    """Multiply gradients by the first projection, sum over each token's experts, bring them home.

    Args:
        dx_TD: written: the gradient of this rank's tokens.
        dweights_TK: written: the gradient of their routing weights, float32; 0 where dropped.
        z_RD: written: the gradient of each row, scratch.
        dpre_RG, dweight_RC: as ``dispatch_dgrad`` wrote them.
        plan: of the call whose gradient this is.
        up_LGD: stacked weights, as in forward.
        topk_idx_TK: expert ids of that call.
        home_WTD, home_ptrs_W: as for ``gemm_combine``.
        weights_home_WTK, weights_home_ptrs_W: the same for gradients of routing weights, float32.
        marks: as for ``make_plan``.
        fused: False runs the three parts one after another.
    """
    tile = knobs.up_grad
    descs = _describe(dpre_RG, up_LGD, z_RD, tile, layout, turned=True)
    idx_TK = aligned(topk_idx_TK)

    def launch(shape: LaunchShape, *, multiply: bool, move: bool) -> None:
        _launch(
            shape.num_programs,
            (dx_TD, z_RD, plan, *descs, home_WTD, home_ptrs_W, words, words_ptrs_W,
             dweight_RC, idx_TK, dweights_TK, weights_home_WTK, weights_home_ptrs_W,
             dx_TD.shape[0], home_WTD.shape[1], dpre_RG.shape[0], ANY_SENDS, marks, rank,
             knobs.num_combiners, shape.num_leaving, status, host_words, timeout_ns),
            (multiply, move,
             *_constants(z_RD, dpre_RG, dweight_RC.shape[1], tile, layout, knobs)),
            dtypes=(z_RD.dtype, idx_TK.dtype), **shape.options,
        )  # fmt: skip

    launch_parts(
        launch, tile=tile, knobs=knobs, num_programs=num_programs, fused=fused,
        moves_first=False, movers=knobs.combiners_beside,
        movers_after=knobs.combiners_after,
        move_registers=_COMBINE_REGISTERS // knobs.combiners_beside,
    )  # fmt: skip


def _describe(
    rows: torch.Tensor,
    weights: torch.Tensor,
    product: torch.Tensor,
    tile: GemmTile,
    layout: Layout,
    *,
    turned: bool,
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    return (
        describe_rows(rows, block_rows=layout.block_m, block_columns=tile.block_k),
        describe_weights(weights, parts=1, tile=tile, turned=turned),
        describe_rows(product, block_rows=layout.block_m, block_columns=tile.block_n),
    )


def _constants(
    product: torch.Tensor,
    rows: torch.Tensor,
    num_parts: int,
    tile: GemmTile,
    layout: Layout,
    knobs: Knobs,
) -> tuple[object, ...]:
    return (
        layout, num_parts, product.shape[1], rows.shape[1], knobs.combine_rows,
        knobs.combine_stages, knobs.home_rows, knobs.chunk_columns, knobs.link_bytes_per_us,
        tile.block_n, tile.block_k, tile.group, tile.run,
    )  # fmt: skip
