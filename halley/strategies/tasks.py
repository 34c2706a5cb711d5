"""Layers as tasks for the simulator: the pipeline of sequential and chunked, and fused kernels.

Sequential is chunked with one chunk, unfused is fused with one piece of each kind.
"""

from dataclasses import dataclass
from math import comb

from halley.core.routing import chunk_sizes, local_experts
from halley.core.types import LayerShape
from halley.cost.predict import Predictor
from halley.cost.simulate import Task


def pipeline_tasks(shape: LayerShape, predictor: Predictor, *, num_chunks: int) -> list[Task]:
    """Return forward and backward of one rank under balanced routing, in order of issue.

    Args:
        shape: the layer.
        predictor: gives each part its time.
        num_chunks: ranges of local experts that are exchanged and computed one after another.
    """
    rows = shape.num_tokens * shape.top_k
    hidden_bytes = shape.hidden_size * shape.itemsize
    reorder_us = predictor.memory_us(2.0 * rows * hidden_bytes, num_ops=1)
    sizes = chunk_sizes(local_experts(shape.num_experts, ep_size=shape.ep_size), num_chunks)
    shares = [size / sum(sizes) for size in sizes]
    exchange_us = [
        predictor.all_to_all_us(rows * share * hidden_bytes * (1.0 - 1.0 / shape.ep_size))
        for share in shares
    ]
    experts_us = [
        _experts_us(shape, predictor, num_rows=rows * share, num_groups=size)
        for share, size in zip(shares, sizes, strict=True)
    ]
    route_us = predictor.memory_us(16.0 * rows, num_ops=12) + predictor.hardware.link_latency_us

    tasks = [
        Task(name="route", stream="compute", duration_us=route_us),
        Task(name="gather", stream="compute", duration_us=reorder_us, needs=("route",)),
    ]
    chunks = range(num_chunks)
    for c in chunks:
        tasks.append(_comm(f"dispatch.{c}", exchange_us[c], needs="gather"))
    for c in chunks:
        tasks.append(_compute(f"experts.{c}", experts_us[c], needs=(f"dispatch.{c}",)))
        tasks.append(_comm(f"combine.{c}", exchange_us[c], needs=f"experts.{c}"))
    returned = tuple(f"combine.{c}" for c in chunks)
    tasks.append(_compute("restore", 2 * reorder_us, needs=returned))
    tasks.append(_compute("restore.backward", 2 * reorder_us, needs=("restore",)))
    for c in reversed(chunks):
        tasks.append(_comm(f"combine.backward.{c}", exchange_us[c], needs="restore.backward"))
    for c in reversed(chunks):
        needs = (f"combine.backward.{c}",)
        tasks.append(_compute(f"experts.backward.{c}", 2 * experts_us[c], needs=needs))
        tasks.append(_comm(f"dispatch.backward.{c}", exchange_us[c], needs=f"experts.backward.{c}"))
    returned = tuple(f"dispatch.backward.{c}" for c in chunks)
    tasks.append(_compute("gather.backward", 2 * reorder_us, needs=returned))
    return tasks


def gathered_tasks(shape: LayerShape, predictor: Predictor) -> list[Task]:
    """Return forward and backward of one rank under balanced routing, in order of issue.

    Every token travels to every rank, and a sum of each back, whatever the routing.

    Args:
        shape: the layer.
        predictor: gives each part its time.
    """
    rows, hidden_bytes = shape.num_tokens * shape.top_k, shape.hidden_size * shape.itemsize
    crossings = shape.num_tokens * (shape.ep_size - 1)
    link_us = predictor.all_to_all_us(crossings * hidden_bytes)
    route_us = predictor.memory_us(16.0 * rows * shape.ep_size, num_ops=12)
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    experts_us = _experts_us(shape, predictor, num_rows=rows, num_groups=num_local)
    # Each rank sums the slots of all tokens, most of which are empty.
    sum_us = predictor.memory_us(2.0 * rows * shape.ep_size * hidden_bytes, num_ops=2)
    return [
        _comm("dispatch", link_us, needs=""),
        _compute("route", route_us, needs=("dispatch",)),
        _compute("experts", experts_us + sum_us, needs=("route",)),
        _comm("combine", link_us, needs="experts"),
        _comm("combine.backward", link_us, needs="combine"),
        _compute("experts.backward", 2 * experts_us + sum_us, needs=("combine.backward",)),
        _comm("dispatch.backward", link_us, needs="experts.backward"),
    ]


