"""Compare a graph across the ranks of its process groups; give all ranks the plan of rank 0.

Ranks exchange short texts through the key-value store of their process group. A collective would
hang if a rank did not call it. The store has a time limit, so an error can name the missing rank.
Rank 0 reads all texts and writes one verdict: traffic is linear in the number of ranks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast, final

from torch import fx
from torch._C._distributed_c10d import (
    Store,
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

from halley.compiler.graph_collectives import (
    Signature,
    first_difference,
    graph_groups,
    operator_name,
    signature,
)


# To compare graphs, rank 0 waits ``timeout_s`` for the other ranks. The other ranks wait this many
# seconds longer, so that they can still read the verdict of rank 0, which names missing ranks.
_VERDICT_MARGIN_S = 10.0
_T = TypeVar("_T")


@final
@dataclass(eq=False, kw_only=True)
class Consensus:
    """Compares one graph, and shares values for it, across the ranks of one process group.

    ``rank`` is the number of this rank in the group; ``num_ranks`` is the size of the group.
    """

    store: Store  # key-value store of the process group
    group_name: str  # name of the process group in functional collectives
    rank: int
    num_ranks: int
    timeout_s: float  # seconds that rank 0 waits for the other ranks

    def __post_init__(self) -> None:
        # Count this rank's graphs. Ranks must compile graphs in the same order, so that a graph
        # has the same number on all ranks. ``compare`` checks that graphs of equal number match.
        self._number = self.store.add(f"halley/graphs/{self.rank}", 1)

    def compare(self, signature: Signature) -> tuple[list[int], range]:
        """Compare the ranks' graphs; return the ranks whose graph ``structure`` is not rank 0's.

        The range has the first node that differs between rank 0 and the first of these ranks. All
        ranks get the same result, or raise a ``RuntimeError`` if the collectives of a rank differ
        or a rank is missing.
        """
        text = json.dumps([signature.collectives, signature.structure])
        self.store.set(self._key(f"graph/{self.rank}"), text)
        error, others, first, end = self.share("verdict", self._judge)
        if error:
            raise RuntimeError(f"graph {self._number}: {error}")
        return others, range(first, end)

    def _judge(self) -> tuple[str, list[int], int, int]:
        keys = [self._key(f"graph/{rank}") for rank in range(self.num_ranks)]
        if missing := self._find_missing(keys, self.timeout_s):
            return (
                (
                    f"ranks {missing} compiled no graph with collectives in {self.timeout_s:g} s: "
                    "all ranks must compile the same graphs, recompilations included"
                ),
                [],
                0,
                0,
            )
        graphs = [json.loads(self.store.get(key)) for key in keys]
        structures = [graph[1] for graph in graphs]
        others = [rank for rank, each in enumerate(structures) if each != structures[0]]
        at = first_difference(structures[0], structures[others[0]]) if others else range(0)
        return _difference([graph[0] for graph in graphs]), others, at.start, at.stop

    def share(self, what: str, make: Callable[[], _T]) -> _T:
        """Call ``make`` on rank 0 of the group, and return its result, sent as JSON, on all ranks.

        ``what`` names the result; use each name only once per graph. If ``make`` fails, all ranks
        raise a ``RuntimeError``.
        """
        failure: Exception | None = None
        if self.rank == 0:
            try:
                self.store.set(self._key(what), json.dumps({"made": make()}))
            except Exception as error:
                failure = error
                self.store.set(self._key(what), json.dumps({"error": repr(error)}))
        found = self._read(what)
        if "error" in found:
            message = f"graph {self._number}: rank 0 made no {what}: {found['error']}"
            raise RuntimeError(message) from failure
        return cast(_T, found["made"])

    def all_gather(self, what: str, value: int) -> list[int]:
        """Return a list of the ``value`` of each rank of the group, in the order of the ranks.

        ``what`` names the value, as in ``share``. A rank that sends no value in time is an error.
        """
        keys = [self._key(f"{what}/{rank}") for rank in range(self.num_ranks)]
        self.store.set(keys[self.rank], str(int(value)))
        limit_s = self.timeout_s + _VERDICT_MARGIN_S
        if missing := self._find_missing(keys, limit_s):
            text = f"graph {self._number}: ranks {missing} sent no {what} in {limit_s:g} s"
            raise RuntimeError(text)
        return [int(self.store.get(key)) for key in keys]

    def _find_missing(self, keys: list[str], timeout_s: float) -> list[int]:
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
            return []
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _read(self, what: str) -> dict[str, object]:
        key, limit_s = self._key(what), self.timeout_s + _VERDICT_MARGIN_S
        try:
            self.store.wait([key], timedelta(seconds=limit_s))
        except RuntimeError:
            text = f"graph {self._number}: rank 0 gave no {what} in {limit_s:g} s"
            raise RuntimeError(text) from None
        return cast(dict[str, object], json.loads(self.store.get(key)))

    def _key(self, what: str) -> str:
        return f"halley/graph/{self._number}/{what}"


def open_consensus(group_name: str, *, timeout_s: float) -> Consensus:
    """Return a new ``Consensus`` of a process group, for the next graph that this rank compiles."""
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]
    return Consensus(
        store=group.get_group_store(),
        group_name=group_name,
        rank=group.rank(),
        num_ranks=group.size(),
        timeout_s=timeout_s,
    )


def compare_graphs(*graphs: fx.Graph, timeout_s: float) -> tuple[list[Consensus], str]:
    """Compare graphs; return each group's ``Consensus``, and what differs in computation or "".

    The largest group comes first. If ranks have the same collectives but other computation, no plan
    fits all ranks. Then the text names ranks, by their numbers in a group, and this rank's nodes
    where the difference begins. Raises a ``RuntimeError`` on all ranks if the ranks' collectives
    differ or a rank is missing.
    """
    groups = [open_consensus(name, timeout_s=timeout_s) for name in graph_groups(*graphs)]
    groups.sort(key=lambda consensus: -consensus.num_ranks)
    own = signature(*graphs)
    # Compare in every group, even if structures differ in one: ranks of the others would wait.
    verdicts = [consensus.compare(own) for consensus in groups]
    different = [verdict for verdict in verdicts if verdict[0]]
    if not different:
        return groups, ""
    others, at = different[0]
    nodes = [node for graph in graphs for node in graph.nodes][at.start : at.stop]
    names = ", ".join(operator_name(node) or node.op for node in nodes)
    return groups, (
        f"the computation of ranks {others} differs from that of rank 0; the first difference is "
        f"among nodes {at.start} to {at.stop - 1}, on this rank: {names}"
    )


def share_in_groups(groups: Sequence[Consensus], what: str, make: Callable[[], _T]) -> _T:
    """Call ``make`` on rank 0 of the largest group; return its result on all ranks of that group.

    ``groups`` is a result of ``compare_graphs``; if empty, this process calls ``make``. Raises a
    ``RuntimeError`` if the ranks of a smaller group have different results. This can happen if no
    group of the graph holds all ranks.
    """
    if not groups:
        return make()
    made = groups[0].share(what, make)
    # Share in all groups before an error is raised: ranks of a group wait for its rank 0.
    others = [consensus.share(f"same {what}", lambda: made) for consensus in groups[1:]]
    if any(other != made for other in others):
        raise RuntimeError(
            "ranks of two groups would run a graph in different orders: the largest group "
            "of a graph must hold all ranks that take part in it"
        )
    return made


def _difference(collectives: Sequence[list[str]]) -> str:
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
