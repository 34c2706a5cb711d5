"""Placements by hand: what they hold, which replica a token takes, and files."""

import json
from pathlib import Path

import pytest
import torch

from halley.core.placement import (
    ExpertPlacement,
    choose_replicas,
    load_placements,
    replica_choices,
    save_placements,
)
from halley.core.routing import count_tokens_per_expert
from halley.core.types import DROPPED


# Expert 0 on ranks 0, 1 and 3, expert 2 on ranks 1 and 2.
PLACEMENT = ExpertPlacement(num_experts=5, experts_WL=((0, 1), (0, 2), (2, 4), (0, 3)))


def test_a_placement_knows_its_replicas() -> None:
    assert (PLACEMENT.num_ranks, PLACEMENT.num_local) == (4, 2)
    assert [PLACEMENT.ranks_of(e) for e in range(5)] == [[0, 1, 3], [0], [1, 2], [3], [2]]
    assert PLACEMENT.replicated == [0, 2]
    assert [PLACEMENT.replica_on(r, 0) for r in (0, 1, 3)] == [0, 2, 6]


def test_plain_placements_are_ranges() -> None:
    plain = ExpertPlacement.plain(6, num_ranks=3)
    assert plain.experts_WL == ((0, 1), (2, 3), (4, 5))
    assert plain.replicated == []
    with pytest.raises(ValueError, match=r"num_experts \(6\) must be divisible by ep_size \(4\)"):
        ExpertPlacement.plain(6, num_ranks=4)


@pytest.mark.parametrize(
    ("experts_WL", "message"),
    [
        ((), r"placement \(empty\) must have at least one rank"),
        (((), ()), r"placement \(empty\) must have at least one rank"),
        (((0, 1), (2,)), r"of rank 1 \(\[2\]\) must have 2 experts, as that of rank 0"),
        (((0, 1), (2, 2)), r"of rank 1 \(\[2, 2\]\) must be ascending, no expert twice"),
        (((1, 0), (1, 2)), r"of rank 0 \(\[1, 0\]\) must be ascending"),
        (((0, 1), (1, 3)), r"of rank 1 \(\[1, 3\]\) must have experts below num_experts \(3\)"),
        (((-1, 0), (1, 2)), r"of rank 0 \(\[-1, 0\]\) must have experts below num_experts"),
        (((0, 1), (0, 1)), r"must hold every expert: 2 is on no rank"),
    ],
)
def test_wrong_placements_are_named(experts_WL: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(num_experts=3, experts_WL=experts_WL)


def _choose(idx: list[list[int]], *, rank: int) -> list[list[int]]:
    idx_TK = torch.tensor(idx, dtype=torch.int64).view(len(idx), len(idx[0]) if idx else 2)
    return choose_replicas(idx_TK, *replica_choices(PLACEMENT, rank=rank), rank=rank).tolist()


def test_tokens_take_the_replica_of_their_rank_or_take_turns() -> None:
    # Rank 2 lacks expert 0: its replicas are 0, 2 and 6, begun with the third on rank 2.
    idx = [[0, 2], [0, 4], [3, 0], [0, DROPPED], [1, 2]]
    assert _choose(idx, rank=2) == [[6, 4], [0, 5], [7, 2], [6, DROPPED], [1, 4]]
    # Rank 3 holds expert 0; expert 2 has replicas 3 and 4, and token 0 begins with the second.
    assert _choose([[0, 2], [2, 0], [2, 3]], rank=3) == [[6, 4], [3, 6], [4, 7]]


def test_no_tokens_go_nowhere() -> None:
    assert _choose([], rank=1) == []


def test_equal_sources_load_replicas_equally() -> None:
    """Each of 4 ranks sends 12 tokens to expert 0, those of ranks with a replica stay."""
    counts = sum(
        count_tokens_per_expert(torch.tensor(_choose([[0]] * 12, rank=rank)), 8)
        for rank in range(4)
    )
    assert isinstance(counts, torch.Tensor)
    assert counts.tolist() == [16, 0, 16, 0, 0, 0, 16, 0]


def test_files_hold_a_placement_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    other = ExpertPlacement(num_experts=5, experts_WL=((0, 1, 2), (0, 2, 3), (1, 2, 4), (0, 1, 3)))
    save_placements(path, [PLACEMENT, other])
    sizes = {"num_experts": 5, "num_ranks": 4}
    assert load_placements(path, num_layers=2, **sizes) == [PLACEMENT, other]
    save_placements(path, [PLACEMENT])
    assert load_placements(path, num_layers=3, **sizes) == [PLACEMENT] * 3


WHOLE = {"version": 1, "num_experts": 5, "layers": [PLACEMENT.experts_WL] * 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "must be JSON: "),
        ("[]", "must be a table with a version"),
        (json.dumps(WHOLE | {"version": 2}), "must be of version 1 and is of 2"),
        (json.dumps(WHOLE | {"num_experts": 6}), "must be for num_experts 5 and is for 6"),
        (json.dumps(WHOLE | {"layers": [[0, 1]]}), "layers[0][0] (0) must be a list"),
        (json.dumps(WHOLE | {"layers": [[[0, 1.5]]]}), "layers[0][0][1] (1.5) must be of type int"),
        (
            json.dumps(WHOLE | {"layers": [[[0, 1], [2, 3]]]}),
            "must be right in layer 0: placement must hold every expert: 4 is on no rank",
        ),
        (json.dumps(WHOLE | {"layers": [[[0, 1, 2, 3, 4]]]}), "must be for ep_size 4 and is for 1"),
        (json.dumps(WHOLE | {"layers": []}), "must have 3 layers, the model's MoE layers, or one"),
        (json.dumps(WHOLE), "for all of them, and has 2"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "placement.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"placement \(.*placement\.json\) must") as caught:
        load_placements(path, num_experts=5, num_ranks=4, num_layers=3)
    assert message in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json\) must be a readable file: No such file"):
        load_placements(tmp_path / "none.json", num_experts=5, num_ranks=4, num_layers=1)
    with pytest.raises(ValueError, match=r"must be a file to write: No such file"):
        save_placements(tmp_path / "none" / "placement.json", [PLACEMENT])
