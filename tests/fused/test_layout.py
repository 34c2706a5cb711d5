"""Sizes and offsets of the routing buffer and of the plan."""

import pytest

from halley.fused.kernels.layout import HEADER_WORDS, MAX_CHUNKS, Layout, make_layout


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


def test_triton_compiles_again_when_offsets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds a compiled kernel by the text of its constants."""
    before, same = _layout(), _layout()
    monkeypatch.setattr("halley.fused.kernels.layout.MAX_GROUPS", 2)
    after = _layout()
    assert before == same
    assert (str(before) == str(same), str(before) == str(after)) == (True, False)
