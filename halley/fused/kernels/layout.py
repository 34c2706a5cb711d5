"""Sizes and memory layout of the routing buffer and of the dispatch plan.

Both are one int32 tensor per rank. ``make_layout`` computes the offset of each section in words.
Kernels take the whole ``Layout`` as a constexpr and add offsets to a base pointer, for example
``plan + LAYOUT.tile_expert``.

Routing buffer: symmetric memory to which the other ranks write. Entry s belongs to rank s::

    published      [W]          epoch of the last pass that rank s published: routing in a new call,
                                rows in a backward or a recompute dispatch
    sums_ready     [W, chunks]  epoch of the last partial sums of rank s for a column chunk
    overflow_rows  [W]          rows of rank s if they exceed ``max_rows``; then the layer fails
    call_in_use    [2, W]       call whose plan rank s uses in this pass; 0 for a new call
    rows_ready     [W]          epoch of the last call whose rows are in the send buffer of rank s
    records        [2, W, record_words]  routing of rank s

Each record has four sections::

    header    word 0: number of tokens; word 1: number of tokens if the buffers hold fewer, else 0
    counts    [num_columns, max_blocks], see below
    packed    [T, K]  expert, and the number of earlier slots of this expert in the block
    weights   [T, K]  routing weights, float32

Each column of ``counts`` has one number for each block of tokens. The columns count:

    rows of each local expert (num_local columns)
    token copies by their smallest local expert (num_local columns)
    token copies by the group of their largest local expert (num_groups columns)

A token copy is one (token, destination rank) pair. The token crosses the link once, even if
several of its experts are on that rank.

Records have two halves: passes with an even epoch use half 0, passes with an odd epoch half 1. Two
halves are enough. A rank writes a half again only after every rank has published the pass between,
and a rank publishes that pass only after it has read the half. The flags come before the records,
and their offsets depend on the number of ranks only. So a backward pass whose plan is older than
the last growth of the buffers finds the flags at the same offsets.

Plan: memory of one rank. It has the rows that this rank receives, the position of each row, the
tiles, and the counters on which tiles and sums wait. The rows of an expert are contiguous and
padded to whole tiles. They are sorted by source rank in ring order from this rank (rank r, r + 1
and so on, modulo W), then by token. Two lists hold all token copies:

    fetch     token copies of this rank's tokens ("own"), then those of other ranks' tokens. Each
              part has the smallest local expert of a copy as its sort key, so that experts become
              complete in the order of their tiles.
    combine   token copies of other ranks' tokens, then own ones. The sort key is the expert group
              of the largest local expert: a token is summed when the tiles of this group are done.

The second part of a list starts at a multiple of ``task_rows``. Unused entries hold -1. Sections
with an element for each sort key have L elements for the fetch list, then ``num_groups`` elements
for the combine list. Sections of the plan::

    summary             [16]          words ``IS_USABLE`` to ``PASS`` of this module
    tickets             [num_tickets] words ``FETCH_TICKET`` to ``COMBINE_EXITS`` of this module
    expert_rows         [L]           rows of each local expert
    expert_begin        [L]           first row of each local expert, a multiple of block_m
    own_copies          [keys]        own token copies with each sort key
    own_begin           [keys]        index of the first copy of an own token, by sort key
    other_copies        [keys]        token copies of other ranks' tokens with each sort key
    other_begin         [keys]        index of the first copy of another rank's token, by key
    block_base          [W, num_columns, max_blocks]  for each block of the i-th source rank in ring
                                      order: sum of the column's counts in all blocks before it; for
                                      token copies, only in blocks of the same part of the list
    tile_expert         [tiles]       local expert of each tile
    tile_rows           [tiles]       rows of each tile that are not padding
    tile_arrived        [tiles]       rows of each tile that are in memory
    group_tiles         [groups]      tiles of the experts of each group
    chunk_done          [chunks, groups]  finished output tiles of the second GEMM
    chunk_sent          [chunks]      combine tasks whose sums were sent
    contributors        [1]           bitwise or of token_contributors
    token_contributors  [T]           bit r is set if rank r sends a partial sum for the token
    fetch_origin        [copies]      source rank * T + token, of each entry of the fetch list
    fetch_rows          [copies, K]   rows to which the token copy is stored, then -1
    combine_origin, combine_rows      the same for the combine list
    combine_weight      [copies, K]   routing weights of the rows in combine_rows, float32
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from halley.fused.config import KernelConfig
from halley.symm_mem.heap import SymmTensor


HEADER_WORDS = 16
MAX_CHUNKS = 64  # largest number of column chunks of one combine
MAX_GROUPS = 8  # expert groups: a token's sum starts when the tiles of its last group are done
ANY_COPIES = 2**31 - 1  # capacity that sets no limit on token copies
TASK_ROWS = 64  # token copies of one combine task
ORDER_BITS = 16  # packed slot: expert << 16 | number of earlier slots of this expert in its block

# Indices of words in the plan's section ``tickets``: atomic counters from which CTAs take tasks,
# and counts of CTAs that have ended. A GEMM and the kernel beside it zero their words at the end.
NUM_TICKETS = 8
FETCH_TICKET = tl.constexpr(0)
FIRST_GEMM_TICKET = tl.constexpr(1)
SECOND_GEMM_TICKET = tl.constexpr(2)
COMBINE_TICKET = tl.constexpr(3)
SUM_TICKET = tl.constexpr(4)
DISPATCH_EXITS = tl.constexpr(5)  # ended CTAs of the fetch and the first GEMM
COMBINE_EXITS = tl.constexpr(6)  # ended CTAs of the second GEMM and the combine

# Indices of words in the plan's section ``summary``.
IS_USABLE = tl.constexpr(0)  # 1; 0 after a failure or with too many tokens or rows: kernels skip it
NUM_TILES = tl.constexpr(1)
NUM_COPIES = tl.constexpr(2)  # length of the fetch list, with its unused entries
NUM_OWN_COPIES = tl.constexpr(3)  # length of the fetch list's own-token part, with unused entries
CALL = tl.constexpr(4)  # epoch of the call that made the plan
PASS = tl.constexpr(5)  # epoch of the last pass that uses the plan

# Indices of words in a rank's ``counters``. All but PLANNED and EPOCH are zero between launches.
NUM_COUNTERS = 16
PLAN_TICKET = tl.constexpr(0)
PUBLISHED = tl.constexpr(1)  # tasks that have published routing, or CTAs that have copied rows
COUNTED = tl.constexpr(2)  # low 16 bits: ended count tasks; high: those that saw all records
PLANNED = tl.constexpr(3)  # epoch of the last plan whose expert offsets are known
PLAN_EXITS = tl.constexpr(4)
EPOCH = tl.constexpr(5)  # last pass's epoch; kernels increment it, also in replays of CUDA graphs
ROWS_COPIED = tl.constexpr(6)  # tasks that have copied rows to the send buffer


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a fused layer, and offsets, in int32 words, in its routing buffer and its plans."""

    num_ranks: int
    num_experts: int
    tp_size: int  # ranks of a tensor-parallel group; a token goes to all of them
    top_k: int
    max_tokens: int  # T, the most tokens of a rank; send and combine buffers may hold fewer
    block_m: int  # rows of a tile
    block_slots: int  # (token, choice) slots of a block, the unit of counting; a power of two

    num_local: int  # L, experts of this rank
    num_groups: int  # expert groups, a power of two
    num_columns: int  # columns of a record's section ``counts``
    padded_k: int  # K rounded up to a power of two
    block_tokens: int  # tokens of one block
    max_blocks: int  # largest number of blocks of tokens per rank
    max_copies: int  # entries that each list, fetch and combine, can hold
    max_tiles: int
    task_rows: int = TASK_ROWS
    max_chunks: int = MAX_CHUNKS
    num_tickets: int = NUM_TICKETS
    order_bits: int = ORDER_BITS
    max_marks: int = 0  # marks that a CTA can record, see ``marks.py``; 0: CTAs record nothing

    # Offsets in the routing buffer, and its number of words.
    published: int
    sums_ready: int
    overflow_rows: int
    call_in_use: int
    rows_ready: int
    records: int
    routing_words: int

    # Offsets in a record (routing of one rank), then its size.
    header: int
    counts: int
    packed: int
    weights: int
    record_words: int

    # Offsets in a dispatch plan, and its number of words.
    summary: int
    tickets: int
    expert_rows: int
    expert_begin: int
    own_copies: int
    own_begin: int
    other_copies: int
    other_begin: int
    block_base: int
    tile_expert: int
    tile_rows: int
    tile_arrived: int
    group_tiles: int
    chunk_done: int
    chunk_sent: int
    contributors: int
    token_contributors: int
    fetch_origin: int
    fetch_rows: int
    combine_origin: int
    combine_rows: int
    combine_weight: int
    plan_words: int

    def __hash__(self) -> int:
        """Return the hash of only a few sizes, because each kernel launch hashes its layout."""
        return hash((self.num_ranks, self.num_experts, self.top_k, self.max_tokens, self.block_m))


