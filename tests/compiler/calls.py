"""Which collectives start between what tests note themselves."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class AllToAllCalls(TorchDispatchMode):
    """Notes all-to-alls as they start, between what others note."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            self._events.append("all-to-all")
        return func(*args, **(kwargs or {}))
