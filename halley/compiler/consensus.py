"""Ranks compare their graphs and share one plan, before any of them runs a collective.

Ranks talk through the store of their group, not by a collective: a rank that never comes is then an
error within a bounded time, which names it, and nothing waits on a device. Rank 0 of the group
reads what all have said and writes a verdict, so traffic is linear in the number of ranks.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, cast, final

from torch._C._distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

from halley.compiler.graph_collectives import Signature


_VERDICT_MARGIN_S = 10.0  # that others wait longer than rank 0, which names who is missing
_POLL_S = 0.05
_T = TypeVar("_T")


class Store(Protocol):
    """The part of a store of torch that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@final
class Consensus:
    """The ranks of one group, over one graph.

    Args:
        store: of the group.
        group_name: as functional collectives name it.
        rank: in the group.
        num_ranks: of the group.
        timeout_s: how long rank 0 waits for the others.
    """

    def __init__(
        self, store: Store, *, group_name: str, rank: int, num_ranks: int, timeout_s: float
    ) -> None:
        self.group_name = group_name
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._timeout_s = timeout_s
        # Counted by each rank on its own: ranks compile their graphs in the same order.
        self._number = store.add(f"halley/graphs/{rank}", 1)

    def compare(self, signature: Signature) -> tuple[int, ...]:
        """Return the ranks whose graphs have another structure than rank 0's; none if all agree.

        Raises:
            RuntimeError: on all ranks, that some have other collectives; or a rank did not come.
        """
        text = json.dumps([signature.collectives, signature.structure])
        self._store.set(self._key(f"graph/{self.rank}"), text)
        if self.rank == 0:
            keys = [self._key(f"graph/{rank}") for rank in range(self.num_ranks)]
            self._wait_for_all(keys)
            graphs = [json.loads(self._store.get(key)) for key in keys]
            collectives = [tuple(graph[0]) for graph in graphs]
            others = [rank for rank, graph in enumerate(graphs) if graph[1] != graphs[0][1]]
            verdict = {"error": _difference(collectives), "others": others}
            self._store.set(self._key("verdict"), json.dumps(verdict))
        verdict = self._read("verdict")
        if verdict["error"]:
            raise RuntimeError(f"graph {self._number} differs: {verdict['error']}")
        return tuple(cast(list[int], verdict["others"]))

    def share(self, what: str, make: Callable[[], _T]) -> _T:
        """Return what rank 0 makes, on all ranks.

        Args:
            what: its name; each is shared once for a graph.
            make: called on rank 0 alone; the result travels as JSON.

        Raises:
            RuntimeError: rank 0 failed to make it.
        """
        if self.rank == 0:
            try:
                self._store.set(self._key(what), json.dumps({"made": make()}))
            except Exception as error:
                self._store.set(self._key(what), json.dumps({"error": repr(error)}))
                raise RuntimeError(self._made_no(what, repr(error))) from error
        found = self._read(what)
        if "error" in found:
            raise RuntimeError(self._made_no(what, found["error"]))
        return cast(_T, found["made"])

    def tell(self, what: str, value: int) -> list[int]:
        """Return what each rank tells of itself, in the order of ranks, on all ranks.

        Args:
            what: its name; each is told once for a graph.
            value: of this rank.

        Raises:
            RuntimeError: a rank told nothing in time.
        """
        keys = [self._key(f"{what}/{rank}") for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], str(int(value)))
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s + _VERDICT_MARGIN_S))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            raise RuntimeError(
                f"graph {self._number}: ranks {missing} told no {what} in {self._timeout_s:g} s"
            ) from None
        return [int(self._store.get(key)) for key in keys]

    def _wait_for_all(self, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            error = (
                f"ranks {missing} compiled no graph with collectives in {self._timeout_s:g} s: all "
                "ranks must compile the same graphs, recompilations included"
            )
            self._store.set(self._key("verdict"), json.dumps({"error": error, "others": []}))
            raise RuntimeError(f"graph {self._number}: {error}") from None

    def _has(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=_POLL_S))
        except RuntimeError:
            return False
        return True

    def _read(self, what: str) -> dict[str, object]:
        key = self._key(what)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s + _VERDICT_MARGIN_S))
        except RuntimeError:
            raise RuntimeError(
                f"graph {self._number}: rank 0 gave no {what} in {self._timeout_s:g} s"
            ) from None
        return cast(dict[str, object], json.loads(self._store.get(key)))

    def _made_no(self, what: str, error: object) -> str:
        return f"graph {self._number}: rank 0 made no {what}: {error}"

    def _key(self, what: str) -> str:
        return f"halley/graph/{self._number}/{what}"


def open_consensus(group_name: str, *, timeout_s: float) -> Consensus:
    """Return the council of a process group.

    Args:
        group_name: as functional collectives name it.
        timeout_s: how long rank 0 waits for the others.
    """
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]
    return Consensus(
        group.get_group_store(),
        group_name=group_name,
        rank=group.rank(),
        num_ranks=group.size(),
        timeout_s=timeout_s,
    )


def _difference(collectives: Sequence[tuple[str, ...]]) -> str:
    """Return who has other collectives than rank 0, and where they first differ; "" if nobody."""
    first = collectives[0]
    others = [rank for rank, lines in enumerate(collectives) if lines != first]
    if not others:
        return ""
    theirs = collectives[others[0]]
    at = next(
        (at for at, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b),
        min(len(first), len(theirs)),
    )
    ours_line, their_line = (
        lines[at] if at < len(lines) else "nothing" for lines in (first, theirs)
    )
    return (
        f"ranks {others} have other collectives than rank 0; collective {at} is "
        f"{ours_line} on rank 0, {their_line} on rank {others[0]}"
    )
