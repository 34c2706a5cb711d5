"""The actions of a step: items of a microbatch, or several items that run as one CUDA graph."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

from halley.lanes.segment_compiler import Call


Value = tuple[int, str]  # a microbatch and the name of one of its values


@dataclass(frozen=True, kw_only=True)
class Action:
    """One item of one microbatch, or several that run as one CUDA graph."""

    name: str  # of the span that it records
    stream: str
    call: Call
    can_capture: bool
    reads: tuple[Value, ...]
    last_reads: tuple[bool, ...]  # for each of ``reads``, whether no later action reads it
    results: tuple[Value, ...]
    is_read: tuple[bool, ...]  # for each result, whether a later action or the caller reads it
    gradients: tuple[tuple[int, int], ...]  # index of a result, and position of its parameter
    # Of a CUDA graph: indices of the results whose memory nothing else uses until the next step.
    lasting: frozenset[int] = frozenset()


def take(action: Action, values: dict[Value, Any]) -> list[Any]:
    """Return the arguments of an action; remove those that no later action reads.

    The action's code can then free their memory.
    """
    return [
        values.pop(value) if is_last else values[value]
        for value, is_last in zip(action.reads, action.last_reads, strict=True)
    ]


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
    first, *others = (part.name for part in parts)
    return replace(
        parts[0],
        name=f"{first}+{len(others)}" if others else first,
        call=partial(_call_parts, parts, (*reads,), _returned(is_read, gradients)),
        reads=(*reads,),
        last_reads=(*reads.values(),),
        results=results,
        is_read=is_read,
        gradients=tuple(gradients),
    )


def _returned(is_read: Sequence[bool], gradients: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each result whether an action must return it."""
    indices = {at for at, _ in gradients}
    return [each or at in indices for at, each in enumerate(is_read)]


def _call_parts(
    parts: Sequence[Action], reads: Sequence[Value], returned: Sequence[bool], values: list[Any]
) -> list[Any]:
    """Run ``parts``; return the results of all, with None for those that nothing reads later.

    Each value is freed after the part that reads it last, as in the prediction of memory.
    """
    found = dict(zip(reads, values, strict=True))
    values.clear()
    results: list[Any] = []
    for part in parts:
        made = _call_part(part, found)
        keeps = returned[len(results) : len(results) + len(made)]
        results += [each if keep else None for each, keep in zip(made, keeps, strict=True)]
        del made
    return results


def _call_part(part: Action, found: dict[Value, Any]) -> Sequence[Any]:
    args = take(part, found)
    inputs = [*args]  # alive during the call, as in the record of memory
    results = part.call(args)
    del inputs
    found |= {
        value: result
        for value, result, is_read in zip(part.results, results, part.is_read, strict=True)
        if is_read
    }
    return results
