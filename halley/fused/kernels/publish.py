# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Lay this rank's tokens out for its peers, and tell every rank how they are routed."""

import triton
import triton.language as tl

from halley.fused.kernels.layout import ORDER_BITS
from halley.fused.kernels.peer import peer_ptr, signal


_ORDER_BITS = tl.constexpr(ORDER_BITS)


@triton.jit
def record_of(words, source, epoch, LAYOUT: tl.constexpr):
    """Return where the record of ``source`` for this epoch starts in a mailbox."""
    half = (epoch % 2) * LAYOUT.num_ranks + source
    return words + LAYOUT.records + half.to(tl.int64) * LAYOUT.record_words


@triton.jit
def call_of(words, source, epoch, LAYOUT: tl.constexpr):
    """Return where a mailbox holds which call's plan ``source`` uses in this epoch."""
    return words + LAYOUT.calls + (epoch % 2) * LAYOUT.num_ranks + source


@triton.jit
def _load_experts(idx_TK, slot, num_tokens, LAYOUT: tl.constexpr):
    """Return the experts of slots that are counted with padding; -1 where there is none."""
    token, k = slot // LAYOUT.padded_k, slot % LAYOUT.padded_k
    real = (k < LAYOUT.top_k) & (token < num_tokens)
    return tl.load(idx_TK + token * LAYOUT.top_k + k, mask=real, other=-1).to(tl.int32)


@triton.jit
def _publish_block(
    block, idx_TK, weights_TK, num_tokens, epoch, rank, words, words_ptrs_W, LAYOUT: tl.constexpr
):
    """Write the table and the counts of one block of tokens into the records on all ranks.

    Example: experts (2, 0) and (2, 1) of two tokens are packed as (2 << 16, 0) and
    (2 << 16 | 1, 1 << 16): the second slot of expert 2 has one before it.
    """
    SLOTS: tl.constexpr = LAYOUT.block_tokens * LAYOUT.padded_k
    STEP: tl.constexpr = min(32, SLOTS)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    expert = _load_experts(idx_TK, slot, num_tokens, LAYOUT)
    before = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, SLOTS, STEP):
        other = block * SLOTS + start + tl.arange(0, STEP)
        other_expert = _load_experts(idx_TK, other, num_tokens, LAYOUT)
        earlier = (expert[:, None] == other_expert[None, :]) & (other[None, :] < slot[:, None])
        before += tl.sum(earlier.to(tl.int32), axis=1)
    packed = tl.where(expert >= 0, (expert << _ORDER_BITS) | before, -1)
    token, k = slot // LAYOUT.padded_k, slot % LAYOUT.padded_k
    real = (k < LAYOUT.top_k) & (token < num_tokens)
    at = token * LAYOUT.top_k + k
    weight = tl.load(weights_TK + at, mask=real, other=0.0).to(tl.float32)

    expert_TK = expert.reshape(LAYOUT.block_tokens, LAYOUT.padded_k)
    for peer in range(LAYOUT.num_ranks):
        record = record_of(peer_ptr(words_ptrs_W, peer, words), rank, epoch, LAYOUT)
        tl.store(record + LAYOUT.packed + at, packed, mask=real)
        weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
        tl.store(weights + at, weight, mask=real)
        smallest = smallest_local(expert_TK, peer, LAYOUT)
        for start in range(0, LAYOUT.num_local, STEP):
            local = start + tl.arange(0, STEP)
            inside = local < LAYOUT.num_local
            column = record + LAYOUT.counts + local * LAYOUT.max_blocks + block
            rows = expert[:, None] == (first_expert(peer, LAYOUT) + local)[None, :]
            tl.store(column, tl.sum(rows.to(tl.int32), axis=0), mask=inside)
            sends = smallest[:, None] == local[None, :]
            column += LAYOUT.num_local * LAYOUT.max_blocks
            tl.store(column, tl.sum(sends.to(tl.int32), axis=0), mask=inside)
        group = tl.arange(0, LAYOUT.num_groups)
        sends = last_group(expert_TK, peer, LAYOUT)[:, None] == group[None, :]
        column = record + LAYOUT.counts + (2 * LAYOUT.num_local + group) * LAYOUT.max_blocks + block
        tl.store(column, tl.sum(sends.to(tl.int32), axis=0))


@triton.jit
def first_expert(rank, LAYOUT: tl.constexpr):
    """Return the first expert of ``rank``, and of the others that hold shards of the same."""
    return rank // LAYOUT.tp_size * LAYOUT.num_local


@triton.jit
def local_experts(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return experts counted from the first of ``rank``; L where another rank's, or none, is."""
    local = expert_TK - first_expert(rank, LAYOUT)
    here = (expert_TK >= 0) & (local >= 0) & (local < LAYOUT.num_local)
    return tl.where(here, local, LAYOUT.num_local)


@triton.jit
def smallest_local(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return each token's smallest expert on ``rank``; L if it has none."""
    return tl.min(local_experts(expert_TK, rank, LAYOUT), axis=1)


@triton.jit
def group_of(local, LAYOUT: tl.constexpr):
    """Return the group of an expert of a rank; experts of a group stand side by side."""
    return local * LAYOUT.num_groups // LAYOUT.num_local


@triton.jit
def last_group(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return the group of each token's largest expert on ``rank``; G if it has none."""
    local = local_experts(expert_TK, rank, LAYOUT)
    largest = tl.max(tl.where(local < LAYOUT.num_local, local, -1), axis=1)
    return tl.where(largest >= 0, group_of(largest, LAYOUT), LAYOUT.num_groups)


@triton.jit
def stage_rows(
    first, x_TD, stage_TD, num_tokens,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy some rows, from ``first`` on, to where the peers can read them."""
    row = first + tl.arange(0, ROWS)
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[:, None] * HIDDEN_SIZE + column[None, :]
        mask = (row < num_tokens)[:, None] & (column < HIDDEN_SIZE)[None, :]
        tl.store(stage_TD + at, tl.load(x_TD + at, mask=mask), mask=mask)


@triton.jit
def route_task(
    task, idx_TK, weights_TK, num_tokens, wanted_tokens, epoch, rank, words, words_ptrs_W,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Publish a block of the table, and with the first task the header."""
    if task == 0:
        for peer in range(LAYOUT.num_ranks):
            record = record_of(peer_ptr(words_ptrs_W, peer, words), rank, epoch, LAYOUT)
            tl.store(record + LAYOUT.header, num_tokens)
            tl.store(record + LAYOUT.header + 1, wanted_tokens)
            tl.store(call_of(peer_ptr(words_ptrs_W, peer, words), rank, epoch, LAYOUT), 0)
    if task * LAYOUT.block_tokens < num_tokens:
        _publish_block(
            task, idx_TK, weights_TK, num_tokens, epoch, rank, words, words_ptrs_W, LAYOUT
        )


@triton.jit
def raise_flags(flags, epoch, rank, words, words_ptrs_W, LAYOUT: tl.constexpr):
    """Tell all ranks how far this one is: what it wrote before stands."""
    for peer in range(LAYOUT.num_ranks):
        signal(peer_ptr(words_ptrs_W, peer, words) + flags + rank, epoch)
