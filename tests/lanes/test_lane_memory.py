"""Predicted memory of orders: by hand for small steps, and equal to the storages of real ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halley.distributed.mesh import build_groups
from halley.lanes import allocations, compile_step, executor, lane_memory
from halley.lanes.action import Value
from halley.lanes.allocations import Allocations
from halley.lanes.cut import Item
from halley.lanes.lane_memory import (
    MemoryRecord,
    ResultStorage,
    StorageRecorder,
    Storages,
    predict_memory,
    predict_peak,
)
from halley.lanes.lane_schedule import plan_lanes
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import SIZE, CutStep, SmallModel, build_gpt2, make_batch
from tests.moe.model_case import destroy


NUM_MICROBATCHES = 2
MIB = 2**20


def _new(name: str, num_bytes: int) -> ResultStorage:
    return ResultStorage(owner=name, num_bytes=num_bytes)


def _forward_backward() -> tuple[list[Item], Storages]:
    """Return two segments and a unit: 100 bytes saved by the first, a gradient of 40 bytes."""
    items = [
        Item(kind="segment", outputs=("f:saved", "f:view"), is_static=True),
        Item(kind="segment", inputs=("f:view",), outputs=("b:error",), needs=(0,), is_static=True),
        Item(
            kind="unit",
            inputs=("f:saved", "b:error"),
            outputs=("b:gradient",),
            needs=(0, 1),
            gradients=(("b:gradient", 0),),
            is_static=True,
        ),
    ]
    results = [
        (_new("f:saved", 100), _new("f:saved", 100)),  # the second result is a view of the first
        (_new("b:error", 10),),
        (_new("b:gradient", 40),),
    ]
    return items, {(each, at): results[at] for each in (0, 1) for at in range(len(items))}


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        # One after another: 100, 110, 0. The gradient is added at once.
        ([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)], 110),
        # Two lanes: 100, 200, 210, 220, then the units free their operands.
        ([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)], 220),
        # A deferred unit keeps 110 bytes until the other lane is done.
        ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)], 220),
        # The other lane's early gradient waits: 100, 110, 0 + 40, then 140 and 150.
        ([(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)], 150),
    ],
)
def test_peak_of_three_items_and_two_lanes(order: executor.Order, wanted: int) -> None:
    items, storages = _forward_backward()
    assert predict_peak(items, storages, order) == wanted


def _in_mib(storages: Storages) -> Storages:
    """Return storages as large as many MiB as they had bytes: large ones for torch's allocator."""
    return {
        key: [replace(each, num_bytes=each.num_bytes * MIB) for each in results]
        for key, results in storages.items()
    }


def test_total_has_gradients_and_memory_inside_of_items() -> None:
    items, storages = _forward_backward()
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    # The first gradient stays: 100, 110, 40, then 140, 150, and 40 after the second gradient.
    record = MemoryRecord(storages=_in_mib(storages), rest_bytes=1000 * MIB)
    assert predict_memory(items, record, order) == (0, 1150 * MIB)
    # Before the last item, 150 are alive, and it allocates 70.
    record = replace(record, inside_bytes={(0, 0): 160 * MIB, (1, 2): 70 * MIB})
    assert predict_memory(items, record, order) == (0, 1220 * MIB)
    # The peak of the graphs' memory is in the first item, and that of the others in the last one.
    record = replace(record, captured=frozenset({0, 1}))
    assert predict_memory(items, record, order) == (160 * MIB, (1000 + 160 + 110) * MIB)


def test_graphs_need_gaps_between_their_tensors() -> None:
    """The result of 30 does not fit between tensors that stay, although 20 and 20 are free."""
    items = [
        Item(kind="segment", outputs=("a", "b", "c", "d"), is_static=True),
        Item(kind="segment", inputs=("a", "c"), outputs=("e",), needs=(0,), is_static=True),
        Item(kind="segment", outputs=("f",), needs=(1,), is_static=True),
        Item(kind="segment", inputs=("b", "d", "e", "f"), needs=(0, 1, 2), is_static=True),
    ]
    results = [
        tuple(_new(name, 20) for name in "abcd"),
        (_new("e", 10),),
        (_new("f", 30),),
        (),
    ]
    storages = _in_mib({(0, at): each for at, each in enumerate(results)})
    order = [(0, at) for at in range(len(items))]
    record = MemoryRecord(storages=storages, captured=frozenset(range(len(items))))
    # 80, then 10 behind them; the 30 come behind these. At most 80 are alive between items.
    graph_bytes, total_bytes = predict_memory(items, record, order)
    assert graph_bytes == total_bytes
    assert 120 * MIB <= graph_bytes <= 123 * MIB
    assert predict_peak(items, storages, order) == 80 * MIB


