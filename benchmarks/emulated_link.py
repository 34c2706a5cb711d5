"""Process groups on CPUs whose all-to-alls take the time of a slow link.

gloo moves the data. A wait for an all-to-all then sleeps until a link of the given rate would have
moved the bytes, so it uses no core. Transfers of a rank share its link one after another. All other
collectives take the time of gloo; reduce-scatters and point-to-point calls are not supported.
Functional collectives and compiled graphs use the backend like any other one.

    link = emulate_link(bytes_per_s=20e6)
    dist.init_process_group(link.backend)
    ...
    link.transfers, link.waits     # of this rank
"""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist


@dataclass(kw_only=True)
class Link:
    """The link of this rank, and its transfers and waits so far.

    A time is that of ``time.perf_counter``, in seconds. A list has pairs of start and end.
    """

    backend: str  # name for ``init_process_group`` and ``new_group``
    bytes_per_s: float
    transfers: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # for the link
    peer_waits: list[tuple[float, float]] = field(default_factory=list)  # for a slower rank
    num_bytes: int = 0

    def start(self, num_bytes: int) -> float:
        """Add a transfer behind those before it; return the time at which it ends."""
        busy_until_s = self.transfers[-1][1] if self.transfers else 0.0
        start_s = max(time.perf_counter(), busy_until_s)
        end_s = start_s + num_bytes / self.bytes_per_s
        self.transfers.append((start_s, end_s))
        self.num_bytes += num_bytes
        return end_s

    @property
    def exposed_s(self) -> float:
        """The time of all waits."""
        return sum(end_s - start_s for start_s, end_s in self.waits)

    def sleep_until(self, end_s: float) -> None:
        start_s = time.perf_counter()
        if start_s < end_s:
            time.sleep(end_s - start_s)
            self.waits.append((start_s, time.perf_counter()))

    def clear(self) -> None:
        """Forget the transfers and waits so far; no transfer may be running."""
        self.transfers.clear()
        self.waits.clear()
        self.peer_waits.clear()
        self.num_bytes = 0


def emulate_link(*, bytes_per_s: float = float("inf")) -> Link:
    """Return a new link, whose backend is registered for CPUs. Its groups share the link."""
    link = Link(backend=f"emulated{len(dist.Backend.backend_list)}", bytes_per_s=bytes_per_s)
    dist.Backend.register_backend(link.backend, partial(_EmulatedGroup, link), devices=["cpu"])
    return link


@final
class _Transfer(dist._Work):
    """An all-to-all that is done when gloo and the link are."""

    def __init__(self, work: dist.Work, link: Link, *, end_s: float) -> None:
        super().__init__()
        self._work, self._link, self._end_s = work, link, end_s

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start_s = time.perf_counter()
        self._work.wait()
        self._link.peer_waits.append((start_s, time.perf_counter()))
        self._link.sleep_until(self._end_s)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.perf_counter() >= self._end_s


@final
class _EmulatedGroup(dist.ProcessGroup):
    """gloo, with all-to-alls over an emulated link."""

    def __init__(
        self, link: Link, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._link, self._store, self._group_name = link, store, ""
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        cpu, kind = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(cpu, kind, self._gloo)
        # Torch's own methods hold the interpreter's lock while they wait for a thread of gloo. That
        # thread needs the lock to free a tensor: a deadlock. Those of gloo release it.
        for name in ("allreduce", "allgather", "_allgather_base", "barrier", "broadcast", "reduce"):
            setattr(self, name, getattr(self._gloo, name))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits, opts)
        end_s = self._link.start(self._crossing_bytes(output, input, output_splits, input_splits))
        return _Transfer(work, self._link, end_s=end_s)

    def _crossing_bytes(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> int:
        """Return the larger number of bytes that leave or reach this rank, without its own rows."""

        def of(tensor: torch.Tensor, splits: list[int]) -> int:
            own = splits[self.rank()] / max(1, sum(splits)) if splits else 1.0 / self.size()
            return round(tensor.nbytes * (1.0 - own))

        return max(of(output, output_splits), of(input, input_splits))

    # The names of these methods are torch's.
    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return self._link.backend

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name
