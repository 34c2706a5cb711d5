"""Describe the operation that each rank is in, as watchdogs exchange it."""

import json
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

import torch

from halley.core.position import POSITION
from halley.distributed.peers import name_ranks


_COLLECTIVES = "torch.distributed.distributed_c10d"  # the module whose functions block in gloo


@dataclass(frozen=True, kw_only=True)
class Place:
    """The operation that a rank is in.

    Attributes:
        step: training step, 0 if nobody counts them.
        num_operations: as of ``core.position``.
        name: of the operation; "" before the first.
        is_waiting: whether the rank waits there for others, and computes nothing.
        is_busy: whether its GPU has work that does not end, as far as is known.
    """

    step: int
    num_operations: int
    name: str
    is_waiting: bool
    is_busy: bool = False

    def to_json(self) -> str:
        """Return the text by which a rank tells its place."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the place of a text that ``to_json`` made."""
        return cls(**json.loads(text))

    def describe(self, *, num_ranks: int) -> str:
        """Return the place in words, as the predicate of that many ranks."""
        if self.is_waiting:
            verb = "waits in" if num_ranks == 1 else "wait in"
        else:
            verb = "is in or behind" if num_ranks == 1 else "are in or behind"
        step = f"step {self.step}, " if self.step else ""
        return f"{verb} {self.name or 'no operation'} ({step}operation {self.num_operations})"


def find_place(step: int, *, busy_device: int | None = None) -> Place:
    """Return the place of this process.

    A call of ``torch.distributed`` in which the main thread is right now counts as an operation in
    which it waits: with gloo such a call blocks.

    Args:
        step: training step, 0 if nobody counts them.
        busy_device: index of the GPU to ask whether it has work; None asks none.
    """
    name, is_waiting = POSITION.name, POSITION.is_waiting
    if not is_waiting:
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        if frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES:
            name, is_waiting = f"{frame.f_code.co_name} of torch.distributed", True
    return Place(
        step=step,
        num_operations=POSITION.num_operations,
        name=name,
        is_waiting=is_waiting,
        is_busy=busy_device is not None and not torch.cuda.default_stream(busy_device).query(),
    )


def differ(places: Iterable[Place]) -> bool:
    """Return whether ranks are in different operations; whether they wait there does not matter."""
    return len({(place.step, place.num_operations, place.name) for place in places}) > 1


def describe_places(places: Mapping[int, Place]) -> str:
    """Return where ranks are, those of one place together."""
    ranks_of: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_of.setdefault(place, []).append(rank)
    return ", ".join(
        f"{name_ranks(ranks)} {place.describe(num_ranks=len(ranks))}"
        for place, ranks in ranks_of.items()
    )
