"""Where things stand in the mailbox that ranks write to each other and in the plan made of it.

Both are int32 words in one tensor each. Kernels take the layout whole, as a constant, and read
offsets from it: ``plan + LAYOUT.tile_expert``.

The mailbox is symmetric memory. Its first words are flags. Then come two halves, used by calls in
turn, each with one record a source rank:

    arrived_W     epoch of the last record that stands, a word a source rank
    home_WC       epoch of the last sums that came home, a word a (source rank, column chunk)
    overflow_W    rows that a source's experts got, if more than it has room for; then all is over
    calls         [half][source]: the call whose plan this pass uses once more, 0 for a new call
    records       [half][source]: header | counts (columns, blocks) | packed (T, K) | weights (T, K)

The header is (number of tokens, more tokens than there is room for). A "send" is one (token,
destination rank): a token crosses once, however many of its experts live there. The columns of the
counts are, for each block of tokens: rows of each local expert (L), sends by their smallest local
expert (L), sends by the group of their largest local expert (G).

Flags stand where they stand whatever the other sizes are: a pass with an old plan, from before its
ranks brought more tokens, touches nothing else.

Who writes: the source, its record on every rank, then the flag. Who waits: whoever reads. Two
halves are enough, since a rank writes a half again only after every rank wrote the other one, which
a rank does when it is done reading the first.

The plan says for one rank which rows it receives, where each goes, which tiles those make and what
a tile waits for. Rows of one expert are contiguous, sorted by source rank in ring order from this
rank, and padded to whole tiles. The sends that this rank receives are listed twice:

    fetch   in the order in which they are fetched: this rank's own, then, from the next whole task
            on, those of others; both by smallest expert, so that experts become complete in the
            order in which they are multiplied
    sum     those of others, then, from the next whole task on, this rank's own; both by the group
            of their largest expert: they can be combined when its tiles stand, and those before

Places of a list that stay empty hold -1. Inside, sends stand by source in ring order, then token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING


HEADER_WORDS = 16
MAX_CHUNKS = 64  # column chunks of one combine
MAX_GROUPS = 8  # of a rank's experts: the steps in which a chunk's sums become ready
ANY_SENDS = 2**31 - 1  # room for as many as there are
TASK_ROWS = 64
NUM_TICKETS = 8
ORDER_BITS = 16  # packed slot: expert << 16 | how many slots of its block come before it


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes, and offsets in words, all known without looking at the routing.

    Attributes:
        num_ranks: ranks of the group, W.
        num_experts: experts of all ranks, E.
        tp_size: neighbours in rank that hold a shard of each of the same experts. A token goes to
            all of them, and what comes home from them is added up as from any ranks.
        top_k: experts of a token, K.
        max_tokens: tokens of a rank that have numbers, T; buffers of rows may have room for fewer.
        block_m: rows of a tile.
        block_slots: slots that one program ranks and counts, padded; a power of two.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    block_m: int
    tp_size: int = 1
    block_slots: int = 256

    if TYPE_CHECKING:  # the sizes and offsets that __post_init__ adds

        def __getattr__(self, name: str) -> int: ...

    def __post_init__(self) -> None:
        ranks, local = self.num_ranks, self.num_experts * self.tp_size // self.num_ranks
        groups = min(MAX_GROUPS, 1 << (local - 1).bit_length())
        columns = 2 * local + groups
        padded_k = 1 << (self.top_k - 1).bit_length()
        block_tokens = max(1, self.block_slots // padded_k)
        blocks = -(-self.max_tokens // block_tokens)
        slots = self.max_tokens * self.top_k
        max_sends = ranks * self.max_tokens + 2 * TASK_ROWS
        max_rows = ranks * self.max_tokens * min(self.top_k, local)
        max_tiles = max_rows // self.block_m + local
        sizes = {
            "num_local": local,
            "num_groups": groups,
            "num_columns": columns,
            "padded_k": padded_k,
            "block_tokens": block_tokens,
            "max_blocks": blocks,
            "max_sends": max_sends,
            "max_tiles": max_tiles,
        }
        flags = _offsets(
            arrived=ranks,
            home=ranks * MAX_CHUNKS,
            overflow=ranks,
            calls=2 * ranks,
            staged=ranks,
        )
        record = _offsets(header=HEADER_WORDS, counts=columns * blocks, packed=slots, weights=slots)
        plan = _offsets(
            summary=16,
            tickets=NUM_TICKETS,
            expert_rows=local,
            expert_begin=local,
            own_sends=local + groups,
            own_begin=local + groups,
            other_sends=local + groups,
            other_begin=local + groups,
            base=ranks * columns * blocks,
            tile_expert=max_tiles,
            tile_rows=max_tiles,
            tile_arrived=max_tiles,
            group_tiles=groups,
            chunk_done=MAX_CHUNKS * groups,
            chunk_sent=MAX_CHUNKS,
            home_sources=1,
            home_ranks=self.max_tokens,
            fetch_origin=max_sends,
            fetch_slot=max_sends * self.top_k,
            sum_origin=max_sends,
            sum_slot=max_sends * self.top_k,
            sum_weight=max_sends * self.top_k,
        )
        sizes |= flags | record | plan
        sizes["records"] = flags["end"]
        sizes["record_words"] = record["end"]
        sizes["mailbox_words"] = flags["end"] + 2 * ranks * record["end"]
        # Longer by the tokens, so that plans of one routing tell by their length what made them.
        sizes["plan_words"] = plan["end"] + self.max_tokens
        # By which Triton finds what it compiled: by the fields alone, as it would, it would find
        # what an earlier version compiled for other offsets.
        for name, value in (*sizes.items(), ("cache_key", f"{self} {sizes}")):
            object.__setattr__(self, name, value)


def _offsets(**words: int) -> dict[str, int]:
    """Lay sections of that many words one after another, each on a multiple of 64 bytes."""
    offsets, start = {}, 0
    for name, size in words.items():
        offsets[name] = start
        start += -(-size // 16) * 16
    return offsets | {"end": start}
