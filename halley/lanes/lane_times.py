"""Find the times of a step's items from measured steps, and predict the time of any order."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from statistics import median

from halley.compiler.graph_analysis import Sizes
from halley.compiler.node_cost import arithmetic_us
from halley.core.timeline import Span
from halley.cost.hardware import Predictor
from halley.cost.simulate import NO_CONTENTION, Contention, GraphTime, Operation, graph_time
from halley.lanes.action import Order
from halley.lanes.cut import Item
from halley.lanes.item_clock import span_item


def measured_durations(
    items: Sequence[Item],
    keys: Sequence[str],
    *,
    computing: Sequence[Span],
    communicating: Sequence[Sequence[Span]],
) -> list[float]:
    """Return the microseconds of each item, from spans of microbatches that ran one after another.

    Items with the same hash in ``keys`` get their median duration in the step ``computing``. A wait
    gets 0. A start gets the shortest time, over the microbatches of the steps ``communicating``,
    from its start to the end of its wait: longer times contain delays of other ranks.
    """
    times_us: dict[str, list[float]] = defaultdict(list)
    for span in computing:
        times_us[keys[span_item(span.name)[1]]].append(span.duration_us)
    links_us: dict[int, float] = {}
    for spans in communicating:
        by_item = {span_item(span.name): span for span in spans}
        for (microbatch, index), span in by_item.items():
            for need in items[index].needs if items[index].kind == "wait" else ():
                if items[need].kind == "start":
                    link_us = span.end_us - by_item[microbatch, need].start_us
                    links_us[need] = min(link_us, links_us.get(need, inf))
    durations_us = [median(times_us[key]) for key in keys]
    for at, item in enumerate(items):
        if item.kind in ("start", "wait"):
            durations_us[at] = links_us.get(at, 0.0)
    return durations_us


def find_memory_shares(
    items: Sequence[Item], durations_us: Sequence[float], predictor: Predictor
) -> list[float]:
    """Return the share of each item's time that memory limits: all but the time of its arithmetic.

    Items whose sizes depend on data are GEMMs of experts for the most part: their share is 0.
    """
    shares: list[float] = []
    for item, duration_us in zip(items, durations_us, strict=True):
        nodes = item.code.nodes if item.code is not None and item.is_static else ()
        arithmetic = sum(arithmetic_us(node, predictor, Sizes(1)) for node in nodes)
        shares.append(max(0.0, 1.0 - arithmetic / duration_us) if nodes and duration_us else 0.0)
    return shares


def predict(
    items: Sequence[Item],
    durations_us: Sequence[float],
    order: Order,
    contention: Contention = NO_CONTENTION,
    memory_shares: Sequence[float] | None = None,
) -> GraphTime:
    """Predict the times of a step that runs its items in ``order``."""
    shares = memory_shares or [0.0] * len(items)
    num_microbatches = len({microbatch for microbatch, _ in order})
    operations = [
        Operation(
            name=f"{microbatch}.{index}",
            role=item.kind if item.kind in ("start", "wait") else "compute",
            duration_us=durations_us[index],
            needs=tuple(
                lane * len(items) + need
                for lane, need in item.all_needs(microbatch, num_microbatches)
            ),
            is_read=item.kind == "host",
            memory_share=shares[index],
        )
        for microbatch in range(num_microbatches)
        for index, item in enumerate(items)
    ]
    flat = [microbatch * len(items) + index for microbatch, index in order]
    return graph_time(operations, flat, contention)


def overlapped(
    items: Sequence[Item],
    durations_us: Sequence[float],
    memory_shares: Sequence[float],
    contention: Contention,
) -> list[float]:
    """Return the durations of items beside each other: most computation runs beside a transfer."""
    computing_us = [
        0.0 if item.kind in ("start", "wait") else duration_us
        for item, duration_us in zip(items, durations_us, strict=True)
    ]
    memory_us = sum(us * share for us, share in zip(computing_us, memory_shares, strict=True))
    comm = contention.comm_factor(memory_us / max(sum(computing_us), 1e-9))
    return [
        duration_us * (comm if item.kind == "start" else contention.compute_factor(share))
        for item, duration_us, share in zip(items, durations_us, memory_shares, strict=True)
    ]
