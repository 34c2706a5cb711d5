"""Compare the graphs of all ranks, and share the plan of rank 0, before any rank runs a collective.

Ranks exchange short texts through the key-value store of their process group. A collective would
hang if a rank never came. The store has a time limit, so an error can name the missing rank. Rank 0
of the group reads all texts and writes one verdict: traffic is linear in the number of ranks.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast, final

from torch._C._distributed_c10d import (
    Store,
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

from halley.compiler.graph_collectives import Signature


# Other ranks wait longer than rank 0, so that they read its verdict, which names the missing ranks.
_VERDICT_MARGIN_S = 10.0
_POLL_S = 0.05
_T = TypeVar("_T")


@final
class Consensus:
    """Lets the ranks of one process group compare and share values while they compile one graph.

    Args:
        store: of the group.
        group_name: name of the group in functional collectives.
        rank: in the group.
        num_ranks: of the group.
        timeout_s: time that rank 0 waits for the other ranks, in seconds.
    """

    def __init__(
        self, store: Store, *, group_name: str, rank: int, num_ranks: int, timeout_s: float
    ) -> None:
        self.group_name = group_name
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._timeout_s = timeout_s
        # Each rank counts its own graphs. Ranks compile their graphs in the same order, so graphs
        # of one number belong together.
        self._number = store.add(f"halley/graphs/{rank}", 1)

    def compare(self, signature: Signature) -> tuple[int, ...]:
        """Compare the ranks' graphs; return the ranks whose structure differs from rank 0's.

        All ranks get the same result.

        Raises:
            RuntimeError: the collectives of a rank differ, on all ranks; or a rank is missing.
        """
        text = json.dumps([signature.collectives, signature.structure])
        self._store.set(self._key(f"graph/{self.rank}"), text)
        if self.rank == 0:
            keys = [self._key(f"graph/{rank}") for rank in range(self.num_ranks)]
            others: list[int] = []
            if missing := self._find_missing(keys, self._timeout_s):
                error = (
                    f"ranks {missing} compiled no graph with collectives in {self._timeout_s:g} s: "
                    "all ranks must compile the same graphs, recompilations included"
                )
            else:
                graphs = [json.loads(self._store.get(key)) for key in keys]
                error = _difference([tuple(graph[0]) for graph in graphs])
                others = [rank for rank, graph in enumerate(graphs) if graph[1] != graphs[0][1]]
            self._store.set(self._key("verdict"), json.dumps({"error": error, "others": others}))
        verdict = self._read("verdict")
        if verdict["error"]:
            raise RuntimeError(f"graph {self._number}: {verdict['error']}")
        return tuple(cast(list[int], verdict["others"]))

    def share(self, what: str, make: Callable[[], _T]) -> _T:
        """Call ``make`` on rank 0, and return its result on all ranks.

        Args:
            what: name of the result; each name is used once for a graph.
            make: called on rank 0 only; its result is sent as JSON.

        Raises:
            RuntimeError: ``make`` failed on rank 0; raised on all ranks.
        """
        if self.rank == 0:
            try:
                self._store.set(self._key(what), json.dumps({"made": make()}))
            except Exception as error:
                self._store.set(self._key(what), json.dumps({"error": repr(error)}))
                raise RuntimeError(self._failure(what, repr(error))) from error
        found = self._read(what)
        if "error" in found:
            raise RuntimeError(self._failure(what, found["error"]))
        return cast(_T, found["made"])

    def all_gather(self, what: str, value: int) -> list[int]:
        """Return the value of each rank, in the order of ranks, on all ranks.

        Args:
            what: name of the value; each name is used once for a graph.
            value: of this rank.

        Raises:
            RuntimeError: a rank sent no value in time.
        """
        keys = [self._key(f"{what}/{rank}") for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], str(int(value)))
        if missing := self._find_missing(keys, self._timeout_s + _VERDICT_MARGIN_S):
            raise RuntimeError(
                f"graph {self._number}: ranks {missing} sent no {what} in {self._timeout_s:g} s"
            )
        return [int(self._store.get(key)) for key in keys]

    def _find_missing(self, keys: list[str], timeout_s: float) -> list[int]:
        """Wait for the keys of all ranks; return the ranks whose keys are still missing."""
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return []
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self._has(key)]

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

    def _failure(self, what: str, error: object) -> str:
        return f"graph {self._number}: rank 0 made no {what}: {error}"

    def _key(self, what: str) -> str:
        return f"halley/graph/{self._number}/{what}"


def open_consensus(group_name: str, *, timeout_s: float) -> Consensus:
    """Return a ``Consensus`` over the store of a process group; arguments as for ``Consensus``."""
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]
    return Consensus(
        group.get_group_store(),
        group_name=group_name,
        rank=group.rank(),
        num_ranks=group.size(),
        timeout_s=timeout_s,
    )


def _difference(collectives: Sequence[tuple[str, ...]]) -> str:
    """Return a text: the ranks whose collectives differ from rank 0's, and the first difference.

    "" if all are equal.
    """
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
