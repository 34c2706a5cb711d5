"""The interface of strategies: ways to run routed experts that are spread over ranks.

A strategy has two descriptions of its work: ``forward`` runs it, and ``tasks`` lists it for the
simulator.
"""

import abc
from dataclasses import dataclass
from math import comb

import torch

from halley.core.routing import chunk_sizes, local_experts
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task, makespan_us


_NUM_CHUNKS = (1, 2, 3, 4, 6, 8)  # candidates of choose_num_chunks


def all_to_all_tasks(shape: LayerShape, predictor: Predictor, *, num_chunks: int) -> list[Task]:
    """Return the tasks of the all-to-all strategy.

    Args:
        shape: the layer.
        predictor: predicts the duration of each task.
        num_chunks: number of chunks, each a range of local experts.
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


def choose_num_chunks(shape: LayerShape, predictor: Predictor) -> int:
    """Return the number of chunks with the shortest simulated forward and backward pass."""
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    candidates = [n for n in _NUM_CHUNKS if n <= num_local]
    return min(
        candidates, key=lambda n: makespan_us(all_to_all_tasks(shape, predictor, num_chunks=n))
    )


def all_gather_tasks(shape: LayerShape, predictor: Predictor) -> list[Task]:
    """Return the tasks of the all-gather strategy, whose traffic does not depend on the routing.

    Args:
        shape: the layer.
        predictor: predicts the duration of each task.
    """
    rows, hidden_bytes = shape.num_tokens * shape.top_k, shape.hidden_size * shape.itemsize
    crossings = shape.num_tokens * (shape.ep_size - 1)
    link_us = predictor.all_to_all_us(crossings * hidden_bytes)
    route_us = predictor.memory_us(16.0 * rows * shape.ep_size, num_ops=12)
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    experts_us = _experts_us(shape, predictor, num_rows=rows, num_groups=num_local)
    # Each rank sums over the slots of all tokens, most of which have no row here.
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
    """Return the tasks of the fused kernels.

    A token crosses the link once to each rank that holds one of its experts, and one partial sum
    returns. Fused kernels overlap at a fine grain, which the tasks approximate: the first GEMM has
    one task for the rows of each source rank, the second GEMM one for each chunk of columns.
    The SMs that communication occupies are not counted.

    Args:
        shape: the layer.
        predictor: predicts the duration of each task.
        chunk_columns: columns of the second GEMM that are combined at once.
        fused: False for the unfused form, one task after another.
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

    fused_pass = _FusedPass(
        num_sources=ranks if fused else 1,
        first_remote=1 if fused else 0,
        num_chunks=-(-hidden // chunk_columns) if fused else 1,
        link_us=link_us,
        expand_us=expand_us,
        sum_us=sum_us,
    )
    tasks = [
        _compute("publish", publish_us, needs=()),
        _compute("plan", plan_us, needs=("publish",)),
        *fused_pass.tasks("", ("up", up_us), ("down", down_us), needs="plan"),
    ]
    tasks.append(_compute("publish.backward", publish_us, needs=(tasks[-1].name,)))
    tasks += fused_pass.tasks(
        ".backward", ("down", down_us), ("up", up_us), needs="publish.backward"
    )
    for name, duration_us in (("down.weights", down_us), ("up.weights", up_us)):
        tasks.append(
            _compute(name, duration_us, needs=(f"down.backward.{fused_pass.num_sources - 1}",))
        )
    return tasks


@dataclass(frozen=True, kw_only=True)
class _FusedPass:
    """One pass of the fused kernels: dispatch, a GEMM, a second GEMM, combine.

    Attributes:
        num_sources: tasks of the first GEMM, one for the rows of each source rank.
        first_remote: the first of them whose rows cross the link.
        num_chunks: tasks of the second GEMM, one for each chunk of columns.
        link_us: duration of all transfers in one direction.
        expand_us: duration of copying each received token to all its experts.
        sum_us: duration of all sums of expert outputs.
    """

    num_sources: int
    first_remote: int
    num_chunks: int
    link_us: float
    expand_us: float
    sum_us: float

    def tasks(
        self, suffix: str, first: tuple[str, float], second: tuple[str, float], *, needs: str
    ) -> list[Task]:
        """Return the tasks; both GEMMs are given by name and duration."""
        tasks: list[Task] = []
        share_us = self.link_us / (self.num_sources - self.first_remote or 1)
        for source in range(self.first_remote, self.num_sources):
            tasks.append(_comm(f"dispatch{suffix}.{source}", share_us, needs=needs))
        for source in range(self.num_sources):
            rows = needs if source < self.first_remote else f"dispatch{suffix}.{source}"
            duration_us = (self.expand_us + first[1]) / self.num_sources
            tasks.append(_compute(f"{first[0]}{suffix}.{source}", duration_us, needs=(rows,)))
        last = tasks[-1].name
        for chunk in range(self.num_chunks):
            name = f"{second[0]}{suffix}.{chunk}"
            tasks.append(_compute(name, second[1] / self.num_chunks, needs=(last,)))
            chunk_us = self.link_us / self.num_chunks
            tasks.append(_comm(f"combine{suffix}.{chunk}", chunk_us, needs=name))
        for chunk in range(self.num_chunks):
            sums = (f"combine{suffix}.{chunk}",)
            chunk_us = self.sum_us / self.num_chunks
            tasks.append(_compute(f"sum{suffix}.{chunk}", chunk_us, needs=sums))
        return tasks


def _reach(shape: LayerShape, num_local: int) -> float:
    """Return the share of tokens with any expert on a given rank, under balanced routing."""
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


class AbstractStrategy(abc.ABC):
    """Runs routed experts that are spread over the ranks of a group. Subclasses are final.

    To add a strategy, implement ``forward`` and ``tasks``.

    Attributes:
        tp_size: adjacent ranks of the group that share each expert, see ``core.sharding``.
    """

    tp_size: int = 1

    @abc.abstractmethod
    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Return the sum, over each token's experts, of weight times expert output, ``(T, D)``.

        A collective: all ranks of the group call it in the same order. Ranks may have different
        numbers of tokens, also none. Differentiable in ``x_TD``, in the routing weights and in the
        experts' weights; backward is a collective too.

        Args:
            x_TD: tokens of this rank, in the dtype of the experts' weights.
            routing: global expert ids and weights of each token.
            experts: the experts of this rank, ids ``[g * L, (g + 1) * L)`` with
                ``g = rank // tp_size``; its shards of them if ``tp_size`` is above 1.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """

    @property
    def gemm(self) -> str:
        """Name of the grouped GEMM; strategies with the same name have equal results, bitwise."""
        return "torch"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        """Return why this strategy cannot run a layer, or ""; the same text on all ranks.

        Args:
            experts: the experts of this rank.
            top_k: experts of each token.
        """
        return ""

    def release(self) -> None:  # noqa: B027 - most strategies have no buffers
        """Free the buffers that the strategy keeps between calls; a collective.

        The next call allocates them again.
        """

    @abc.abstractmethod
    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return the work of one forward and backward pass of one rank, in order of issue.

        Args:
            shape: sizes of the layer.
            predictor: predicts the duration of each task.
        """


def wants_gradients(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> bool:
    """Return whether autograd records a layer with these inputs."""
    tensors = (x_TD, routing.topk_weights_TK, *experts.tensors().values())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_inputs(x_TD: torch.Tensor, experts: Experts) -> None:
    """Check that tokens and experts have the same hidden size, dtype and device.

    Raises:
        ValueError: one of them differs.
    """
    if x_TD.ndim != 2 or x_TD.shape[1] != experts.up_LGD.shape[2]:
        raise ValueError(
            f"x {tuple(x_TD.shape)} must be (num_tokens, hidden_size) with hidden_size "
            f"{experts.up_LGD.shape[2]}"
        )
    if x_TD.dtype != experts.up_LGD.dtype:
        raise ValueError(
            f"x dtype ({x_TD.dtype}) must be that of the experts' weights ({experts.up_LGD.dtype})"
        )
    if x_TD.device != experts.up_LGD.device:
        raise ValueError(
            f"x device ({x_TD.device}) must be that of the experts' weights "
            f"({experts.up_LGD.device})"
        )


def under_autocast(experts: Experts) -> Experts:
    """Return the experts, cast to the dtype of autocast if it is enabled, as for ``F.linear``."""
    kind = experts.up_LGD.device.type
    if not torch.is_autocast_enabled(kind):
        return experts
    dtype = torch.get_autocast_dtype(kind)
    return experts.with_tensors({name: t.to(dtype) for name, t in experts.tensors().items()})
