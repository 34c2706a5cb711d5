"""Expert placements, the choice of replicas, and files of placements and of expert counts."""

from pathlib import Path

import pytest
import torch

from halley.core.placement import (
    ExpertPlacement,
    choose_replicas,
    load_placements,
    read_counts,
    replica_choices,
    save_placements,
    write_counts,
)
from halley.core.routing import count_tokens_per_expert
from halley.core.types import DROPPED


# Expert 0 on ranks 0, 1 and 3, expert 2 on ranks 1 and 2.
PLACEMENT = ExpertPlacement(num_experts=5, experts_WL=((0, 1), (0, 2), (2, 4), (0, 3)))


def test_ranks_and_numbers_of_replicas() -> None:
    assert (PLACEMENT.num_ranks, PLACEMENT.num_local) == (4, 2)
    assert [PLACEMENT.ranks_of(e) for e in range(5)] == [[0, 1, 3], [0], [1, 2], [3], [2]]
    assert PLACEMENT.replicated == [0, 2]
    plain = ExpertPlacement.plain(6, num_ranks=3)
    assert plain.experts_WL == ((0, 1), (2, 3), (4, 5))
    assert plain.replicated == []


def _choose(idx: list[list[int]], *, rank: int) -> list[list[int]]:
    idx_TK = torch.tensor(idx, dtype=torch.int64).view(len(idx), len(idx[0]) if idx else 2)
    return choose_replicas(idx_TK, *replica_choices(PLACEMENT, rank=rank), rank=rank).tolist()


def test_local_replica_is_preferred_else_round_robin() -> None:
    # Rank 2 does not hold expert 0, whose replicas are 0, 2 and 6. Token 0 uses the third.
    idx = [[0, 2], [0, 4], [3, 0], [0, DROPPED], [1, 2]]
    assert _choose(idx, rank=2) == [[6, 4], [0, 5], [7, 2], [6, DROPPED], [1, 4]]
    # Rank 3 holds expert 0. Expert 2 has replicas 3 and 4; token 0 uses the second.
    assert _choose([[0, 2], [2, 0], [2, 3]], rank=3) == [[6, 4], [3, 6], [4, 7]]
    assert _choose([], rank=1) == []


def test_equal_sources_load_replicas_equally() -> None:
    """Each of 4 ranks has 12 tokens for expert 0; ranks with a replica keep theirs."""
    counts = sum(
        count_tokens_per_expert(torch.tensor(_choose([[0]] * 12, rank=rank)), 8)
        for rank in range(4)
    )
    assert isinstance(counts, torch.Tensor)
    assert counts.tolist() == [16, 0, 16, 0, 0, 0, 16, 0]


def test_file_has_one_placement_per_layer_or_one_for_all(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    other = ExpertPlacement(num_experts=5, experts_WL=((0, 1, 2), (0, 2, 3), (1, 2, 4), (0, 1, 3)))
    save_placements(path, [PLACEMENT, other])
    sizes = {"num_experts": 5, "num_ranks": 4}
    assert load_placements(path, num_layers=2, **sizes) == [PLACEMENT, other]
    save_placements(path, [PLACEMENT])
    assert load_placements(path, num_layers=3, **sizes) == [PLACEMENT] * 3
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"json\) must be a table with a version$"):
        load_placements(path, num_layers=1, **sizes)
    with pytest.raises(ValueError, match=r"must be a file to write: No such file"):
        save_placements(tmp_path / "none" / "placement.json", [PLACEMENT])


def test_written_counts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    write_counts(path, [[3, 0, 1], [2, 2, 0]], first_step=1, last_step=7)
    assert read_counts(path) == [[3, 0, 1], [2, 2, 0]]
    assert list(tmp_path.iterdir()) == [path]  # no temporary file is left
    path.write_text("[3, 0.5]")
    assert read_counts(path) == [[3, 0.5]]
    path.write_text("[]")
    with pytest.raises(ValueError, match="must be numbers of each expert, or lists of them"):
        read_counts(path)
