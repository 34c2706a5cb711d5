"""Offsets of the routing buffer and of the plan; no section overlaps the next one."""

import itertools

import pytest

from halley.fused.kernels.layout import HEADER_WORDS, MAX_CHUNKS, Layout, make_layout


ROUTING = ("published", "sums_ready", "overflow_rows", "call_in_use", "rows_ready", "records")
RECORD = ("header", "counts", "packed", "weights", "record_words")
PLAN = (
    "summary", "tickets", "expert_rows", "expert_begin", "own_copies", "own_begin", "other_copies",
    "other_begin", "block_base", "tile_expert", "tile_rows", "tile_arrived", "group_tiles",
    "chunk_done", "chunk_sent", "contributors", "token_contributors", "fetch_origin", "fetch_rows",
    "combine_origin", "combine_rows", "combine_weight", "plan_words",
)  # fmt: skip


def _layout(**changes: int) -> Layout:
    sizes = {"num_ranks": 4, "num_experts": 12, "top_k": 3, "max_tokens": 70}
    return make_layout(**sizes | {"block_m": 16, "block_slots": 32} | changes)


def test_sizes_by_hand() -> None:
    layout = _layout()
    assert layout.num_local == 3
    assert layout.padded_k == 4
    assert layout.block_tokens == 8  # 32 slots of 4 a token
    assert layout.max_blocks == 9  # 70 tokens
    # Own copies and copies of other ranks are each padded to a whole task of 64.
    assert layout.max_copies == 4 * 70 + 2 * 64
    assert layout.max_tiles == 4 * 70 * 3 // 16 + 3
    assert (layout.published, layout.sums_ready) == (0, 16)
    assert layout.overflow_rows == 16 + 4 * MAX_CHUNKS
    assert layout.call_in_use == layout.overflow_rows + 16
    assert layout.rows_ready == layout.call_in_use + 16
    assert layout.records == layout.rows_ready + 16
    # Header; 10 columns of 9 blocks, up to whole 64 bytes; 210 slots, up to 224; the same again.
    assert (layout.num_groups, layout.num_columns) == (4, 3 + 3 + 4)
    assert (layout.header, layout.counts) == (0, HEADER_WORDS)
    assert (layout.packed, layout.weights) == (16 + 96, 16 + 96 + 224)
    assert layout.record_words == 16 + 96 + 224 + 224
    assert layout.routing_words == layout.records + 2 * 4 * layout.record_words


def test_a_token_has_at_most_as_many_rows_here_as_experts_are_here() -> None:
    assert _layout(top_k=10).max_tiles == 4 * 70 * 3 // 16 + 3
    assert _layout(top_k=2).max_tiles == 4 * 70 * 2 // 16 + 3


def test_a_block_holds_a_token_however_large_top_k() -> None:
    layout = _layout(top_k=10, block_slots=8)
    assert (layout.padded_k, layout.block_tokens, layout.max_blocks) == (16, 1, 70)


@pytest.mark.parametrize("sections", [ROUTING, RECORD, PLAN])
def test_sections_begin_on_multiples_of_64_bytes_in_order(sections: tuple[str, ...]) -> None:
    layout = _layout()
    offsets = [getattr(layout, name) for name in sections]
    assert all(offset % 16 == 0 for offset in offsets)
    assert all(a < b for a, b in itertools.pairwise(offsets))


def test_sections_are_large_enough() -> None:
    layout = _layout()

    def capacity(name: str) -> int:
        return getattr(layout, PLAN[PLAN.index(name) + 1]) - getattr(layout, name)

    assert capacity("other_begin") >= 3 + 4
    assert capacity("block_base") >= 4 * 10 * 9
    assert capacity("group_tiles") >= 4
    for name in ("tile_expert", "tile_rows", "tile_arrived"):
        assert capacity(name) >= layout.max_tiles
    assert capacity("chunk_done") >= 4 * MAX_CHUNKS
    assert capacity("chunk_sent") >= MAX_CHUNKS
    assert capacity("token_contributors") >= 70
    for kind in ("fetch", "combine"):
        assert capacity(f"{kind}_origin") >= layout.max_copies
        assert capacity(f"{kind}_rows") >= layout.max_copies * 3
    assert capacity("combine_weight") >= layout.max_copies * 3


def test_triton_compiles_again_when_offsets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds a compiled kernel by the text of its constants."""
    before, same = _layout(), _layout()
    monkeypatch.setattr("halley.fused.kernels.layout.MAX_GROUPS", 2)
    after = _layout()
    assert before == same
    assert (str(before) == str(same), str(before) == str(after)) == (True, False)
