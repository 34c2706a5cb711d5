"""Sort the ways to spread a model over a cluster by the predicted time of a training step.

Experts spread over few ranks stay inside a node: their tokens use the fast link, but each node has
copies of the experts, whose gradients cross the network. Experts spread over many nodes need less
memory and no such gradients, but their tokens cross the network. All ranks do the same work, so the
cost of a prediction does not depend on their number.

The search is exhaustive: every size of expert group that is inside a node or is whole nodes, every
number of ranks that share an expert, each strategy of ``_list_strategies``, with and without
activation checkpointing. Not predicted: all_gather, lanes, 8 bits on the network, the choice of
what fused layers save, and pass wgrad with deduplicated tokens.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from halley.core.config import ModelConfig
from halley.core.timeline import exposed_us, total_us
from halley.core.types import LayerShape, Task
from halley.cost.hardware import Hardware, Predictor
from halley.cost.simulate import HOST, makespan_us, simulate
from halley.fused.config import KernelConfig
from halley.moe.memory_check import num_parameters
from halley.moe.memory_estimate import (
    Parallelism,
    Shard,
    StepMemory,
    estimate_memory,
    expert_weights,
    layer_shape,
)
from halley.planner.dense_time import DenseTimes, dense_times, update_us
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.base import compute_task, gemms_us
from halley.strategies.fused import fused_tasks
from halley.strategies.part_orders import PIPELINES, list_tasks


_GRADIENT_BYTES, _WEIGHT_BYTES = 4.0, 2.0  # of a float32 gradient and a bfloat16 weight, sent
_LEAST_US = 50.0  # differences that ``explain`` names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs; ``hardware`` has the rates of GPU, link and network."""

    hardware: Hardware
    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def count_nodes(self, ep_size: int) -> int:
        """Return the number of nodes over which ``ep_size`` consecutive ranks are spread."""
        return max(1, ep_size // self.ranks_per_node)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread a model, with predicted times of a training step and memory of a GPU.

    ``step_us`` is the sum of ``experts_us``, ``dense_us``, ``update_us`` and ``exposed_us``.
    """

    strategy: str
    passes: str  # "wgrad": the compiler pass that moves weight gradients under all-to-alls
    recompute: bool  # activation checkpointing of each block
    ep_size: int  # ranks over which the experts are spread, including ranks that share an expert
    tp_size: int  # ranks that share each expert
    num_nodes: int  # nodes over which the experts are spread
    num_copies: int  # copies of each expert; all other weights have a copy on each rank
    step_us: float
    experts_us: float  # routed experts, with waits for the host
    dense_us: float  # attention, shared experts, dense layers and head
    update_us: float  # sums, clipping and update of the parameters
    exposed_us: float  # time in which data is sent and nothing is computed
    reduce_us: float  # the part of ``exposed_us`` for gradients, and for weights that FSDP gathers
    tokens_per_s: float  # of one GPU
    memory: StepMemory
    fits: bool  # whether ``memory.peak`` is at most the memory of a device


class _Times(NamedTuple):
    """Predicted us of an MoE layer without shared experts, or of its forward."""

    end_us: float
    exposed_us: float
    wire_us: float  # time in which the layer sends on the wire that gradients use too


def plan_layouts(
    model: ModelConfig,
    cluster: Cluster,
    *,
    num_tokens: int,
    num_microbatches: int = 1,
    seq_len: int = 4096,
    shard: Shard = "all",
) -> list[Layout]:
    """Return all layouts, from fastest to slowest; layouts that exceed the memory come last.

    Routing is balanced, weights and tokens are bfloat16, the optimizer is AdamW.

    Args:
        num_tokens: of a rank, in one microbatch.
        num_microbatches: microbatches of a step.
        seq_len: tokens of a sequence, for the time of attention.
        shard: states that copies of a weight divide among them, see ``moe.memory_estimate``.
    """
    dense = dense_times(
        model, cluster.hardware, num_tokens=num_tokens, seq_len=min(seq_len, num_tokens)
    )
    layouts: list[Layout] = []
    for ep_size, tp_size in _list_sizes(model, cluster):
        shape = layer_shape(model, ep_size=ep_size, num_tokens=num_tokens)
        for strategy, tasks in _list_strategies(
            shape, model, cluster, tp_size=tp_size, dense=dense
        ):
            nodes = {"hierarchical": cluster.count_nodes(ep_size), "deduplicated": ep_size}
            for recompute in (False, True) if strategy != "functional" else (False,):
                placement = Parallelism(
                    strategy=strategy, ep_size=ep_size, tp_size=tp_size, recompute=recompute,
                    num_nodes=nodes.get(strategy, 1), shard=shard,
                    num_ranks=cluster.num_ranks, can_fuse=_can_fuse(model, cluster),
                )  # fmt: skip
                layer = _time_layer(tasks, placement, cluster)
                layouts.append(
                    _predict(
                        model, cluster, placement, layer=layer, dense=dense,
                        num_tokens=num_tokens, num_microbatches=num_microbatches,
                    )
                )  # fmt: skip
    return sorted(layouts, key=lambda each: (not each.fits, each.step_us))


def explain(layouts: list[Layout]) -> str:
    """Tell, in a sentence each, the parts of the first layout's time, and what the second loses.

    A last sentence counts the layouts that do not fit. ``layouts`` are from ``plan_layouts``.
    """
    best, too_large = layouts[0], [each for each in layouts if not each.fits]
    shares = [f"{100 * us / best.step_us:.0f} % {name}" for name, us in _parts(best).items()]
    text = f"{describe(best)} is fastest: {best.step_us / 1e3:,.1f} ms a step, {', '.join(shares)}."
    for other in layouts[1:2]:
        changes = {name: us - _parts(best)[name] for name, us in _parts(other).items()}
        largest = sorted(changes, key=lambda name: -abs(changes[name]))[:3]
        seen = [name for name in largest if abs(changes[name]) >= _LEAST_US]
        made_of = ", ".join(f"{changes[name] / 1e3:+,.1f} ms {name}" for name in seen)
        more_us = other.step_us - best.step_us
        text += (
            f" Next is {describe(other)}: {more_us / 1e3:+,.1f} ms ({made_of or 'the same parts'})."
        )
    if too_large:
        number = "No layout fits" if not best.fits else f"{len(too_large)} layouts do not fit"
        text += f" {number} the memory; the fastest of these, {describe(too_large[0])}, takes "
        text += f"{too_large[0].step_us / 1e3:,.1f} ms and needs "
        text += f"{too_large[0].memory.peak / 1e9:,.0f} GB a GPU."
    return text


def describe(layout: Layout) -> str:
    """Return a layout as a phrase: "hierarchical, 8 x 8 ranks, tp_size 2" (nodes x ranks)."""
    per_node = layout.ep_size // layout.num_nodes
    shared = f", tp_size {layout.tp_size}" if layout.tp_size > 1 else ""
    passes = f" with {layout.passes}" if layout.passes != "none" else ""
    recompute = ", recompute" if layout.recompute else ""
    return f"{layout.strategy}{passes}, {layout.num_nodes} x {per_node} ranks{shared}{recompute}"


def _parts(layout: Layout) -> dict[str, float]:
    return {
        "experts": layout.experts_us,
        "attention and other layers": layout.dense_us,
        "update": layout.update_us,
        "exposed tokens": layout.exposed_us - layout.reduce_us,
        "exposed gradients and weights": layout.reduce_us,
    }


def _list_sizes(model: ModelConfig, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield possible (ep_size, tp_size): numbers of ranks that hold all experts, and one expert.

    ``ep_size`` divides the ranks of a node, or is whole nodes, whose number divides ``num_nodes``.
    """
    local, num_experts = cluster.ranks_per_node, model.moe.num_experts
    inside = [size for size in range(1, local + 1) if local % size == 0]
    across = [n * local for n in range(2, cluster.num_nodes + 1) if cluster.num_nodes % n == 0]
    for ep_size in inside + across:
        for tp_size in (size for size in inside if ep_size % size == 0):
            sets = ep_size // tp_size
            divides = model.moe.intermediate_size % (8 * tp_size) == 0
            if num_experts % sets == 0 and (tp_size == 1 or divides):
                yield ep_size, tp_size


def _can_fuse(model: ModelConfig, cluster: Cluster) -> bool:
    """Return whether Halley's kernels can run the experts inside a node."""
    return cluster.hardware.runs_fused and not model.moe.expert_bias


def _list_strategies(
    shape: LayerShape, model: ModelConfig, cluster: Cluster, *, tp_size: int, dense: DenseTimes
) -> Iterator[tuple[str, list[Task]]]:
    hardware, local, ep_size = cluster.hardware, cluster.ranks_per_node, shape.ep_size
    num_nodes = cluster.count_nodes(ep_size)
    runs_fused = _can_fuse(model, cluster)

    def shards(shape: LayerShape) -> LayerShape:  # each shard of an expert counts as an expert
        return dataclasses.replace(
            shape, intermediate_size=shape.intermediate_size // tp_size,
            num_experts=shape.num_experts * tp_size, top_k=shape.top_k * tp_size,
        )  # fmt: skip

    def inside(shape: LayerShape, predictor: Predictor) -> list[Task]:
        if not runs_fused:
            return all_to_all_tasks(shards(shape), predictor, num_chunks=1)
        columns = KernelConfig().chunk_columns
        return fused_tasks(shards(shape), predictor, chunk_columns=columns, fused=True)

    def across(predictor: Predictor, num_nodes: int) -> list[Task]:
        options = {"num_nodes": num_nodes, "inner": inside}
        orders = [list_tasks(shape, predictor, pipeline=p, **options) for p in PIPELINES]
        return min(orders, key=makespan_us)

    rate = hardware.link_bytes_per_s
    if num_nodes > 1 and hardware.network_bytes_per_s:
        # Of the rows for other ranks, this share is for other nodes. The rest uses the link.
        share = (ep_size - local) / (ep_size - 1)
        rate = min(rate, hardware.network_bytes_per_s / share)
    rates = {"link_bytes_per_s": rate, "network_bytes_per_s": rate}
    predictor = Predictor(dataclasses.replace(hardware, **rates))
    if num_nodes == 1 and runs_fused:
        yield "fused", inside(shape, predictor)
    if num_nodes > 1:
        yield "hierarchical", across(Predictor(hardware), num_nodes)
    if ep_size > 1 and tp_size == 1:
        yield "deduplicated", across(predictor, ep_size)
    sequential = all_to_all_tasks(shards(shape), predictor, num_chunks=1)
    yield "sequential", sequential
    num_chunks = choose_num_chunks(shards(shape), predictor)
    if num_chunks > 1:
        yield "chunked", all_to_all_tasks(shards(shape), predictor, num_chunks=num_chunks)
    if ep_size > 1 and not model.moe.expert_bias:
        layer_us = dense.weights_us / max(1, model.num_moe_layers)
        own = sum(
            gemms_us(
                shards(shape), predictor, num_rows=shards(shape).num_tokens * shards(shape).top_k,
                num_groups=shards(shape).num_experts // ep_size,
            )
        )  # fmt: skip
        yield "functional", _move_weights(sequential, experts_us=own, dense_us=layer_us)


def _move_weights(tasks: list[Task], *, experts_us: float, dense_us: float) -> list[Task]:
    """Return the tasks of a sequential layer after pass wgrad, with other layers' weight gradients.

    Weight gradients of attention run under the first all-to-all of backward, those of the experts
    under the second.
    """
    moved: list[Task] = []
    for task in tasks:
        if task.name == "experts.backward.0":
            task = dataclasses.replace(task, duration_us=task.duration_us - experts_us)
        moved.append(task)
        if task.name == "combine.backward.0":
            moved.append(compute_task("dense.weights", dense_us, needs=("restore.backward",)))
        if task.name == "dispatch.backward.0":
            needs = ("experts.backward.0",)
            moved.append(compute_task("experts.weights", experts_us, needs=needs))
    return moved


def _time_layer(
    tasks: list[Task], placement: Parallelism, cluster: Cluster
) -> tuple[_Times, _Times]:
    """Return the times of a layer's forward and backward together, and those of its forward."""
    spans = simulate(tasks)
    # The host launches backward before forward has ended.
    later = [span for span in spans if "backward" in span.name and span.stream != HOST]
    begin_us = min(span.start_us for span in later)

    def measure(end_us: float) -> _Times:
        ended = [span for span in spans if span.end_us <= end_us]
        comm = [span for span in ended if span.stream == "comm"]
        compute = [span for span in ended if span.stream == "compute"]
        # In hierarchical layers, only "rail" spans use the network; in others, all exchanges do.
        is_mixed = placement.strategy == "hierarchical"
        sent = [span for span in comm if not is_mixed or span.name.startswith("rail")]
        if cluster.count_nodes(placement.ep_size) == 1 < cluster.num_nodes:
            sent = []  # gradients cross the network, and tokens do not
        return _Times(end_us, exposed_us(comm, compute), total_us(sent))

    return measure(max(span.end_us for span in spans)), measure(begin_us)


def _predict(
    model: ModelConfig,
    cluster: Cluster,
    placement: Parallelism,
    *,
    layer: tuple[_Times, _Times],
    dense: DenseTimes,
    num_tokens: int,
    num_microbatches: int,
) -> Layout:
    where, num_layers, hardware = placement, model.num_moe_layers, cluster.hardware
    again = 1.0 if where.recompute else 0.0  # forwards that backward repeats
    forward = _Times(*(num_layers * us for us in layer[1]))
    end_us, exposed, wire = (
        num_layers * both + again * once for both, once in zip(layer[0], forward, strict=True)
    )
    experts = end_us - exposed
    dense_us = dense.forward_us + again * dense.again_us + dense.backward_us
    moved = dense.weights_us if where.strategy == "functional" else 0.0  # in ``layer``
    experts, micro_us = experts - moved, exposed + experts + dense_us - moved
    number = num_parameters(model, ep_size=where.ep_size, tp_size=where.tp_size)
    numbers = {"experts": num_layers * sum(expert_weights(model, ep_size=where.ep_size))}
    numbers["dense"] = number - numbers["experts"]
    send = partial(_send_us, numbers, where, cluster)
    if where.shard == "all":
        # Each microbatch gathers the weights in forward and in backward, and divides the gradients.
        sent = 2 * send(_WEIGHT_BYTES) + send(_GRADIENT_BYTES)
        reduce_us = num_microbatches * max(0.0, wire + sent - micro_us)
    else:
        sent = send(_GRADIENT_BYTES)
        sent += send(_GRADIENT_BYTES if where.shard == "none" else _WEIGHT_BYTES)
        # Gradients are summed in the last backward, while its tokens leave the wire idle.
        idle = micro_us - forward.end_us - dense.forward_us - (wire - forward.wire_us)
        reduce_us = max(0.0, sent - max(0.0, idle))
    update = 0.0
    for kind, count in numbers.items():
        copies = cluster.num_ranks // (where.ep_size if kind == "experts" else 1)
        update += update_us(
            count, hardware, gradients=copies if where.shard == "all" else 1,
            states=copies if where.shard != "none" else 1,
        )  # fmt: skip
    step_us = num_microbatches * micro_us + reduce_us + update
    memory = estimate_memory(model, where, num_tokens=num_tokens, num_microbatches=num_microbatches)
    return Layout(
        strategy=where.strategy, passes="wgrad" if where.strategy == "functional" else "none",
        recompute=where.recompute, ep_size=where.ep_size, tp_size=where.tp_size,
        num_nodes=cluster.count_nodes(where.ep_size), step_us=step_us,
        num_copies=cluster.num_ranks // where.ep_size,
        experts_us=num_microbatches * experts, dense_us=num_microbatches * dense_us,
        update_us=update, exposed_us=num_microbatches * exposed + reduce_us, reduce_us=reduce_us,
        tokens_per_s=num_microbatches * num_tokens / step_us * 1e6, memory=memory,
        fits=not hardware.device_bytes or memory.peak <= hardware.device_bytes,
    )  # fmt: skip


def _send_us(
    numbers: dict[str, float], where: Parallelism, cluster: Cluster, num_bytes: float
) -> float:
    """Return the us to gather ``num_bytes`` of each parameter in a ring of all its copies.

    To divide sums takes as long as to gather them; an all-reduce does both. All copies of a node
    share the network, so each sends its part of the bytes to the next node.
    """
    local = cluster.ranks_per_node
    crossing = inside = 0.0
    for kind, count in numbers.items():
        ep_size = where.ep_size if kind == "experts" else 1
        per_node = max(1, local // ep_size)
        num_nodes = cluster.num_ranks // (ep_size * per_node)
        crossing += count * num_bytes * (1 - 1 / num_nodes) / per_node
        inside += count * num_bytes * (1 - 1 / per_node)
    rate = cluster.hardware.network_bytes_per_s or cluster.hardware.link_bytes_per_s
    return 1e6 * max(crossing / rate, inside / cluster.hardware.link_bytes_per_s)
