"""Offsets of the mailbox and of the plan, by hand, and that no section overlaps the next."""

import itertools

import pytest

from halley.fused.kernels.layout import HEADER_WORDS, MAX_CHUNKS, Layout


MAILBOX = ("arrived", "home", "overflow", "calls", "staged", "records")
RECORD = ("header", "counts", "packed", "weights", "record_words")
PLAN = (
    "summary", "tickets", "expert_rows", "expert_begin", "own_sends", "own_begin", "other_sends",
    "other_begin", "base", "tile_expert", "tile_rows", "tile_arrived", "group_tiles", "chunk_done",
    "chunk_sent", "home_sources", "home_ranks", "fetch_origin", "fetch_slot", "sum_origin",
    "sum_slot", "sum_weight", "plan_words",
)  # fmt: skip


def make_layout(**changes: int) -> Layout:
    sizes = {"num_ranks": 4, "num_experts": 12, "top_k": 3, "max_tokens": 70}
    return Layout(**sizes | {"block_m": 16, "block_slots": 32} | changes)


def test_sizes_by_hand() -> None:
    layout = make_layout()
    assert layout.num_local == 3
    assert layout.padded_k == 4
    assert layout.block_tokens == 8  # 32 slots of 4 a token
    assert layout.max_blocks == 9  # 70 tokens
    # This rank's own and those of the others each end in a task that may be all but empty.
    assert layout.max_sends == 4 * 70 + 2 * 64
    assert layout.max_tiles == 4 * 70 * 3 // 16 + 3
    assert (layout.arrived, layout.home) == (0, 16)
    assert layout.overflow == 16 + 4 * MAX_CHUNKS
    assert layout.calls == layout.overflow + 16
    assert layout.staged == layout.calls + 16
    assert layout.records == layout.staged + 16
    # Header; 10 columns of 9 blocks, up to whole 64 bytes; 210 slots, up to 224; the same again.
    assert (layout.num_groups, layout.num_columns) == (4, 3 + 3 + 4)
    assert (layout.header, layout.counts) == (0, HEADER_WORDS)
    assert (layout.packed, layout.weights) == (16 + 96, 16 + 96 + 224)
    assert layout.record_words == 16 + 96 + 224 + 224
    assert layout.mailbox_words == layout.records + 2 * 4 * layout.record_words


def test_a_token_has_at_most_as_many_rows_here_as_experts_are_here() -> None:
    assert make_layout(top_k=10).max_tiles == 4 * 70 * 3 // 16 + 3
    assert make_layout(top_k=2).max_tiles == 4 * 70 * 2 // 16 + 3


def test_plans_of_other_layouts_have_other_lengths() -> None:
    lengths = [make_layout(max_tokens=num_tokens).plan_words for num_tokens in range(1, 200)]
    assert len(set(lengths)) == len(lengths)


def test_a_block_holds_a_token_however_large_top_k() -> None:
    layout = make_layout(top_k=10, block_slots=8)
    assert (layout.padded_k, layout.block_tokens, layout.max_blocks) == (16, 1, 70)


@pytest.mark.parametrize("sections", [MAILBOX, RECORD, PLAN])
def test_sections_follow_each_other_on_whole_64_bytes(sections: tuple[str, ...]) -> None:
    layout = make_layout()
    offsets = [getattr(layout, name) for name in sections]
    assert all(offset % 16 == 0 for offset in offsets[:-1])
    assert offsets[-1] % 16 in (0, 70 % 16)  # a plan is longer by the tokens
    assert all(a < b for a, b in itertools.pairwise(offsets))


def test_sections_hold_what_is_written_there() -> None:
    layout = make_layout()

    def room(name: str) -> int:
        return getattr(layout, PLAN[PLAN.index(name) + 1]) - getattr(layout, name)

    assert room("other_begin") >= 3 + 4
    assert room("base") >= 4 * 10 * 9
    assert room("group_tiles") >= 4
    for name in ("tile_expert", "tile_rows", "tile_arrived"):
        assert room(name) >= layout.max_tiles
    assert room("chunk_done") >= 4 * MAX_CHUNKS
    assert room("chunk_sent") >= MAX_CHUNKS
    assert room("home_ranks") >= 70
    for kind in ("fetch", "sum"):
        assert room(f"{kind}_origin") >= layout.max_sends
        assert room(f"{kind}_slot") >= layout.max_sends * 3
    assert room("sum_weight") >= layout.max_sends * 3


def test_other_offsets_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before, same = make_layout(), make_layout()
    monkeypatch.setattr("halley.fused.kernels.layout.MAX_GROUPS", 2)
    after = make_layout()
    assert before == after
    assert (before.cache_key == same.cache_key, before.cache_key == after.cache_key) == (
        True,
        False,
    )


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no_such_section"):
        _ = make_layout().no_such_section
