"""Sort the ways to spread a model's experts over a cluster by the predicted time of an MoE layer.

Experts spread over few ranks stay inside a node: their tokens use the fast link, but each node has
copies of the experts, whose gradients cross the network. Experts spread over many nodes need less
memory and no such gradients, but their tokens cross the network. All ranks do the same work, so the
cost of a prediction does not depend on their number.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

from halley.core.config import ModelConfig
from halley.core.timeline import exposed_us, total_us
from halley.core.types import LayerShape, Task
from halley.cost.hardware import Hardware, Predictor
from halley.cost.simulate import makespan_us, simulate
from halley.fused.config import KernelConfig
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.fused import fused_tasks
from halley.strategies.part_orders import PIPELINES, list_tasks


_WEIGHT_BYTES = 4  # a bfloat16 weight and its gradient
_STATE_BYTES = 12  # float32 weight and two Adam moments, divided over expert copies as in ZeRO-1
_GRADIENT_BYTES = 2  # of a gradient in bfloat16, as it crosses the network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs; ``hardware`` has the rates of GPU, link and network."""

    hardware: Hardware
    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread experts, with predicted times of one MoE layer (forward plus backward)."""

    strategy: str
    ep_size: int  # ranks over which the experts are spread, including ranks that share an expert
    tp_size: int  # ranks that share each expert
    num_nodes: int  # nodes over which the experts are spread
    layer_us: float
    compute_us: float  # of the layer, without waits
    exposed_us: float  # time in which tokens or gradients are sent and nothing is computed
    reduce_us: float  # time to reduce gradients over expert copies, divided by ``num_microbatches``
    expert_bytes: float  # weights, gradients and optimizer state of a rank's experts in all layers
    fits: bool  # whether ``expert_bytes`` is at most the memory of a device


def plan_layouts(
    model: ModelConfig, cluster: Cluster, *, num_tokens: int, num_microbatches: int = 1
) -> list[Layout]:
    """Return all layouts, from fastest to slowest; layouts that exceed the memory come last.

    Routing is balanced and tensors are bfloat16. Gradients are assumed to be reduced while the
    network is idle; the time beyond this idle time is exposed.

    Args:
        num_tokens: of a rank, in one microbatch.
        num_microbatches: microbatches of a step, which reduces the gradients once.
    """
    predict = partial(_predict, model, cluster, num_microbatches=num_microbatches)
    layouts = [
        predict(sizes=sizes, strategy=strategy, tasks=tasks)
        for sizes in _list_sizes(model, cluster)
        for strategy, tasks in _list_strategies(model, cluster, sizes=sizes, num_tokens=num_tokens)
    ]
    return sorted(layouts, key=lambda each: (not each.fits, each.layer_us))


def explain(layouts: list[Layout]) -> str:
    """Compare, in sentences, the best layout inside a node with the best layout across nodes.

    ``layouts`` are sorted by ``plan_layouts``. If all are of one kind, only the first is described.
    """
    best = layouts[0]
    text = f"{describe(best)} is fastest: {best.layer_us / 1e3:.2f} ms a layer, "
    text += f"{100 * best.exposed_us / best.layer_us:.0f} % of it exposed communication."
    if not best.fits:
        text += " No layout fits the memory."
    crosses = best.num_nodes > 1
    for other in layouts[1:]:
        if (other.num_nodes > 1) != crosses:
            where = "inside a node" if crosses else "across nodes"
            text += f" The best {where} ({describe(other)}) takes {other.layer_us / 1e3:.2f} ms"
            if not other.fits:
                size = other.expert_bytes / 1e9
                text += f" and does not fit: its experts need {size:,.0f} GB a GPU"
            elif other.reduce_us > other.compute_us:
                text += f", as gradients of expert copies take {other.reduce_us / 1e3:.2f} ms"
            return text + "."
    return text


def describe(layout: Layout) -> str:
    """Return a layout as a phrase: "hierarchical, 8 x 8 ranks, tp_size 2" (nodes x ranks)."""
    per_node = layout.ep_size // layout.num_nodes
    shared = f", tp_size {layout.tp_size}" if layout.tp_size > 1 else ""
    return f"{layout.strategy}, {layout.num_nodes} x {per_node} ranks{shared}"


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


def _list_strategies(
    model: ModelConfig, cluster: Cluster, *, sizes: tuple[int, int], num_tokens: int
) -> Iterator[tuple[str, list[Task]]]:
    ep_size, tp_size = sizes
    hardware, local = cluster.hardware, cluster.ranks_per_node
    num_nodes = max(1, ep_size // local)
    moe, router = model.moe, model.moe.router
    shape = LayerShape(
        num_tokens=num_tokens, hidden_size=model.hidden_size,
        intermediate_size=moe.intermediate_size, num_experts=moe.num_experts, top_k=moe.top_k,
        ep_size=ep_size, activation=moe.activation, num_groups=router.num_groups,
        num_limited_groups=router.num_limited_groups,
    )  # fmt: skip

    def shards(shape: LayerShape) -> LayerShape:  # each shard of an expert counts as an expert
        return dataclasses.replace(
            shape, intermediate_size=shape.intermediate_size // tp_size,
            num_experts=shape.num_experts * tp_size, top_k=shape.top_k * tp_size,
        )  # fmt: skip

    def inside(shape: LayerShape, predictor: Predictor) -> list[Task]:
        if not hardware.runs_fused:
            return all_to_all_tasks(shards(shape), predictor, num_chunks=1)
        columns = KernelConfig().chunk_columns
        return fused_tasks(shards(shape), predictor, chunk_columns=columns, fused=True)

    rate = hardware.link_bytes_per_s
    if num_nodes > 1 and hardware.network_bytes_per_s:
        # Of the rows for other ranks, this share is for other nodes. The rest uses the link.
        share = (ep_size - local) / (ep_size - 1)
        rate = min(rate, hardware.network_bytes_per_s / share)
    predictor = Predictor(dataclasses.replace(hardware, link_bytes_per_s=rate))
    if num_nodes == 1 and hardware.runs_fused:
        yield "fused", inside(shape, predictor)
    if num_nodes > 1:
        options = {"num_nodes": num_nodes, "inner": inside}
        orders = [list_tasks(shape, Predictor(hardware), pipeline=p, **options) for p in PIPELINES]
        yield "hierarchical", min(orders, key=makespan_us)
    num_chunks = choose_num_chunks(shards(shape), predictor)
    yield "sequential", all_to_all_tasks(shards(shape), predictor, num_chunks=1)
    if num_chunks > 1:
        yield "chunked", all_to_all_tasks(shards(shape), predictor, num_chunks=num_chunks)


def _predict(
    model: ModelConfig,
    cluster: Cluster,
    *,
    sizes: tuple[int, int],
    strategy: str,
    tasks: list[Task],
    num_microbatches: int,
) -> Layout:
    (ep_size, tp_size), hardware, moe = sizes, cluster.hardware, model.moe
    num_nodes = max(1, ep_size // cluster.ranks_per_node)
    spans = simulate(tasks)
    comm = [span for span in spans if span.stream == "comm"]
    compute = [span for span in spans if span.stream == "compute"]
    up_size = moe.intermediate_size * (2 if moe.activation == "swiglu" else 1)
    weights = moe.num_experts * model.hidden_size * (up_size + moe.intermediate_size) / ep_size
    copies = cluster.num_ranks // ep_size
    crossing = 2.0 * weights * _GRADIENT_BYTES * (1.0 - 1.0 / copies)  # a ring all-reduce
    predictor = Predictor(hardware)
    send_us = predictor.network_us if cluster.num_nodes > 1 else predictor.all_to_all_us
    reduce_us = send_us(crossing) / num_microbatches if copies > 1 else 0.0
    end_us = max(span.end_us for span in spans)
    # In hierarchical layers, only "rail" spans use the network; in other layers, all exchanges do.
    sent = [span for span in comm if strategy != "hierarchical" or span.name.startswith("rail")]
    busy_us = total_us(sent) if num_nodes > 1 else 0.0
    layer_us = max(end_us, busy_us + reduce_us)
    per_weight = _WEIGHT_BYTES + _STATE_BYTES / copies
    expert_bytes = weights * per_weight * model.num_moe_layers
    return Layout(
        strategy=strategy, ep_size=ep_size, tp_size=tp_size, num_nodes=num_nodes,
        layer_us=layer_us, compute_us=total_us(compute),
        exposed_us=exposed_us(comm, compute) + layer_us - end_us, reduce_us=reduce_us,
        expert_bytes=expert_bytes,
        fits=not hardware.device_bytes or expert_bytes <= hardware.device_bytes,
    )  # fmt: skip
