"""Describe which experts each rank holds, and choose the replica to which each slot is sent.

A replica is the copy of an expert on one of several ranks. Strategies treat replicas as experts.
Replicas are numbered rank by rank, and each rank holds the same number of them. In this file, C is
the number of replicas that a rank may choose from.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from halley.core.types import DROPPED, MAX_EXPERTS, local_experts
from halley.core.validation import (
    MAX_FLOAT,
    Record,
    Table,
    build_record,
    check_fields,
    check_type,
    read_json,
    show,
)


_VERSION = 1  # format version of the files of counts and of placements
_MAX_BYTES = 16 * 2**20  # largest file; 61 layers of 32,767 replicas take 13 MB


@dataclass(frozen=True, kw_only=True)
class _CountsFile:
    version: int
    first_step: int
    last_step: int
    counts: object


def write_counts(
    path: Path, counts_ME: Sequence[Sequence[int]], *, first_step: int, last_step: int
) -> None:
    """Write to JSON how often tokens chose each expert of each MoE layer, in a range of steps."""
    steps = {"first_step": first_step, "last_step": last_step}
    table = {"version": _VERSION, **steps, "counts": [list(counts_E) for counts_E in counts_ME]}
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(table) + "\n", encoding="ascii")
    draft.replace(path)  # atomic: a process that is killed leaves no incomplete file at ``path``


def read_counts(path: Path) -> list[list[float]]:
    """Read from JSON how often tokens chose each expert of each layer; return M lists of E counts.

    ``write_counts`` wrote the file, or it is a JSON list of numbers (one layer) or of lists of
    numbers (one list per layer). A negative count, layers with different numbers of experts, and a
    layer whose counts are all 0 are a ``ValueError``.
    """
    where = f"counts ({path})"
    found = read_json(path, what="counts", max_bytes=_MAX_BYTES)
    if isinstance(found, dict):
        found = _build(_CountsFile, cast(object, found), where=where, command="train").counts
    layers = cast(list[object], found) if isinstance(found, list) else []
    if not any(isinstance(layer, list) for layer in layers):
        layers = [layers]
    if [] in layers or not all(isinstance(layer, list) for layer in layers):
        raise ValueError(f"{where} must be numbers of each expert, or lists of them")
    counts_ME = cast(list[list[float]], layers)
    for value in chain(*counts_ME):
        if type(value) not in (int, float) or not 0 <= value <= MAX_FLOAT:
            raise ValueError(f"{where} must be numbers of at least 0, and {show(value)} is none")
    num_experts = len(counts_ME[0])
    for index, counts_E in enumerate(counts_ME):
        what = f"{where} of layer {index} must"
        if len(counts_E) != num_experts:
            rule = f"have {num_experts} experts, as layer 0, and have {len(counts_E)}"
            raise ValueError(f"{what} {rule}")
        if not sum(counts_E):
            raise ValueError(f"{what} not all be 0")
    return counts_ME


@dataclass(frozen=True, kw_only=True)
class _PlacementFile:
    version: int
    num_experts: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]  # expert ids by layer, then by rank


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """The experts of one MoE layer that each rank of an expert-parallel group holds.

    ``experts_WL`` are the expert ids of each rank, ascending. All ranks hold equally many experts,
    and each expert is on a rank. Replica ``w * L + l`` is a copy of expert ``experts_WL[w][l]``.
    """

    num_experts: int
    experts_WL: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self)
        _check_num_experts(self.num_experts)
        if not self.experts_WL or not self.experts_WL[0]:
            raise ValueError("placement (empty) must have at least one rank and one expert on it")
        num_local = len(self.experts_WL[0])
        for rank, experts in enumerate(self.experts_WL):
            what = f"placement of rank {rank} ({show(list(experts))})"
            if len(experts) != num_local:
                raise ValueError(f"{what} must have {num_local} experts, as that of rank 0")
            if list(experts) != sorted(set(experts)):
                raise ValueError(f"{what} must be ascending, no expert twice")
            if experts[0] < 0 or experts[-1] >= self.num_experts:
                raise ValueError(f"{what} must have experts below num_experts ({self.num_experts})")
        if self.num_ranks * num_local > MAX_EXPERTS:
            what = f"placement ({self.num_ranks} ranks of {num_local} experts)"
            rule = f"have at most {MAX_EXPERTS} experts on all ranks together"
            raise ValueError(f"{what} must {rule}")
        held = {expert for experts in self.experts_WL for expert in experts}
        if missing := set(range(self.num_experts)) - held:
            raise ValueError(f"placement must hold every expert: {min(missing)} is on no rank")

    @staticmethod
    def plain(num_experts: int, *, num_ranks: int) -> "ExpertPlacement":
        """Return the placement without replicas: rank w holds the w-th range of expert ids."""
        _check_num_experts(num_experts)
        check_type(num_ranks, int, name="num_ranks")
        num_local = local_experts(num_experts, ep_size=num_ranks)
        starts = range(0, num_experts, num_local)
        experts_WL = tuple(tuple(range(start, start + num_local)) for start in starts)
        return ExpertPlacement(num_experts=num_experts, experts_WL=experts_WL)

    @property
    def num_ranks(self) -> int:
        return len(self.experts_WL)

    @property
    def num_local(self) -> int:
        return len(self.experts_WL[0])

    def ranks_of(self, expert: int) -> list[int]:
        """Return the ranks that hold an expert, ascending."""
        return [rank for rank, experts in enumerate(self.experts_WL) if expert in experts]

    @property
    def replicated(self) -> list[int]:
        """Ids of the experts that more than one rank holds, ascending."""
        return [e for e in range(self.num_experts) if len(self.ranks_of(e)) > 1]


def replica_choices(placement: ExpertPlacement, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each expert, the replica ids to which ``rank`` may send slots, and their number.

    A rank that holds an expert uses only its own replica, so that no row crosses the link. The
    first result is ``(E + 1, C)`` int64, with a last row for ``DROPPED``. The second result,
    ``(E + 1,)`` int64, is the number of valid columns of each row.
    """
    choices: list[list[int]] = []
    experts_WL, num_local = placement.experts_WL, placement.num_local
    for expert in range(placement.num_experts):
        ranks = placement.ranks_of(expert)
        held = [rank] if rank in ranks else ranks
        choices.append([each * num_local + experts_WL[each].index(expert) for each in held])
    choices.append([DROPPED])
    width = max(map(len, choices))  # shorter rows are padded: a tensor has rows of one length
    padded = [[*row, *row[:1] * (width - len(row))] for row in choices]
    return torch.tensor(padded), torch.tensor([len(row) for row in choices])