def make_layout(
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    block_m: int,
    tp_size: int = 1,
    block_slots: int = 256,
    max_marks: int = 0,
) -> Layout:
    """Return the layout of the routing buffer and the plans of a layer of these sizes."""
    num_local = num_experts * tp_size // num_ranks
    num_groups = min(MAX_GROUPS, 1 << (num_local - 1).bit_length())
    num_columns = 2 * num_local + num_groups
    block_tokens = max(1, block_slots // (1 << (top_k - 1).bit_length()))
    max_blocks = -(-max_tokens // block_tokens)
    max_copies = num_ranks * max_tokens + 2 * TASK_ROWS
    max_tiles = num_ranks * max_tokens * min(top_k, num_local) // block_m + num_local
    flags = _offsets(
        published=num_ranks,
        sums_ready=num_ranks * MAX_CHUNKS,
        overflow_rows=num_ranks,
        call_in_use=2 * num_ranks,
        rows_ready=num_ranks,
    )
    record = _offsets(
        header=HEADER_WORDS,
        counts=num_columns * max_blocks,
        packed=max_tokens * top_k,
        weights=max_tokens * top_k,
    )
    plan = _offsets(
        summary=16,
        tickets=NUM_TICKETS,
        expert_rows=num_local,
        expert_begin=num_local,
        own_copies=num_local + num_groups,
        own_begin=num_local + num_groups,
        other_copies=num_local + num_groups,
        other_begin=num_local + num_groups,
        block_base=num_ranks * num_columns * max_blocks,
        tile_expert=max_tiles,
        tile_rows=max_tiles,
        tile_arrived=max_tiles,
        group_tiles=num_groups,
        chunk_done=MAX_CHUNKS * num_groups,
        chunk_sent=MAX_CHUNKS,
        contributors=1,
        token_contributors=max_tokens,
        fetch_origin=max_copies,
        fetch_rows=max_copies * top_k,
        combine_origin=max_copies,
        combine_rows=max_copies * top_k,
        combine_weight=max_copies * top_k,
    )
    records, record_words, plan_words = (part.pop("end") for part in (flags, record, plan))
    return Layout(
        num_ranks=num_ranks,
        num_experts=num_experts,
        tp_size=tp_size,
        top_k=top_k,
        max_tokens=max_tokens,
        block_m=block_m,
        block_slots=block_slots,
        max_marks=max_marks,
        num_local=num_local,
        num_groups=num_groups,
        num_columns=num_columns,
        padded_k=1 << (top_k - 1).bit_length(),
        block_tokens=block_tokens,
        max_blocks=max_blocks,
        max_copies=max_copies,
        max_tiles=max_tiles,
        records=records,
        routing_words=records + 2 * num_ranks * record_words,
        record_words=record_words,
        plan_words=plan_words,
        **flags,
        **record,
        **plan,
    )


def _offsets(**words: int) -> dict[str, int]:
    """Return each section's offset in words, a multiple of 16 (64 bytes), and the end as "end"."""
    offsets, start = {}, 0
    for name, size in words.items():
        offsets[name] = start
        start += -(-size // 16) * 16
    return offsets | {"end": start}


@dataclass(frozen=True, kw_only=True)
class KernelContext:
    """Buffers and settings of a rank, from which each launch of a fused layer takes arguments.

    Passes alternate between the halves of the send buffer, because other ranks may still fetch rows
    of the previous pass. Before the first pass, integer tensors are zero.
    """

    layout: Layout
    config: KernelConfig
    rank: int
    num_sms: int
    routing_buffer: SymmTensor  # int32 (routing_words,)
    send_buffer: SymmTensor  # (2, tokens, D): rows that all ranks fetch
    combine_buffer: SymmTensor  # (W, tokens, D): partial sums for this rank's tokens, by sender
    dweight_buffer: SymmTensor  # float32 (W, tokens, K): gradients of routing weights, by sender
    counters: torch.Tensor  # int32 (NUM_COUNTERS,)
    status: torch.Tensor  # int64 (2,) on the device: failure code or 0, address of records
    host_status: torch.Tensor  # int64 (HOST_STATUS_WORDS,), pinned; see ``peer.py``
    timeout_ns: int
