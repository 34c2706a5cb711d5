"""Check that the ranks of a group run the same layers in the same order.

Collectives that do not match abort the process, hang, or give wrong numbers. A strategy therefore
compares each new kind of layer across ranks, before the first collective of that kind. Over gloo,
where a mismatch in size aborts the process, it also compares the order of all passes.
"""

from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from halley.core.types import Experts
from halley.distributed.peers import Collective, compare_ranks, name_ranks, time_limit


@final
class Lockstep:
    """Compares across ranks which layer each rank runs, before the collectives of the layer.

    Args:
        strategy: name of the strategy, for messages.
        group: the ranks; None for a single rank.
        tp_size: adjacent ranks that share each expert.
    """

    def __init__(self, strategy: str, *, group: dist.ProcessGroup | None, tp_size: int) -> None:
        self._strategy, self._group, self._tp_size = strategy, group, tp_size
        self._kinds: set[tuple[object, ...]] = set()
        self._guard: Any = None  # a ProcessGroupGloo; torch's type stubs lack its collectives
        self._num_calls = 0

    def begin(self, x_TD: torch.Tensor, experts: Experts, **values: object) -> None:
        """Begin the forward pass of a layer; a collective if its kind is new, or over gloo.

        Does nothing while ``torch.compile`` traces.

        Args:
            x_TD: tokens of this rank.
            experts: experts of this rank.
            values: further values that must be the same on all ranks, by name.

        Raises:
            ValueError: the ranks run different kinds of layers; raised on all ranks.
            RuntimeError: a rank is missing, or runs another pass.
        """
        if self._group is None or torch.compiler.is_compiling():
            return
        size = dist.get_world_size(self._group)
        kind = (x_TD.shape[1], x_TD.dtype, experts.num_local_experts, *values.values())
        if kind not in self._kinds:
            num_experts = experts.num_local_experts * size // self._tp_size
            described = {
                "strategy": self._strategy,
                "hidden_size": x_TD.shape[1],
                "num_experts": num_experts,
                "dtype": x_TD.dtype,
                "tp_size": self._tp_size,
                "device": x_TD.device.type,
            }
            compare_ranks("an MoE layer", described | values, group=self._group)
            self._kinds.add(kind)
        self._num_calls += 1
        if size > 1 and x_TD.device.type == "cpu" and dist.get_backend(self._group) == "gloo":
            self._compare_passes(self._num_calls)

    def end(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return the output, with a hook that compares the backward pass across ranks."""
        if self._guard is not None and y_TD.requires_grad and not torch.compiler.is_compiling():
            number = self._num_calls

            def begin_backward(grad_TD: torch.Tensor) -> None:
                self._compare_passes(-number)

            y_TD.register_hook(begin_backward)
        return y_TD

    def _compare_passes(self, number: int) -> None:
        """Compare the pass that this rank begins with the passes of the other ranks.

        Args:
            number: number of the call, from 1; negative for its backward pass.
        """
        group = self._group
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        if self._guard is None:
            self._guard = _open_guard(group)
        own = torch.tensor([number])
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
    """Return a separate process group of the same ranks; a collective.

    On the user's group, other collectives could match the comparison by mistake.
    """
    store, rank = group.get_group_store(), dist.get_rank(group)
    number = store.add(f"halley/guards/{rank}", 1)
    own_store = PrefixStore(f"halley/guard/{number}", store)
    return dist.ProcessGroupGloo(own_store, rank, dist.get_world_size(group), time_limit(group))


def _describe(number: int) -> str:
    return f"the {'backward' if number < 0 else 'forward'} pass of call {abs(number)}"