def choose_replicas(
    topk_idx_TK: torch.Tensor, choices_EC: torch.Tensor, num_choices_E: torch.Tensor, *, rank: int
) -> torch.Tensor:
    """Return the id of the replica to which each slot is sent, or ``DROPPED``, ``(T, K)`` int64.

    Tokens use the replicas of an expert round-robin by token index, from a start that depends on
    ``rank``. ``choices_EC`` and ``num_choices_E`` are the results of ``replica_choices`` for this
    rank. The host reads nothing from the device.
    """
    start_T1 = torch.arange(rank, rank + topk_idx_TK.shape[0], device=topk_idx_TK.device)[:, None]
    # DROPPED is -1, so as an index it selects the last row, whose only choice is DROPPED.
    return choices_EC[topk_idx_TK, start_T1 % num_choices_E[topk_idx_TK]]


def save_placements(path: Path, placements: Sequence[ExpertPlacement]) -> None:
    """Write the placements of a model's MoE layers, in order of layer, to a JSON file."""
    layers = [placement.experts_WL for placement in placements]
    num_experts = placements[0].num_experts
    table = {"version": _VERSION, "num_experts": num_experts, "layers": layers}
    try:
        path.write_text(json.dumps(table) + "\n", encoding="ascii")
    except OSError as error:
        raise ValueError(f"placement ({path}) must be a file to write: {error.strerror}") from error


def load_placements(
    path: Path, *, num_experts: int, num_ranks: int, num_layers: int
) -> list[ExpertPlacement]:
    """Return one placement per MoE layer of a model, from a file that ``save_placements`` wrote.

    If the file has one layer, it is used for all ``num_layers`` MoE layers. A file that is damaged,
    of another version, or does not match the sizes is a ``ValueError``.
    """
    where = f"placement ({path})"
    value = read_json(path, what="placement", max_bytes=_MAX_BYTES)
    record = _build(_PlacementFile, value, where=where, command="plan balance")
    if record.num_experts != num_experts:
        rule = f"be for num_experts {num_experts} and is for {record.num_experts}"
        raise ValueError(f"{where} must {rule}")
    if len(record.layers) not in (1, num_layers):
        rule = f"have {num_layers} layers, the model's MoE layers, or one for all of them"
        raise ValueError(f"{where} must {rule}, and has {len(record.layers)}")
    placements: list[ExpertPlacement] = []
    for index, experts_WL in enumerate(record.layers):
        try:
            placement = ExpertPlacement(num_experts=num_experts, experts_WL=experts_WL)
        except ValueError as error:
            raise ValueError(f"{where} must be right in layer {index}: {error}") from None
        if placement.num_ranks != num_ranks:
            rule = f"be for ep_size {num_ranks} and is for {placement.num_ranks} ranks"
            raise ValueError(f"{where} must {rule}")
        placements.append(placement)
    return placements * num_layers if len(placements) == 1 else placements


def _build(cls: type[Record], value: object, *, where: str, command: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table with a version")
    version = cast(Table, value).get("version")
    if type(version) is not int or version != _VERSION:
        raise ValueError(f"{where} must be of version {_VERSION} and is of {show(version)}")
    rule = f"{where} must be as halley {command} writes it:"
    return build_record(cls, cast(object, value), where=rule)


def _check_num_experts(num_experts: int) -> None:
    check_type(num_experts, int, name="num_experts")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts ({num_experts}) must be between 1 and {MAX_EXPERTS}")
