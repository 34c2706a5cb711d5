"""The ranks of a process group, where None is a rank on its own."""

from typing import TypeVar

import torch.distributed as dist


T = TypeVar("T")


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return rank and number of ranks in the group; None is a rank on its own."""
    if group is None:
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: T, *, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of the group, by rank. Values travel by pickle."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
