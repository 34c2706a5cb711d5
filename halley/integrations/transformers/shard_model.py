"""Spread the experts of a loaded Transformers model over ranks.

Transformers older than 5.19 has no all-to-all, so every rank loads the full model first.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from halley.core.routing import local_experts
from halley.integrations.contract import ExpertRunner
from halley.integrations.transformers.routed_experts import (
    DispatchedExperts,
    find_problem,
    is_experts,
    leave_to_transformers,
)


# DistributedDataParallel skips the parameters whose names this attribute of the model lists.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"

Group = dist.ProcessGroup | DeviceMesh | None


def shard_model(model: nn.Module, group: Group, *, runner: ExpertRunner) -> list[str]:
    """Keep this rank's share of each module's experts; see ``enable``.

    Returns:
        The names of the parameters that were divided.

    Raises:
        ValueError: see ``enable``.
    """
    group, rank, ep_size = _resolve(group)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ep_size != num_ranks:
        raise ValueError(
            f"group ({ep_size} ranks) must be all {num_ranks} ranks: "
            "copies of experts need transformers 5.19 or newer"
        )
    modules = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not modules:
        raise ValueError(f"model ({type(model).__name__}) must have experts to spread")
    divided: list[str] = []
    for prefix, module in modules:
        if problem := find_problem(module):
            leave_to_transformers(module, problem, runner=runner)
            continue
        if ep_size > 1:
            divided += _divide(module, prefix, rank=rank, ep_size=ep_size)
        module.forward = DispatchedExperts(module, group, tp_mesh=None, runner=runner)
    setattr(model, _DDP_IGNORES, [*getattr(model, _DDP_IGNORES, []), *divided])
    return divided


def full_state_dict(model: nn.Module, group: Group = None) -> dict[str, torch.Tensor]:
    """Return the state of the undivided model on the CPU, after ``enable(model)``; a collective.

    With this state, ``model.save_pretrained(folder, state_dict=state)`` on the first rank writes
    the files of a model that was never divided.

    Args:
        model: one that ``enable(model)`` has divided.
        group: the group given to ``enable``; None for all ranks.
    """
    group, _, ep_size = _resolve(group)
    divided = set(getattr(model, _DDP_IGNORES, []))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in divided:
            shares = [torch.empty_like(tensor) for _ in range(ep_size)]
            dist.all_gather(shares, tensor.contiguous(), group=group)
            tensor = torch.cat([share.cpu() for share in shares])
        state[name] = tensor.cpu()
    return state


def _resolve(group: Group) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return the process group, this rank in it and its size; a group of one without a job."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None, 0, 1
    return group, dist.get_rank(group), dist.get_world_size(group)


def _divide(experts: Any, prefix: str, *, rank: int, ep_size: int) -> list[str]:
    """Replace each parameter by this rank's share of it; return their names in the model."""
    num_local = local_experts(experts.num_experts, ep_size=ep_size)
    names: list[str] = []
    for name, parameter in list(experts.named_parameters(recurse=False)):
        share = parameter.detach()[rank * num_local : (rank + 1) * num_local].clone()
        sharded = nn.Parameter(share, requires_grad=parameter.requires_grad)
        if sharded.requires_grad:
            # Backward sums over the tokens of all ranks, and each rank's loss is a mean of its own.
            sharded.register_hook(lambda gradient: gradient / ep_size)
        setattr(experts, name, sharded)
        names.append(f"{prefix}.{name}")
    experts.num_experts = num_local
    return names
