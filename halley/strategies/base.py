"""The interface of strategies, and the checks and helpers that strategies share."""

import abc
from collections.abc import Callable
from functools import partial
from math import comb
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import Predictor
from halley.distributed.peers import Collective, compare_ranks, name_ranks, time_limit


# Part of the time of communication that is added to a GEMM beside it: communication occupies SMs.
BESIDE = 0.37  # fitted: docs/predictions.md
_EAGER = 1.06  # time of torch's grouped GEMM / time of Halley's kernels: docs/predictions.md
FUSED_CAPABILITY = (9, 0)  # Hopper: the kernels use the Tensor Memory Accelerator (TMA)
PartRunner = Callable[[torch.Tensor, Routing], torch.Tensor]


def share_of_tokens(shape: LayerShape, *, num_experts: int) -> float:
    """Return the share of tokens that choose any of ``num_experts`` consecutive experts.

    These experts are part of one router group, or whole router groups. Routing is uniform: over
    the groups, then over the experts of the groups that a token may use.
    """
    groups, limit = shape.num_groups, shape.num_limited_groups
    size = shape.num_experts // groups
    here = max(1, num_experts // size)  # router groups that contain these experts
    elsewhere = 0
    for used in range(min(here, limit) + 1):  # number of these groups that a token uses
        free = limit * size - used * min(size, num_experts)
        ways = comb(here, used) * comb(groups - here, limit - used)
        elsewhere += ways * comb(free, shape.top_k)
    return 1.0 - elsewhere / (comb(groups, limit) * comb(limit * size, shape.top_k))


class AbstractStrategy(abc.ABC):
    """A way to run routed experts that are spread over the ranks of a group.

    To add a strategy, implement ``forward`` and ``tasks`` in a final subclass.

    Attributes:
        tp_size: number of adjacent ranks that share each expert, see ``core.routing``.
    """

    tp_size: int = 1

    @abc.abstractmethod
    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Return each token's weighted sum of the outputs of its experts, ``(T, D)``.

        A collective: all ranks of the group call it in the same order. The number of tokens may
        differ between ranks and may be 0. Differentiable in ``x_TD``, in the routing weights and in
        the experts' weights; backward is a collective too.

        Args:
            x_TD: tokens of this rank, in the dtype of the experts' weights.
            routing: global expert ids and weights of each token.
            experts: this rank's experts, or its shards of them, with ids ``[g * L, (g + 1) * L)``
                where ``g = rank // tp_size``.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """

    def open_parts(self, experts: Experts) -> PartRunner:
        """Return a function that runs the layer for some of its tokens; call it at most 4 times.

        Strategies that compute the weight gradients of all calls at once override this method.
        """
        return lambda x_TD, routing: self.forward(x_TD, routing, experts)

    @property
    def gemm(self) -> str:
        """Name of the GEMM implementation; benchmarks check that equal names give equal bits."""
        return "torch"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        """Return why this strategy cannot run a layer, or ""; the text may differ between ranks."""
        return ""

    def release(self) -> None:  # noqa: B027 - most strategies have no buffers
        """Free the buffers kept between layer calls; a collective. The next call makes new ones."""

    @abc.abstractmethod
    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return one rank's forward and backward work as simulator tasks, in order of issue."""


def wants_gradients(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> bool:
    """Return whether a layer with these inputs needs a backward pass."""
    tensors = (x_TD, routing.topk_weights_TK, *experts.tensors().values())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_inputs(x_TD: torch.Tensor, experts: Experts) -> None:
    """Raise a ``ValueError`` unless tokens and experts agree in hidden size, dtype and device."""
    weight = experts.up_LGD
    if x_TD.ndim != 2 or x_TD.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x {tuple(x_TD.shape)} must be (num_tokens, hidden_size) with hidden_size "
            f"{weight.shape[2]}"
        )
    for name in ("dtype", "device"):
        found, wanted = getattr(x_TD, name), getattr(weight, name)
        if found != wanted:
            raise ValueError(f"x {name} ({found}) must be that of the experts' weights ({wanted})")


def under_autocast(experts: Experts) -> Experts:
    """Return the experts; if autocast is enabled, cast to its dtype, as ``F.linear`` does."""
    kind = experts.up_LGD.device.type
    if not torch.is_autocast_enabled(kind):
        return experts
    dtype = torch.get_autocast_dtype(kind)
    return experts.with_tensors({name: t.to(dtype) for name, t in experts.tensors().items()})


@final
class Lockstep:
    """Check that all ranks of a group run equal kinds of layers, and over gloo in the same order.

    Collectives that do not match abort the process, hang, or return wrong numbers. Each new kind of
    layer is therefore compared across ranks before its first collective. Over gloo, where a
    mismatch in size aborts the process, the order of all passes is compared too.
    """

    def __init__(self, strategy: str, *, group: dist.ProcessGroup | None, tp_size: int) -> None:
        self._strategy, self._group, self._tp_size = strategy, group, tp_size
        self._kinds: set[tuple[object, ...]] = set()
        self._guard: Any = None  # a ProcessGroupGloo; torch's type stubs lack its collectives
        self._num_calls = 0

    def begin(self, x_TD: torch.Tensor, experts: Experts, **values: object) -> None:
        """Compare a layer across ranks before forward; a collective if its kind is new, or on gloo.

        ``values`` must be the same on all ranks too. Different kinds of layers are a ``ValueError``
        on all ranks, a missing rank or one in another pass is a ``RuntimeError``.
        """
        if self._group is None or torch.compiler.is_compiling():
            return
        size = dist.get_world_size(self._group)
        kind = (x_TD.shape[1], x_TD.dtype, experts.num_local_experts, *values.values())
        if kind not in self._kinds:
            described = {
                "strategy": self._strategy,
                "hidden_size": x_TD.shape[1],
                "num_experts": experts.num_local_experts * size // self._tp_size,
                "dtype": x_TD.dtype,
                "tp_size": self._tp_size,
                "device": x_TD.device.type,
            }
            compare_ranks("an MoE layer", described | values, group=self._group)
            self._kinds.add(kind)
        self._num_calls += 1
        if size > 1 and x_TD.device.type == "cpu" and dist.get_backend(self._group) == "gloo":
            self._compare_passes(self._num_calls, self._group)

    def end(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; over gloo, add a hook that compares backward across ranks."""
        number, group = self._num_calls, self._group
        is_compared = self._guard is not None and y_TD.requires_grad
        if is_compared and group is not None and not torch.compiler.is_compiling():
            # The hook of the output runs first in backward, before the collectives of the layer.
            y_TD.register_hook(lambda _grad_TD: self._compare_passes(-number, group))
        return y_TD

    def _compare_passes(self, number: int, group: dist.ProcessGroup) -> None:
        """Raise RuntimeError unless all ranks begin pass ``number``; negative for a backward."""
        if self._guard is None:
            self._guard = _open_guard(group)
        own = torch.tensor([number])
        ranks = dist.get_process_group_ranks(group)
        found = [torch.empty_like(own) for _ in ranks]
        name = f"the start of {_describe(number)} of strategy {self._strategy}"
        with Collective(name, group=group):
            self._guard.allgather([found], [own]).wait()
        ranks_of: dict[int, list[int]] = {}
        for rank, value in zip(ranks, found, strict=True):
            ranks_of.setdefault(int(value), []).append(rank)
        if len(ranks_of) > 1:
            places = ", ".join(f"{name_ranks(r)} in {_describe(n)}" for n, r in ranks_of.items())
            raise RuntimeError(
                f"rank {dist.get_rank()}: the ranks run different passes of strategy "
                f"{self._strategy}: {places}; all ranks must run their layers, forward and "
                "backward, in the same order"
            )


def _open_guard(group: dist.ProcessGroup) -> Any:
    """Return a gloo process group of the same ranks, used only to compare passes; a collective."""
    # In the user's group, a rank's comparison could be paired with another collective.
    store, rank = group.get_group_store(), dist.get_rank(group)
    number = store.add(f"halley/guards/{rank}", 1)
    own_store = PrefixStore(f"halley/guard/{number}", store)
    return dist.ProcessGroupGloo(own_store, rank, dist.get_world_size(group), time_limit(group))


def _describe(number: int) -> str:
    return f"the {'backward' if number < 0 else 'forward'} pass of call {abs(number)}"


def compute_task(name: str, duration_us: float, *, needs: tuple[str, ...]) -> Task:
    """Return a simulator task of the compute stream."""
    return Task(name=name, stream="compute", duration_us=duration_us, needs=needs)


def comm_task(name: str, duration_us: float, *, needs: str) -> Task:
    """Return a simulator task of the communication stream; ``needs`` is a task name or ""."""
    return Task(name=name, stream="comm", duration_us=duration_us, needs=(needs,) if needs else ())


def gemms_us(
    shape: LayerShape, predictor: Predictor, *, num_rows: float, num_groups: int
) -> tuple[float, float]:
    """Return predicted durations of the two grouped GEMMs of a rank's ``num_groups`` experts."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    predict = partial(predictor.grouped_gemm_us, num_rows, num_groups, itemsize=shape.itemsize)
    return predict(inner=hidden, outer=shape.up_size), predict(inner=inner, outer=hidden)


def experts_us(
    shape: LayerShape, predictor: Predictor, *, num_rows: float, num_groups: int
) -> tuple[float, float]:
    """Return predicted forward and backward microseconds of a rank's experts and row reordering."""
    gemm_us = _EAGER * sum(gemms_us(shape, predictor, num_rows=num_rows, num_groups=num_groups))
    column_us = num_rows * shape.itemsize / predictor.hardware.fused_bytes_per_s * 1e6
    # Numbers of (R, F) tensors that the activation's kernels read and write, forward and backward.
    forward, backward = (5, 13) if shape.activation == "swiglu" else (2, 3)
    moved, inner = 4 * shape.hidden_size, shape.intermediate_size
    forward_us = gemm_us + column_us * (moved + forward * inner)
    return forward_us, 2 * gemm_us + column_us * (moved + backward * inner)
