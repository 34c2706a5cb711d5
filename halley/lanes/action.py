"""The actions of a step: single items, or items of any microbatches that run as one CUDA graph."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

from halley.lanes.cut import Item
from halley.lanes.segment_compiler import Call


Order = Sequence[tuple[int, int]]  # pairs of a microbatch and the index of an item
Value = tuple[int, str]  # a microbatch and the name of one of its values


@dataclass(frozen=True, kw_only=True)
class Action:
    """One item of one microbatch, or items of any microbatches that run as one CUDA graph."""

    name: str  # of the span that it records
    stream: str
    call: Call
    can_capture: bool  # as a CUDA graph
    reads: tuple[Value, ...]  # the arguments of ``call``
    last_reads: tuple[bool, ...]  # for each of ``reads``, whether no later action reads it
    results: tuple[Value, ...]  # of ``call``
    is_read: tuple[bool, ...]  # for each result, whether a later action or the caller reads it
    gradients: tuple[tuple[int, int], ...]  # index of a result, and position of its parameter
    parts: "tuple[Action, ...]" = ()  # the actions that ``join`` has joined
    # Of a CUDA graph: for each result, whether nothing else uses its memory until the next step.
    lasts: Sequence[bool] = ()
    is_graph: bool = False  # whether ``call`` replays a CUDA graph


def take(action: Action, values: dict[Value, Any]) -> list[Any]:
    """Return the arguments of an action; remove those that no later action reads.

    The action's code can then free their memory.
    """
    return [
        values.pop(value) if is_last else values[value]
        for value, is_last in zip(action.reads, action.last_reads, strict=True)
    ]


def group_items(
    items: Sequence[Item], order: Order, captured: Container[int]
) -> list[list[tuple[int, int]]]:
    """Divide an order into groups; each is one item, or items that become one CUDA graph.

    Items whose indices are in ``captured`` are one graph if they follow each other. At its start, a
    graph copies the results of uncaptured items that it reads. So that the copies exist only for a
    short time, an item that reads such a result begins a new graph.
    """
    copied = {name for at, item in enumerate(items) if at not in captured for name in item.outputs}
    groups: list[list[tuple[int, int]]] = []
    for each in order:
        follows = bool(groups) and each[1] in captured and groups[-1][-1][1] in captured
        if follows and copied.isdisjoint(items[each[1]].inputs):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def join(parts: Sequence[Action]) -> Action:
    """Return one action that runs ``parts`` one after another."""
    reads: dict[Value, bool] = {}  # from earlier actions, and whether a part reads it last
    made: set[Value] = set()
    gradients: list[tuple[int, int]] = []
    for part in parts:
        last_reads = dict(zip(part.reads, part.last_reads, strict=True))
        reads |= {value: last_reads[value] for value in part.reads if value not in made}
        gradients += [(len(made) + at, position) for at, position in part.gradients]
        made.update(part.results)
    results = tuple(value for part in parts for value in part.results)
    ended = {value for part in parts for value in compress(part.reads, part.last_reads)}
    is_read = tuple(
        each and value not in ended
        for part in parts
        for value, each in zip(part.results, part.is_read, strict=True)
    )
    indices = {at for at, _ in gradients}
    returned = {value for at, value in enumerate(results) if is_read[at] or at in indices}
    first, *others = (part.name for part in parts)
    return replace(
        parts[0],
        name=f"{first} and {len(others)} more" if others else first,
        call=partial(_call_parts, parts, (*reads,), returned),
        reads=(*reads,),
        last_reads=(*reads.values(),),
        results=results,
        is_read=is_read,
        gradients=tuple(gradients),
        parts=(*parts,),
    )


def _call_parts(
    parts: Sequence[Action], reads: Sequence[Value], returned: Container[Value], values: list[Any]
) -> list[Any]:
    """Run ``parts``; return the results of all, with None for those that are not ``returned``.

    Each value is freed after the part that reads it last, as in the prediction of memory.
    """
    found = dict(zip(reads, values, strict=True))
    values.clear()
    results: list[Any] = []
    for part in parts:
        results += _call_part(part, found, returned)
    return results


def _call_part(part: Action, found: dict[Value, Any], returned: Container[Value]) -> list[Any]:
    args = take(part, found)
    inputs = [*args]  # alive during the call, as in the record of memory
    results = part.call(args)
    del inputs
    found |= {
        value: result
        for value, result, is_read in zip(part.results, results, part.is_read, strict=True)
        if is_read
    }
    named = zip(part.results, results, strict=True)
    return [result if value in returned else None for value, result in named]
