"""One experts module of transformers under expert parallelism."""

from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from halley.core.types import DROPPED, Routing
from halley.integrations.contract import ExpertParallelism, mark
from halley.integrations.transformers.weight_layout import find_custom, local_experts, own_forward
from halley.strategies.functional import find_problem_alone, run_alone


@final
class DispatchedExperts:
    """Takes a module's place when tokens go to their experts; the parameters stay the module's.

    Args:
        experts: the module, whose forward is its own yet; its weights may still be on "meta".
        ep: the ranks over which its experts are spread.
        tp_mesh: ranks that hold the same tokens, each of which then takes a part; None for none.
        parallelism: what runs the experts.

    Raises:
        ValueError: ``parallelism`` is strict, and its strategy cannot run this kind of experts.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep: dist.ProcessGroup | DeviceMesh,
        *,
        tp_mesh: DeviceMesh | None,
        parallelism: ExpertParallelism,
    ) -> None:
        self.experts = experts
        self.group = ep.get_group() if isinstance(ep, DeviceMesh) else ep
        self.tp_mesh = tp_mesh if tp_mesh is not None and tp_mesh.size() > 1 else None
        self.parallelism = parallelism
        self._function = own_forward(experts.forward)
        self._described = False
        if problem := find_custom(experts):
            parallelism.check(problem)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums over each token's experts, ``(T, D)``; a collective.

        Args:
            hidden_states: ``(T, D)``.
            top_k_index: global expert ids, ``(T, K)`` int64; -1 for none.
            top_k_weights: ``(T, K)``.
        """
        tensors = (hidden_states, top_k_index, top_k_weights)
        x_TD, idx_TK, weights_TK = (_to_local(tensor) for tensor in tensors)
        num_tokens = x_TD.shape[0]
        if self.tp_mesh is not None:
            x_TD, idx_TK, weights_TK = (
                _take_part(tensor, self.tp_mesh) for tensor in (x_TD, idx_TK, weights_TK)
            )
        experts = local_experts(self.experts, self._function)
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
        y_TD = self.parallelism.run(x_TD, routing, experts, group=self.group)
        if not self._described:
            path = self.parallelism.describe(experts, top_k=idx_TK.shape[1], group=self.group)
            mark(self.experts, f"halley: {path}")
            self._described = True
        if self.tp_mesh is not None:
            y_TD = _join_parts(y_TD, self.tp_mesh, num_tokens=num_tokens)
        # A model may add shared experts to it in place. On a view that would drop the hooks by
        # which FSDP2 gathers the experts' weights for backward.
        return y_TD.clone() if y_TD._is_view() else y_TD


def leave(experts: nn.Module, problem: str, *, parallelism: ExpertParallelism) -> None:
    """Say that transformers runs a module, and why.

    Raises:
        ValueError: ``parallelism`` is strict.
    """
    parallelism.refuse(problem, instead="transformers runs it")
    mark(experts, f"transformers: {problem}")


def run_local_experts(
    experts: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    parallelism: ExpertParallelism,
    otherwise: Any,
) -> torch.Tensor:
    """Return the weighted sums over the experts that a module holds, without communication.

    Args:
        experts: a module that the experts interface runs.
        hidden_states, top_k_weights: as for ``DispatchedExperts``.
        top_k_index: ids among the module's experts; larger ones are of other ranks and add nothing.
        parallelism: what runs the experts.
        otherwise: an experts function of transformers, for a module that no strategy can run.
    """
    found = local_experts(experts, own_forward(partial(otherwise, experts)))
    if found.stacked is None:
        parallelism.refuse(found.reason, instead="transformers runs them")
        return otherwise(experts, hidden_states, top_k_index, top_k_weights)
    idx_TK = top_k_index.masked_fill(top_k_index >= found.num_local, DROPPED)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=top_k_weights)
    if torch.compiler.is_compiling() and not find_problem_alone(found.stacked):
        # Without communication no strategy is needed, and the model stays one graph.
        return run_alone(hidden_states, routing, found.stacked)
    return parallelism.run(hidden_states, routing, found, group=None)


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _take_part(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a tensor that all ranks of the mesh hold; its gradient joins."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _join_parts(part_TD: torch.Tensor, mesh: DeviceMesh, *, num_tokens: int) -> torch.Tensor:
    """Return all ranks' rows on each of them; parts may differ in size, and be empty."""
    shape = torch.Size((num_tokens, part_TD.shape[1]))
    parts = DTensor.from_local(
        part_TD.contiguous(), mesh, [Shard(0)], shape=shape, stride=(part_TD.shape[1], 1)
    )
    return parts.full_tensor()
