"""Experts spread over ranks by hand, for a transformers that cannot do it: 5.0 to 5.18."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from halley.core.routing import local_experts
from halley.integrations.contract import ExpertParallelism
from halley.integrations.transformers.routed_experts import DispatchedExperts, leave
from halley.integrations.transformers.seams import find_seams
from halley.integrations.transformers.weight_layout import find_problem, is_experts


# Names of parameters that DistributedDataParallel leaves alone; it reads them from the module.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


def shard_experts(
    model: nn.Module,
    ep_group: dist.ProcessGroup | DeviceMesh,
    *,
    strategy: str = "auto",
    strict: bool = False,
) -> list[str]:
    """Keep this rank's share of each module's experts, and have Halley bring them their tokens.

    To be called once the weights are loaded, before an optimizer or a wrapper sees the parameters.
    All other parameters stay copies: average their gradients over the ranks, as
    ``DistributedDataParallel`` does, which leaves the experts' alone. An expert's gradient is that
    of the mean of the ranks' losses already.

    Args:
        model: of transformers; each parameter of an experts module becomes its own part,
            ``(E / W, ...)``, under the same name.
        ep_group: all ranks of the job.
        strategy, strict: as for ``register``.

    Returns:
        The names of the parameters that were divided.

    Raises:
        ValueError: the group is not all ranks, the experts do not divide over it, the model has no
            experts; if strict, a module that Halley cannot run.
    """
    find_seams()
    group = ep_group.get_group() if isinstance(ep_group, DeviceMesh) else ep_group
    rank, ep_size = dist.get_rank(group), dist.get_world_size(group)
    if ep_size != dist.get_world_size():
        raise ValueError(
            f"ep_group ({ep_size} ranks) must be all {dist.get_world_size()} ranks: "
            "copies of experts need transformers 5.19 or newer"
        )
    parallelism = ExpertParallelism(strategy, strict=strict)
    divided: list[str] = []
    for prefix, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        if problem := find_problem(module):
            leave(module, problem, parallelism=parallelism)
            continue
        divided += _divide(module, prefix, rank=rank, ep_size=ep_size)
        module.forward = DispatchedExperts(module, group, tp_mesh=None, parallelism=parallelism)
    if not divided:
        raise ValueError(f"model ({type(model).__name__}) must have experts to spread")
    left = getattr(model, _DDP_IGNORES, [])
    setattr(model, _DDP_IGNORES, [*left, *divided])
    return divided


def full_state_dict(
    model: nn.Module, ep_group: dist.ProcessGroup | DeviceMesh
) -> dict[str, torch.Tensor]:
    """Return the state of a model as it was before ``shard_experts``, on the CPU; a collective.

    ``model.save_pretrained(folder, state_dict=full_state_dict(model, ep_group))`` on the first rank
    writes what an undivided model would.
    """
    group = ep_group.get_group() if isinstance(ep_group, DeviceMesh) else ep_group
    divided = set(getattr(model, _DDP_IGNORES, []))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in divided:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat([part.cpu() for part in parts])
        state[name] = tensor.cpu()
    return state


def _divide(experts: Any, prefix: str, *, rank: int, ep_size: int) -> list[str]:
    """Keep this rank's part of each parameter; return their names in the model."""
    num_experts = experts.num_experts
    num_local = local_experts(num_experts, ep_size=ep_size)
    names: list[str] = []
    for name, whole in list(experts.named_parameters(recurse=False)):
        part = whole.detach()[rank * num_local : (rank + 1) * num_local].clone()
        parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
        if parameter.requires_grad:
            # It is the sum over all ranks' tokens, of each rank's own mean loss.
            parameter.register_hook(lambda gradient: gradient / ep_size)
        setattr(experts, name, parameter)
        names.append(f"{prefix}.{name}")
    experts.num_experts = num_local
    return names
