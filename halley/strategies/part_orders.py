"""Define orders in which a layer across nodes computes and communicates; list simulator tasks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from halley.core.types import LayerShape, Task
from halley.cost.hardware import Predictor
from halley.ops.wire import FLOAT8_BYTES, WireDtype
from halley.strategies.base import comm_task, compute_task, share_of_tokens


ListTasks = Callable[[LayerShape, Predictor], list[Task]]


@dataclass(frozen=True)
class Part:
    """The tokens of one call of the inner strategy, which works inside one node."""

    own: float = 0.0  # fraction of this rank's tokens that are in the part
    chunk: int | None = None  # index of the part's chunk of tokens from other nodes, or None


@dataclass(frozen=True)
class Pipeline:
    """How an MoE layer across nodes divides its tokens into parts, in the order of execution.

    Example: "split" computes half of this rank's tokens while tokens of other nodes arrive, then
    the tokens of other nodes, then the second half while results return to the other nodes.
    """

    name: str  # shown in results and in the reasons of ``AutoStrategy``
    parts: tuple[Part, ...]  # at most 4

    @property
    def num_chunks(self) -> int:
        return sum(part.chunk is not None for part in self.parts)


_HALF = Part(0.5)
SPLIT = Pipeline("split", (_HALF, Part(0.0, 0), _HALF))
PIPELINES = (
    Pipeline("together", (Part(1.0, 0),)),
    Pipeline("together-2", (Part(1.0, 0), Part(0.0, 1))),
    SPLIT,
    Pipeline("split-2", (_HALF, Part(0.0, 0), Part(0.0, 1), _HALF)),
    Pipeline("late-2", (Part(0.0, 0), Part(1.0, 1))),
    Pipeline("last-2", (Part(0.0, 0), Part(0.0, 1), Part(1.0))),
)


def list_tasks(
    shape: LayerShape,
    predictor: Predictor,
    *,
    num_nodes: int,
    inner: ListTasks,
    pipeline: Pipeline,
    wire_dtype: WireDtype = "",
) -> list[Task]:
    """Return the simulator tasks of a layer across nodes with balanced routing.

    ``inner`` returns the tasks of the experts of one node, for a shape of that node. Forward sends
    tokens in ``wire_dtype``.
    """
    per_node = shape.num_experts // num_nodes
    crossings = shape.num_tokens * (num_nodes - 1)
    crossings *= share_of_tokens(shape, num_experts=per_node)
    row_bytes = shape.hidden_size * shape.itemsize
    num_chunks = pipeline.num_chunks
    token_bytes = shape.hidden_size * FLOAT8_BYTES if wire_dtype == "float8" else row_bytes
    words_bytes = 4.0 * shape.top_k  # weights of a token; its expert ids are as many bytes
    sums_us, tokens_us, gradients_us = (
        predictor.network_us(crossings * num_bytes / num_chunks)
        for num_bytes in (row_bytes, token_bytes + 2.0 * words_bytes, row_bytes + words_bytes)
    )
    add_us = predictor.memory_us((2.0 * crossings + 3.0 * shape.num_tokens) * row_bytes, num_ops=2)
    route_us = predictor.memory_us(16.0 * shape.num_tokens * shape.top_k, num_ops=16)
    route_us += predictor.hardware.link_latency_us + predictor.hardware.read_us
    # With N nodes, 1 / N of the rows of a rank's experts are from tokens of the rank's own node.
    received = (1.0 - 1.0 / num_nodes) / num_chunks
    shares = [
        part.own / num_nodes + (0.0 if part.chunk is None else received) for part in pipeline.parts
    ]
    parts = [_list_part(shape, share, predictor, num_nodes, inner) for share in shares]
    listed = [compute_task("route", route_us, needs=())]
    for backward in (False, True):
        listed += _list_pass(
            [part[backward] for part in parts], chunks=[part.chunk for part in pipeline.parts],
            is_reversed=backward,
            dispatch_us=sums_us if backward else tokens_us,
            combine_us=gradients_us if backward else sums_us,
            add_us=add_us, after=listed[-1].name, suffix=".backward" if backward else "",
        )  # fmt: skip
    weights = _list_part(shape, 1.0, predictor, num_nodes, inner)[2]  # weight gradients, all rows
    weights_us = sum(task.duration_us for task in weights)
    # Weight gradients precede the last task, which waits for token gradients from other nodes.
    listed.insert(len(listed) - 1, compute_task("weights", weights_us, needs=()))
    return listed


def _list_part(
    shape: LayerShape, share: float, predictor: Predictor, num_nodes: int, inner: ListTasks
) -> tuple[list[Task], list[Task], list[Task]]:
    """Return ``inner``'s forward, backward, weight-gradient tasks for a ``share`` of the rows."""
    per_node = shape.num_experts // num_nodes
    top_k = max(1, min(shape.top_k // num_nodes, per_node))
    num_tokens = max(1, round(shape.num_tokens * shape.top_k * share / top_k))
    inside = replace(shape, num_tokens=num_tokens, num_experts=per_node, top_k=top_k)
    inside = replace(inside, ep_size=shape.ep_size // num_nodes, num_groups=1, num_limited_groups=1)
    tasks = inner(inside, predictor)
    first = next((i for i, task in enumerate(tasks) if "backward" in task.name), len(tasks))
    weights = [task for task in tasks[first:] if "weights" in task.name]
    return tasks[:first], [task for task in tasks[first:] if task not in weights], weights


def _list_pass(
    parts: list[list[Task]], *, chunks: list[int | None], is_reversed: bool, dispatch_us: float,
    combine_us: float, add_us: float, after: str, suffix: str,
) -> list[Task]:  # fmt: skip
    """Return simulator tasks of forward or backward: parts, overlapped exchanges, final sum.

    ``chunks`` has the ``Part.chunk`` of each part. ``after`` names the task before the pass.
    Backward runs parts and sends chunks in reverse order.
    """
    listed: list[Task] = []
    order = list(enumerate(zip(parts, chunks, strict=True)))[:: -1 if is_reversed else 1]
    for _, (_, chunk) in order:
        if chunk is not None:
            listed.append(comm_task(f"rail.dispatch{suffix}.{chunk}", dispatch_us, needs=after))
    last = returned = after
    for index, (part, chunk) in order:
        needs = after if chunk is None else f"rail.dispatch{suffix}.{chunk}"
        listed += _rename(part, f"part.{index}", needs=needs)
        last = listed[-1].name
        if chunk is not None:
            returned = f"rail.combine{suffix}.{chunk}"
            listed.append(comm_task(returned, combine_us, needs=last))
    return [*listed, compute_task(f"add{suffix}", add_us, needs=tuple({returned, last}))]


def _rename(tasks: list[Task], suffix: str, *, needs: str) -> list[Task]:
    """Return renamed copies of tasks; a copy that needs no other copy needs the task ``needs``."""
    names = {task.name for task in tasks}
    return [
        replace(
            task,
            name=f"{task.name}.{suffix}",
            needs=tuple(f"{need}.{suffix}" for need in task.needs if need in names) or (needs,),
        )
        for task in tasks
    ]