def test_gradients_of_one_graph_are_freed_together() -> None:
    unit = Item(kind="unit", inputs=("saved",), needs=(0,), is_static=True)
    items = [
        Item(kind="segment", outputs=("saved",), is_static=True),
        replace(unit, outputs=("b:first",), gradients=(("b:first", 0),)),
        Item(kind="wait"),
        replace(unit, outputs=("b:second",), gradients=(("b:second", 1),)),
    ]
    results = [(_new("saved", 100),), (_new("b:first", 40),), (), (_new("b:second", 50),)]
    storages = _in_mib({(each, at): results[at] for each in (0, 1) for at in range(4)})
    record = MemoryRecord(storages=storages, captured=frozenset({0, 1, 3}))
    order = [(each, at) for each in (0, 1) for at in range(4)]
    # The first microbatch leaves 90. With the wait between the units, the gradient of 40 is freed
    # before the one of 50 is made.
    assert predict_memory(items, record, order).graph_bytes == (90 + 100 + 50) * MIB
    together = [(each, at) for each in (0, 1) for at in (0, 2, 1, 3)]
    assert predict_memory(items, record, together).graph_bytes == (90 + 100 + 40 + 50) * MIB
    assert predict_peak(items, storages, together) == 100 * MIB
    assert predict_peak(items, storages, together, record.captured) == 140 * MIB


def test_graphs_follow_the_recorded_allocations() -> None:
    """A temporary of 40 finds no place where one of 30 was, because the result is behind it."""
    items = [Item(kind="segment", outputs=("a",), is_static=True)]
    record = MemoryRecord(
        storages=_in_mib({(0, 0): (_new("a", 20),)}),
        inside_bytes={(0, 0): 60 * MIB},
        captured=frozenset({0}),
    )
    events = [(0, 30 * MIB), (1, 20 * MIB), (0, 0), (2, 40 * MIB), (2, 0)]
    # Without a record, a temporary of 40 and the result.
    assert predict_memory(items, record, [(0, 0)]).graph_bytes == 60 * MIB
    record = replace(record, allocations={0: Allocations(events=events, owners=(1,))})
    graph_bytes = predict_memory(items, record, [(0, 0)]).graph_bytes
    assert 90 * MIB <= graph_bytes <= 92 * MIB


def test_history_becomes_numbers_in_order() -> None:
    kept, view = torch.empty(4), torch.empty(4)
    history = [
        {"action": "free_completed", "addr": 3, "size": 5},  # allocated before
        {"action": "alloc", "addr": 1, "size": 10},
        {"action": "alloc", "addr": kept.data_ptr(), "size": 16},
        {"action": "free_requested", "addr": 1, "size": 10},
        {"action": "free_completed", "addr": 1, "size": 10},
        {"action": "alloc", "addr": 1, "size": 20},
    ]
    found = allocations._number(history, [kept, view, 7, kept[1:]])
    assert found.events == [(0, 10), (1, 16), (0, 0), (2, 20)]
    assert found.owners == [1, -1, -1, 1]


def test_input_of_a_collective_is_alive_until_its_wait() -> None:
    items = [
        Item(kind="segment", outputs=("f:rows",)),
        Item(kind="start", inputs=("f:rows",), outputs=("f:sent",), needs=(0,)),
        Item(kind="segment", outputs=("f:other",)),
        Item(kind="wait", inputs=("f:sent",), outputs=("f:got",), needs=(1,), has_rows=True),
        Item(kind="segment", inputs=("f:got", "f:other"), needs=(2, 3)),
    ]
    results = [(_new("f:rows", 50),), (_new("f:sent", 30),), (_new("f:other", 7),)]
    results += [(_new("f:sent", 30),), ()]
    storages = {(0, at): results[at] for at in range(len(items))}
    assert predict_peak(items, storages, [(0, at) for at in range(len(items))]) == 87


def test_gradient_that_waits_and_is_read_is_alive_until_it_is_added() -> None:
    """The early gradient of the second microbatch is read by an item before the first one's."""
    items, storages = _forward_backward()
    items.append(Item(kind="segment", inputs=("b:gradient",), outputs=("b:more",), needs=(2,)))
    storages = {**storages, **{(each, 3): (_new("b:more", 0),) for each in (0, 1)}}
    order = [(1, 0), (1, 1), (1, 2), (1, 3), (0, 0), (0, 1), (0, 2), (0, 3)]
    assert predict_peak(items, storages, order) == 40 + 110 + 0
    ends = lane_memory._find_ends(items, order)
    assert ends[1, "b:gradient"] == order.index((0, 2))


