"""The ranks of a process group, where None is a rank on its own."""

from typing import TypeVar

import torch.distributed as dist

from halley.distributed.peers import Collective


T = TypeVar("T")


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return rank and number of ranks in the group; None is a rank on its own.

    Raises:
        ValueError: this process is no member of the group.
    """
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"group ({group}) must be one that this process belongs to: rank {dist.get_rank()} of "
            "the default group is no member"
        )
    return rank, dist.get_world_size(group)


def gather(value: T, *, group: dist.ProcessGroup | None, what: str = "gather") -> list[T]:
    """Return the values of all ranks of the group, by rank. Values travel by pickle.

    Args:
        value: of this rank.
        group: the ranks; None for a rank on its own.
        what: name of the operation in messages.
    """
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    with Collective(what, group=group):
        dist.all_gather_object(values, value, group=group)
    return values
