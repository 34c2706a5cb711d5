# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Give each slot its row, each send its places in the lists, each tile its expert."""

import triton
import triton.language as tl

from halley.fused.kernels.layout import ORDER_BITS
from halley.fused.kernels.plan_words import USABLE, base_of
from halley.fused.kernels.publish import last_group, local_experts, record_of, smallest_local


_ORDER_BITS = tl.constexpr(ORDER_BITS)
_ORDER_MASK = tl.constexpr((1 << ORDER_BITS) - 1)


@triton.jit
def _load_packed(record, token, LAYOUT: tl.constexpr):
    """Return the packed slots of some tokens, (tokens, padded K); -1 where there is none."""
    k = tl.arange(0, LAYOUT.padded_k)
    real = (token < tl.load(record + LAYOUT.header))[:, None] & (k < LAYOUT.top_k)[None, :]
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    return tl.load(record + LAYOUT.packed + at, mask=real, other=-1)


@triton.jit
def _places(i, block, key, other_key, before, column, plan, LAYOUT: tl.constexpr):
    """Return places in a list: where those of the key begin, of this block, before this one."""
    real = key < other_key
    base = base_of(plan, i, LAYOUT.num_local + column, LAYOUT) + key * LAYOUT.max_blocks + block
    begin = plan + tl.where(i == 0, LAYOUT.own_begin, LAYOUT.other_begin) + column + key
    return tl.load(begin, mask=real, other=0) + tl.load(base, mask=real, other=0) + before


@triton.jit
def _place_sends(i, block, expert_TK, record, plan, rank, LAYOUT: tl.constexpr):
    """Return the places of the sends of one block's tokens in both lists."""
    STEP: tl.constexpr = min(32, LAYOUT.block_tokens)
    smallest = smallest_local(expert_TK, rank, LAYOUT)
    group = last_group(expert_TK, rank, LAYOUT)
    within = tl.arange(0, LAYOUT.block_tokens)
    same_smallest = tl.zeros_like(within)
    same_group = tl.zeros_like(within)
    for start in range(0, LAYOUT.block_tokens, STEP):
        other = start + tl.arange(0, STEP)
        expert = _load_packed(record, block * LAYOUT.block_tokens + other, LAYOUT) >> _ORDER_BITS
        earlier = other[None, :] < within[:, None]
        same = smallest_local(expert, rank, LAYOUT)[None, :] == smallest[:, None]
        same_smallest += tl.sum((same & earlier).to(tl.int32), axis=1)
        same = last_group(expert, rank, LAYOUT)[None, :] == group[:, None]
        same_group += tl.sum((same & earlier).to(tl.int32), axis=1)
    fetch = _places(i, block, smallest, LAYOUT.num_local, same_smallest, 0, plan, LAYOUT)
    total = _places(i, block, group, LAYOUT.num_groups, same_group, LAYOUT.num_local, plan, LAYOUT)
    return fetch, total


@triton.jit
def _place_slots(i, block, words, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Give the slots of one block of tokens of the ring's i-th source their rows and sends."""
    source = (rank + i) % LAYOUT.num_ranks
    record = record_of(words, source, epoch, LAYOUT)
    token = block * LAYOUT.block_tokens + tl.arange(0, LAYOUT.block_tokens)
    k = tl.arange(0, LAYOUT.padded_k)
    packed = _load_packed(record, token, LAYOUT)
    expert = packed >> _ORDER_BITS  # -1 stays -1
    local = local_experts(expert, rank, LAYOUT)
    mine = local < LAYOUT.num_local
    weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    weight = tl.load(weights + at, mask=mine, other=0.0)

    base = base_of(plan, i, 0, LAYOUT) + local * LAYOUT.max_blocks + block
    row = tl.load(plan + LAYOUT.expert_begin + local, mask=mine, other=0)
    row += tl.load(base, mask=mine, other=0)
    row = tl.where(mine, row + (packed & _ORDER_MASK), -1)

    # Slots of this rank first, in the order of k; the rest of the line says that it is empty.
    here = mine.to(tl.int32)
    count = tl.sum(here, axis=1)
    place = tl.cumsum(here, axis=1) - here
    empty = count[:, None] + tl.cumsum(1 - here, axis=1) - (1 - here)
    place = tl.where(mine, place, empty)
    kept = (count > 0)[:, None] & (place < LAYOUT.top_k)
    origin = source * LAYOUT.max_tokens + token
    fetch, total = _place_sends(i, block, expert, record, plan, rank, LAYOUT)
    tl.store(plan + LAYOUT.fetch_origin + fetch, origin, mask=count > 0)
    tl.store(plan + LAYOUT.sum_origin + total, origin, mask=count > 0)
    line = fetch[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.fetch_slot + line, row, mask=kept)
    line = total[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.sum_slot + line, row, mask=kept)
    sum_weight = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
    tl.store(sum_weight + line, weight, mask=kept)
    if i == 0:
        _note_home(expert, token, record, plan, LAYOUT)


@triton.jit
def _note_home(expert, token, record, plan, LAYOUT: tl.constexpr):
    """Write down which ranks will send sums home for this rank's tokens, a bit a rank."""
    owner = tl.where(expert >= 0, expert // LAYOUT.num_local, -1)
    ranks = tl.zeros_like(token)
    sources = 0
    for peer in range(LAYOUT.num_ranks):
        needs = tl.max((owner == peer // LAYOUT.tp_size).to(tl.int32), axis=1)
        ranks |= needs << peer
        sources |= tl.max(needs, axis=0) << peer
    num_tokens = tl.load(record + LAYOUT.header)
    tl.store(plan + LAYOUT.home_ranks + token, ranks, mask=token < num_tokens)
    tl.atomic_or(plan + LAYOUT.home_sources, sources, sem="relaxed", scope="gpu")


@triton.jit
def _place_tiles(local, plan, LAYOUT: tl.constexpr):
    """Write each tile of one expert: the expert, the number of rows, and that none has arrived."""
    STEP: tl.constexpr = 64
    rows = tl.load(plan + LAYOUT.expert_rows + local)
    first = tl.load(plan + LAYOUT.expert_begin + local) // LAYOUT.block_m
    num_tiles = tl.cdiv(rows, LAYOUT.block_m)
    for start in range(0, num_tiles, STEP):
        tile = start + tl.arange(0, STEP)
        real = tile < num_tiles
        left = tl.minimum(rows - tile * LAYOUT.block_m, LAYOUT.block_m)
        tl.store(plan + LAYOUT.tile_expert + first + tile, tl.zeros_like(tile) + local, mask=real)
        tl.store(plan + LAYOUT.tile_rows + first + tile, left, mask=real)
        tl.store(plan + LAYOUT.tile_arrived + first + tile, tl.zeros_like(tile), mask=real)


@triton.jit
def place_task(task, words, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Tasks [0, W * blocks) place the slots of a block each; the next L an expert's tiles."""
    if tl.load(plan + LAYOUT.summary + USABLE) != 0:
        if task < LAYOUT.num_ranks * LAYOUT.max_blocks:
            i = task // LAYOUT.max_blocks
            block = task % LAYOUT.max_blocks
            record = record_of(words, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
            if block * LAYOUT.block_tokens < tl.load(record + LAYOUT.header):
                _place_slots(i, block, words, plan, epoch, rank, LAYOUT)
        else:
            _place_tiles(task - LAYOUT.num_ranks * LAYOUT.max_blocks, plan, LAYOUT)
