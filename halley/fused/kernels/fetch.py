# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Bring a token's row over the link once and write it to the rows of all its experts."""

import triton
import triton.language as tl


# Where the rows of sends come from and whether they are kept one by one.
FROM_PEERS = tl.constexpr(0)
FROM_PEERS_AND_KEEP = tl.constexpr(1)
FROM_KEPT = tl.constexpr(2)


@triton.jit
def fetch_task(
    task, stage_ptrs_W, first_token, sends_SD, x_RD, plan,
    LAYOUT: tl.constexpr, SENDS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read the rows of some sends once over the link, write each to all its experts' rows.

    ``first_token`` is where the stage of this pass begins.

    Example: send 5 is token 9 of rank 1 with slots (3, 130): row 9 of rank 1's stage becomes rows 3
    and 130 of ``x_RD``, and tiles 0 and 1 (of 128 rows) count one row more. If sends are kept, it
    becomes row 5 of ``sends_SD``, too, from where it can come a second time.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    send = task * ROWS + tl.arange(0, ROWS)
    origin = tl.load(plan + LAYOUT.fetch_origin + send)
    real = origin >= 0
    k = tl.arange(0, LAYOUT.padded_k)
    line = (send * TOP_K)[:, None] + k[None, :]
    listed = real[:, None] & (k < TOP_K)[None, :]
    # All slots at once, then taken apart in registers: a load of each would be a wait of each.
    row_RK = tl.load(plan + LAYOUT.fetch_slot + line, mask=listed, other=-1)
    most = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
    if SENDS == FROM_KEPT:
        base = sends_SD + (send.to(tl.int64) * HIDDEN_SIZE)[:, None]
    else:
        token = first_token + (origin % LAYOUT.max_tokens).to(tl.int64)
        stage = tl.load(stage_ptrs_W + origin // LAYOUT.max_tokens, mask=real, other=0)
        base = tl.multiple_of(stage.to(x_RD.dtype), 16)[:, None] + (token * HIDDEN_SIZE)[:, None]
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < HIDDEN_SIZE)[None, :]
        value = tl.load(base + column[None, :], mask=real[:, None] & inside)
        if SENDS == FROM_PEERS_AND_KEEP:
            to = (send.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
            tl.store(sends_SD + to, value, mask=real[:, None] & inside)
        for slot in tl.static_range(TOP_K):
            if slot < most:
                row = tl.max(tl.where(k[None, :] == slot, row_RK, -1), axis=1)
                to = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
                tl.store(x_RD + to, value, mask=(row >= 0)[:, None] & inside)
    tl.debug_barrier()
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")


@triton.jit
def rows_to_clear(num_rows, CLEAR: tl.constexpr):
    """Return how many rows follow an expert's, or the last tile's, up to a multiple of CLEAR."""
    return tl.cdiv(num_rows, CLEAR) * CLEAR - num_rows


@triton.jit
def clear_task(
    local, x_RD, plan, LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    CLEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zero what follows an expert's rows up to a multiple of CLEAR, and count it as arrived.

    The gradient of weights is summed over whole steps of rows. Zeros that are there before their
    tile is made are zeros in all that is made of it, forward and backward.
    """
    num_rows = tl.load(plan + LAYOUT.expert_rows + local)
    begin = tl.load(plan + LAYOUT.expert_begin + local) + num_rows
    end = begin + rows_to_clear(num_rows, CLEAR)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        for start in range(0, HIDDEN_SIZE, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            to = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
            inside = (row < end)[:, None] & (column < HIDDEN_SIZE)[None, :]
            tl.store(x_RD + to, tl.zeros((ROWS, COLUMNS), x_RD.dtype.element_ty), mask=inside)
    if end > begin:
        tl.debug_barrier()
        arrived = plan + LAYOUT.tile_arrived + begin // LAYOUT.block_m
        tl.atomic_add(arrived, end - begin, sem="release", scope="gpu")
