"""Items that are joined for one CUDA graph have the results of single items, and free as early.

pytest tests/lanes/test_action.py
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from halley.lanes.action import Action, Value, group_items, join, take
from halley.lanes.cut import Item


def _action(
    call: Callable[[list[Any]], list[Any]],
    reads: dict[Value, bool],
    results: dict[Value, bool],
    gradients: tuple[tuple[int, int], ...] = (),
) -> Action:
    """Return an action; ``reads`` tells for each value whether nothing else reads it later."""
    return Action(
        name=f"{len(reads)}.{len(results)}.segment",
        stream="compute",
        call=call,
        can_capture=True,
        reads=(*reads,),
        last_reads=(*reads.values(),),
        results=(*results,),
        is_read=(*results.values(),),
        gradients=gradients,
    )


def test_joined_actions_return_what_later_actions_and_gradients_need() -> None:
    freed: list[bool] = []
    inside: list[weakref.ref[torch.Tensor]] = []

    def double(values: list[Any]) -> list[Any]:
        (x,) = values
        values.clear()
        made = [2 * x, x + 1, -x]
        inside[:] = [weakref.ref(made[0]), weakref.ref(made[2])]
        return made

    def add(values: list[Any]) -> list[Any]:
        x, y, weight = values
        values.clear()
        freed.append(inside[1]() is None)  # the result of the first action that nothing reads
        return [x + y, weight * x]

    def last(values: list[Any]) -> list[Any]:
        freed.append(inside[0]() is None)  # its result that the second action read last
        (z,) = values
        return [10 * z]

    x, weight = torch.tensor([3.0]), torch.tensor([0.5])
    parts = [
        _action(double, {(0, "x"): True}, {(0, "a"): True, (0, "b"): True, (0, "c"): False}),
        _action(
            add,
            {(0, "a"): True, (0, "b"): False, (1, "w"): False},
            {(1, "z"): True, (1, "grad"): False},
            gradients=((1, 7),),
        ),
        _action(last, {(1, "z"): False}, {(1, "end"): False}, gradients=((0, 8), (0, 9))),
    ]
    joined = join(parts)
    assert joined.reads == ((0, "x"), (1, "w"))
    assert joined.last_reads == (True, False)
    assert joined.results == tuple(value for part in parts for value in part.results)
    assert joined.is_read == (False, True, False, True, False, False)
    assert joined.gradients == ((4, 7), (5, 8), (5, 9))
    assert joined.name == "1.3.segment and 2 more"

    values: dict[Value, Any] = {(0, "x"): x, (1, "w"): weight}
    args = take(joined, values)
    assert values == {(1, "w"): weight}
    results = joined.call(args)
    assert results == [None, x + 1, None, 3 * x + 1, weight * 2 * x, 10 * (3 * x + 1)]
    assert freed == [True, True]
    assert not args


def test_one_joined_action_is_the_action() -> None:
    single = _action(lambda values: [values[0] + 1], {(0, "x"): False}, {(0, "y"): True})
    joined = join([single])
    assert (joined.name, joined.reads, joined.is_read) == (single.name, single.reads, (True,))
    assert joined.call([torch.tensor(1)]) == [torch.tensor(2)]


def test_items_that_read_copies_begin_a_new_graph() -> None:
    items = [
        Item(kind="segment", outputs=("a",)),
        Item(kind="unit", inputs=("a",), outputs=("b",)),
        Item(kind="wait", outputs=("rows",)),
        Item(kind="unit", inputs=("a", "rows")),
        Item(kind="unit", inputs=("b",)),
    ]
    order = [(0, 0), (1, 0), (1, 1), (0, 2), (1, 2), (0, 3), (0, 1), (1, 3), (0, 4), (1, 4)]
    assert group_items(items, order, {0, 1, 3, 4}) == [
        [(0, 0), (1, 0), (1, 1)],
        [(0, 2)],
        [(1, 2)],
        [(0, 3), (0, 1)],
        [(1, 3), (0, 4), (1, 4)],
    ]
    assert group_items(items, order, ()) == [[each] for each in order]
