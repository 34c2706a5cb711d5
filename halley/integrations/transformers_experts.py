"""Read the weights of one experts module of Transformers, and run it by an ``ExpertRunner``."""

from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from halley.core.types import DROPPED, DTYPES, Experts, Routing
from halley.integrations.contract import (
    ExpertRunner,
    ExpertsFunction,
    LocalExperts,
    set_description,
    to_local,
)
from halley.strategies.traceable import find_one_rank_problem, run_on_one_rank


# Transformers' decorator ``use_experts_implementation`` sets these attributes on experts modules.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Names of SiLU and GELU: the class in Transformers, the class and the function in torch.
_SILU, _GELU = ("SiLUActivation", "SiLU", "silu"), ("GELUActivation", "GELU", "gelu")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the attributes that Transformers sets on experts modules."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def find_problem(module: nn.Module) -> str:
    """Return why Halley cannot replace the forward of a module, or "" if it can."""
    name = type(module).__name__
    if not is_experts(module):
        return f"experts module {name} must be one that transformers' experts interface runs"
    for attribute in (_up_name(module), "down_proj", "num_experts"):
        if not hasattr(module, attribute):
            return f"experts module {name} must have {attribute}"
    return ""


def find_unsupported(module: nn.Module) -> str:
    """Return why no strategy can compute the experts of a module, or "" if one can."""
    experts: Any = module
    dtype = experts.down_proj.dtype
    if dtype not in DTYPES.values():
        return f"dtype ({dtype}) of the experts is none of {', '.join(DTYPES)}"
    if getattr(experts, "has_post_expert_norm", False):
        return "the experts' outputs are normalised"
    if experts.has_gate:
        if type(experts)._apply_gate.__name__ != "_default_apply_gate":
            return "the experts have a gate function of their own"
        if not experts.is_concatenated:
            return "the experts' gate and up columns are interleaved"
    activation = getattr(experts, "act_fn", None)
    found = getattr(activation, "__name__", type(activation).__name__)
    if found not in (_SILU if experts.has_gate else _GELU):
        return f"the experts' activation is {found}"
    return ""


def read_experts(module: nn.Module, function: ExpertsFunction) -> LocalExperts:
    """Return a module's ``LocalExperts``; ``stacked`` is None if no strategy can run the experts.

    Weights must be plain tensors and are not copied. ``function`` is Transformers' code for them.
    """
    experts: Any = module
    num_local = experts.down_proj.shape[0]
    if reason := find_unsupported(module):
        return LocalExperts(num_local=num_local, function=function, reason=reason)
    up_name, biases = _up_name(module), {}
    up, down = getattr(experts, up_name), experts.down_proj
    if experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if experts.has_bias:
        up_bias, down_bias = getattr(experts, f"{up_name}_bias"), experts.down_proj_bias
        biases = {"up_bias_LG": up_bias, "down_bias_LD": down_bias}
    activation = "swiglu" if experts.has_gate else "gelu"
    stacked = Experts(up_LGD=up, down_LDF=down, activation=activation, **biases)
    return LocalExperts(num_local=num_local, function=function, stacked=stacked)


def _up_name(module: nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _experts_function(forward: Any) -> ExpertsFunction:
    """Return an ``ExpertsFunction`` that calls ``forward`` with one expert per row, weight 1."""

    def run(rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        return forward(rows_RD, ids_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))

    return run


@final
class DispatchedExperts:
    """The forward function of a Transformers experts module whose experts are spread over ranks.

    Args:
        experts: the module, which keeps its parameters; its weights may still be on "meta".
        ep: the ranks over which its experts are spread; None for a single rank.
        tp_mesh: ranks with the same tokens, of which each rank processes a share; None without TP.
        runner: runs the experts; if strict, ``ValueError`` for experts that it cannot run.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep: dist.ProcessGroup | DeviceMesh | None,
        *,
        tp_mesh: DeviceMesh | None,
        runner: ExpertRunner,
    ) -> None:
        self.experts = experts
        self.group = ep.get_group() if isinstance(ep, DeviceMesh) else ep
        self.tp_mesh = tp_mesh if tp_mesh is not None and tp_mesh.size() > 1 else None
        self.runner, self._prepared = runner, runner.prepare(self.group)
        self._function = _experts_function(experts.forward)
        if reason := find_unsupported(experts):
            runner.check_supported(reason)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each token's weighted sum of expert outputs, ``(T, D)``; a collective.

        Expert ids are global; -1 stands for a dropped slot.
        """
        tensors = (hidden_states, top_k_index, top_k_weights)
        x_TD, idx_TK, weights_TK = (to_local(tensor) for tensor in tensors)
        num_tokens = x_TD.shape[0]
        if self.tp_mesh is not None:
            x_TD, idx_TK, weights_TK = (
                _take_share(tensor, self.tp_mesh) for tensor in (x_TD, idx_TK, weights_TK)
            )
        experts = read_experts(self.experts, self._function)
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
        y_TD = self.runner.run(
            x_TD, routing, experts, group=self.group, module=self.experts, prepared=self._prepared
        )
        if self.tp_mesh is not None:
            y_TD = _all_gather_rows(y_TD, self.tp_mesh, num_tokens=num_tokens)
        # A model may add shared experts to the result in place. Adding to a view would drop hooks
        # by which FSDP2 all-gathers the experts' weights for backward. So a view is cloned.
        is_view = not torch.compiler.is_compiling() and y_TD._is_view()
        return y_TD.clone() if is_view else y_TD


def run_local_experts(
    experts: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    runner: ExpertRunner,
    fallback: Any,
) -> torch.Tensor:
    """Return each token's weighted sum of the outputs of this module's experts; no communication.

    Expert ids are local; ids past the module's own experts are skipped. ``fallback`` is
    Transformers' own function, for experts that no strategy can run.
    """
    found = read_experts(experts, _experts_function(partial(fallback, experts)))
    if found.stacked is None:
        runner.warn_or_raise(found.reason, fallback="transformers runs them")
        return fallback(experts, hidden_states, top_k_index, top_k_weights)
    idx_TK = top_k_index.masked_fill(top_k_index >= found.num_local, DROPPED)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=top_k_weights)
    if torch.compiler.is_compiling() and not find_one_rank_problem(found.stacked):
        # One rank needs no strategy. Running without one avoids a break of the compiled graph.
        return run_on_one_rank(hidden_states, routing, found.stacked)
    return runner.run(hidden_states, routing, found, group=None)


def leave_to_transformers(experts: nn.Module, problem: str, *, runner: ExpertRunner) -> None:
    """Raise if ``runner`` is strict; else warn, and describe the module as run by Transformers."""
    runner.warn_or_raise(problem, fallback="transformers runs it")
    set_description(experts, f"transformers: {problem}")


def _take_share(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's share of rows that all ranks of the mesh have; backward all-gathers."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(mesh, [Shard(0)]).to_local()


def _all_gather_rows(share_TD: torch.Tensor, mesh: DeviceMesh, *, num_tokens: int) -> torch.Tensor:
    """All-gather rows over the mesh into ``(num_tokens, D)``; ranks may have unequal row counts."""
    shape = torch.Size((num_tokens, share_TD.shape[1]))
    shares = DTensor.from_local(
        share_TD.contiguous(), mesh, [Shard(0)], shape=shape, stride=(share_TD.shape[1], 1)
    )
    return shares.full_tensor()