def _chain() -> tuple[list[Item], Storages, list[float]]:
    """Return items of 10 us with an exchange of 8 us between them; the first result is large."""
    items = [
        Item(kind="segment", outputs=("f:rows",)),
        Item(kind="start", inputs=("f:rows",), outputs=("f:sent",), needs=(0,)),
        Item(kind="wait", inputs=("f:sent",), outputs=("f:got",), needs=(1,), has_rows=True),
        Item(kind="segment", inputs=("f:got", "f:rows"), outputs=("f:end",), needs=(0, 2)),
    ]
    results = [(_new("f:rows", 50),), (_new("f:sent", 30),), (_new("f:sent", 30),), ()]
    storages = {(each, at): results[at] for each in (0, 1) for at in range(len(items))}
    return items, storages, [10.0, 8.0, 0.0, 10.0]


def test_graphs_copy_results_of_items_that_they_do_not_run() -> None:
    items, storages, _ = _chain()
    input_bytes = {(0, 0): [], (0, 3): [30 * MIB, 50 * MIB]}
    record = MemoryRecord(
        storages=_in_mib(storages), input_bytes=input_bytes, captured=frozenset({0, 3})
    )
    order = [(0, 0), (0, 1), (0, 2), (0, 3)]
    # The last item reads 50 and a copy of 30. The 30 themselves come from NCCL.
    graph_bytes, total_bytes = predict_memory(items, record, order)
    assert 80 * MIB <= graph_bytes <= 82 * MIB
    assert total_bytes == graph_bytes + 30 * MIB


def test_limit_of_memory_chooses_fewer_lanes() -> None:
    items, storages, durations_us = _chain()
    make_plan = partial(
        plan_lanes,
        items,
        durations_us,
        num_microbatches=NUM_MICROBATCHES,
        max_lanes=2,
        memory=MemoryRecord(storages=storages),
    )
    free = make_plan()
    assert (free.num_lanes, free.peak_bytes, free.peak_bytes_before) == (2, 160, 80)
    at_limit = make_plan(max_bytes=160)
    assert at_limit == free
    limited = make_plan(max_bytes=159)
    assert (limited.num_lanes, limited.peak_bytes) == (1, 80)
    with pytest.raises(ValueError, match=r"max_bytes \(79\) must be at least 80"):
        make_plan(max_bytes=79)


def test_units_that_run_later_need_memory() -> None:
    items = [
        Item(kind="segment", outputs=("b:rows", "b:operand")),
        Item(kind="unit", inputs=("b:operand",), needs=(0,)),
        Item(kind="start", inputs=("b:rows",), outputs=("b:sent",), needs=(0,)),
        Item(kind="wait", inputs=("b:sent",), outputs=("b:got",), needs=(2,), has_rows=True),
        Item(kind="segment", inputs=("b:got",), needs=(3,)),
    ]
    results = [(_new("b:rows", 10), _new("b:operand", 90)), (), (_new("b:sent", 10),), (), ()]
    storages = {(each, at): results[at] for each in (0, 1) for at in range(len(items))}
    make_plan = partial(
        plan_lanes,
        items,
        [10.0, 9.0, 20.0, 0.0, 10.0],
        num_microbatches=2,
        max_lanes=2,
        memory=MemoryRecord(storages=storages, input_bytes={(0, 1): [90]}),
    )
    later, at_once = make_plan(), make_plan(saves_memory=True)
    assert (later.num_lanes, later.moves_units) == (2, True)
    assert (at_once.num_lanes, at_once.moves_units) == (2, False)
    assert later.peak_bytes > 1.5 * at_once.peak_bytes


def test_only_units_with_small_operands_run_later_to_save_memory() -> None:
    items = [
        Item(kind="segment", outputs=("b:large", "b:rows0")),
        Item(kind="unit", inputs=("b:large",), needs=(0,)),
        Item(kind="start", inputs=("b:rows0",), outputs=("b:sent0",), needs=(0,)),
        Item(kind="wait", inputs=("b:sent0",), outputs=("b:got0",), needs=(2,), has_rows=True),
        Item(kind="segment", inputs=("b:got0",), outputs=("b:rows1", "b:operand"), needs=(3,)),
        Item(kind="unit", inputs=("b:operand",), needs=(4,)),
        Item(kind="start", inputs=("b:rows1",), outputs=("b:sent1",), needs=(4,)),
        Item(kind="wait", inputs=("b:sent1",), outputs=("b:got1",), needs=(6,), has_rows=True),
        Item(kind="segment", inputs=("b:got1",), needs=(7,)),
    ]
    made = {
        0: (_new("b:large", 90), _new("b:rows0", 10)),
        2: (_new("b:sent0", 10),),
        4: (_new("b:rows1", 10), _new("b:operand", 20)),
        6: (_new("b:sent1", 10),),
    }
    plan = plan_lanes(
        items,
        [10.0, 9.0, 5.0, 0.0, 10.0, 9.0, 30.0, 0.0, 10.0],
        num_microbatches=2,
        max_lanes=2,
        memory=MemoryRecord(
            storages={(lane, at): made.get(at, ()) for lane in (0, 1) for at in range(len(items))},
            input_bytes={(lane, at): [size] for lane in (0, 1) for at, size in ((1, 90), (5, 20))},
        ),
        saves_memory=True,
    )
    place = {each: at for at, each in enumerate(plan.order)}
    # The first unit runs behind its segment. The second one may run during an exchange.
    assert all(place[lane, 1] == place[lane, 0] + 1 for lane in (0, 1))
    assert any(place[lane, 5] > place[lane, 6] for lane in (0, 1))
    assert (plan.num_lanes, plan.moves_units) == (2, True)