def fused_tasks(
    shape: LayerShape, predictor: Predictor, *, chunk_columns: int, fused: bool
) -> list[Task]:
    """Return forward and backward of one rank under balanced routing, in order of issue.

    A token crosses once to each rank that has one of its experts, and one sum of it comes back.
    Fused, the rows of the other ranks arrive while those that are here are multiplied, and a chunk
    of columns travels while the next is multiplied: in the simulator, tasks of their own. What
    communication takes from the multiprocessors is not counted.

    Args:
        shape: the layer.
        predictor: gives each part its time.
        chunk_columns: columns of the second GEMM that are combined at once.
        fused: False for the same parts one after another.
    """
    hidden, inner, itemsize = shape.hidden_size, shape.intermediate_size, shape.itemsize
    rows, ranks = shape.num_tokens * shape.top_k, shape.ep_size
    num_local = local_experts(shape.num_experts, ep_size=ranks)
    crossings = shape.num_tokens * (ranks - 1) * _reach(shape, num_local)
    link_us = predictor.all_to_all_us(crossings * hidden * itemsize)
    up_us = predictor.grouped_gemm_us(
        rows, num_local, inner=hidden, outer=shape.up_size, itemsize=itemsize
    )
    down_us = predictor.grouped_gemm_us(
        rows, num_local, inner=inner, outer=hidden, itemsize=itemsize
    )
    row_bytes = hidden * itemsize
    publish_us = predictor.memory_us(2.0 * shape.num_tokens * row_bytes)
    plan_us = predictor.memory_us(32.0 * rows, num_ops=2) + predictor.hardware.link_latency_us
    expand_us = predictor.memory_us(2.0 * rows * row_bytes)
    sum_us = predictor.memory_us((rows + 2.0 * crossings + shape.num_tokens) * row_bytes)

    way = _Way(
        num_parts=ranks if fused else 1,
        first_part=1 if fused else 0,
        num_chunks=-(-hidden // chunk_columns) if fused else 1,
        link_us=link_us,
        expand_us=expand_us,
        sum_us=sum_us,
    )
    tasks = [
        _compute("publish", publish_us, needs=()),
        _compute("plan", plan_us, needs=("publish",)),
        *way.tasks("", ("up", up_us), ("down", down_us), needs="plan"),
    ]
    tasks.append(_compute("publish.backward", publish_us, needs=(tasks[-1].name,)))
    tasks += way.tasks(".backward", ("down", down_us), ("up", up_us), needs="publish.backward")
    for name, duration_us in (("down.weights", down_us), ("up.weights", up_us)):
        tasks.append(_compute(name, duration_us, needs=(f"down.backward.{way.num_parts - 1}",)))
    return tasks


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The way of rows to their experts and of sums home, which gradients go, too.

    Attributes:
        num_parts: of the rows, by the rank that they come from, this one's first.
        first_part: the first that travels.
        num_chunks: of the columns that come home.
        link_us: time of the wire one way.
        expand_us: to write rows to all their experts.
        sum_us: to add up what goes home.
    """

    num_parts: int
    first_part: int
    num_chunks: int
    link_us: float
    expand_us: float
    sum_us: float

    def tasks(
        self, suffix: str, there: tuple[str, float], back: tuple[str, float], *, needs: str
    ) -> list[Task]:
        """Return the tasks of one pass through two GEMMs, given by name and time."""
        tasks: list[Task] = []
        share_us = self.link_us / (self.num_parts - self.first_part or 1)
        for part in range(self.first_part, self.num_parts):
            tasks.append(_comm(f"dispatch{suffix}.{part}", share_us, needs=needs))
        for part in range(self.num_parts):
            rows = needs if part < self.first_part else f"dispatch{suffix}.{part}"
            time_us = (self.expand_us + there[1]) / self.num_parts
            tasks.append(_compute(f"{there[0]}{suffix}.{part}", time_us, needs=(rows,)))
        last = tasks[-1].name
        for chunk in range(self.num_chunks):
            name = f"{back[0]}{suffix}.{chunk}"
            tasks.append(_compute(name, back[1] / self.num_chunks, needs=(last,)))
            chunk_us = self.link_us / self.num_chunks
            tasks.append(_comm(f"combine{suffix}.{chunk}", chunk_us, needs=name))
        for chunk in range(self.num_chunks):
            sums = (f"combine{suffix}.{chunk}",)
            chunk_us = self.sum_us / self.num_chunks
            tasks.append(_compute(f"home{suffix}.{chunk}", chunk_us, needs=sums))
        return tasks


def _reach(shape: LayerShape, num_local: int) -> float:
    """Return the share of tokens that have any expert on a given rank, experts being equal."""
    elsewhere = comb(shape.num_experts - num_local, shape.top_k)
    return 1.0 - elsewhere / comb(shape.num_experts, shape.top_k)


def _experts_us(
    shape: LayerShape, predictor: Predictor, *, num_rows: float, num_groups: int
) -> float:
    hidden, inner, itemsize = shape.hidden_size, shape.intermediate_size, shape.itemsize
    up_us = predictor.grouped_gemm_us(
        num_rows, num_groups, inner=hidden, outer=shape.up_size, itemsize=itemsize
    )
    down_us = predictor.grouped_gemm_us(
        num_rows, num_groups, inner=inner, outer=hidden, itemsize=itemsize
    )
    moved = num_rows * itemsize * (2 * shape.up_size + 3 * inner + 4 * hidden)
    return up_us + down_us + predictor.memory_us(moved, num_ops=4)


def _compute(name: str, duration_us: float, *, needs: tuple[str, ...]) -> Task:
    return Task(name=name, stream="compute", duration_us=duration_us, needs=needs)


def _comm(name: str, duration_us: float, *, needs: str) -> Task:
    return Task(name=name, stream="comm", duration_us=duration_us, needs=(needs,) if needs else ())