def _live_bytes(dictionaries: Sequence[dict[Any, Any]], inputs: set[int]) -> int:
    """Return the bytes of the storages of all values, each once, without those of ``inputs``."""
    tensors = [
        value for each in dictionaries for value in each.values() if isinstance(value, torch.Tensor)
    ]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in inputs)


def _compare_peaks(rank: int, num_ranks: int) -> tuple[dict[str, tuple[int, int]], set[int]]:
    """Return the predicted and measured peak of each order; sizes of inputs that graphs copy."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2("switch", groups, num_layers=4)
    batch = make_batch(rank, batch_size=2 * NUM_MICROBATCHES)
    found: dict[str, tuple[int, int]] = {}
    with fresh_graphs(), pytest.MonkeyPatch.context() as patch:
        case = CutStep(model, batch, num_microbatches=NUM_MICROBATCHES)
        plain = case._calls
        recorded = StorageRecorder(case.items, plain, {}, num_microbatches=NUM_MICROBATCHES)
        orders = case.orders()
        case._calls = recorded.calls
        case.run(orders["in turn"])
        case._calls = plain
        inputs = {
            value.untyped_storage()._cdata
            for each in case._inputs
            for value in each.values()
            if isinstance(value, torch.Tensor)
        }
        peak = 0
        run = executor._run

        def run_and_measure(
            action: Any, values: dict[Value, Any], gradients: Any, *others: Any
        ) -> None:
            nonlocal peak
            run(action, values, gradients, *others)
            peak = max(peak, _live_bytes([values, *gradients.early.values()], inputs))

        patch.setattr(executor, "_run", run_and_measure)
        for name, order in orders.items():
            peak = 0
            case.run(order)
            found[name] = predict_peak(case.items, recorded.storages, order), peak
    record = recorded.record(rest_bytes=0)
    record = replace(record, captured=frozenset(range(len(case.items))))
    copied = lane_memory._copied_bytes(case.items, record)
    destroy(groups)
    return found, {num_bytes for each in copied.values() for num_bytes in each}


def test_predicted_peak_is_that_of_a_real_step(run_ranks) -> None:
    for found, copied in run_ranks(_compare_peaks, 2):
        # Tokens and targets, 2 sequences of 8, and the gradient of the loss; no parameter.
        assert copied == {2 * 8 * 8, 4}
        for name, (predicted, measured) in found.items():
            assert predicted == pytest.approx(measured, rel=0.03), name
        before = found["in turn"][0]
        assert max(predicted for predicted, _ in found.values()) > 1.5 * before


def _limit_memory(rank: int, num_ranks: int) -> tuple[int, int, int, str]:
    """Return two predicted peaks, the lanes at the smaller one, and the error of a lower limit."""
    torch.manual_seed(0)
    model: nn.Module = SmallModel()
    batch = (torch.randn(4 * num_ranks, SIZE),)
    with fresh_graphs():
        free = compile_step(model, NUM_MICROBATCHES, max_lanes=1, inner="eager")
        for _ in range(3):
            free(*batch)
        assert free.plan is not None
        least = free.plan.peak_bytes_before
        limited = compile_step(model, NUM_MICROBATCHES, inner="eager", max_bytes=least)
        for _ in range(4):
            limited(*batch)
        assert limited.plan is not None
        refused = compile_step(model, NUM_MICROBATCHES, inner="eager", max_bytes=1)
        refused(*batch)
        refused(*batch)
        with pytest.raises(ValueError, match="max_bytes") as caught:
            refused(*batch)
        with pytest.raises(ValueError, match="max_bytes"):  # again, without waiting for a rank
            refused(*batch)
    return least, limited.plan.peak_bytes, limited.plan.num_lanes, str(caught.value)


def test_compile_step_obeys_the_limit_on_all_ranks(run_ranks) -> None:
    results = run_ranks(_limit_memory, 2)
    assert results[0] == results[1]
    least, peak_bytes, _, message = results[0]
    assert 0 < peak_bytes <= least
    assert message == f"max_bytes (1) must be at least {least}, the least predicted peak"
