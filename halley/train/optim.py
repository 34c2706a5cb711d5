"""Optimizer step of a model whose experts are sharded: float32 state, global clipping, schedule."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from halley.core.config import OptimizerConfig
from halley.distributed.mesh import ParallelGroups, global_norm
from halley.moe.experts import GroupedExperts, grouped_experts
from halley.train.expert_shards import ExpertShards
from halley.train.gradients import Gradients


def learning_rate(config: OptimizerConfig, step: int, *, num_steps: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to ``final_fraction``.

    Args:
        step: from 0.
        num_steps: of the whole run.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


@final
class ModelOptimizer:
    """AdamW or SGD on float32 copies of the parameters, which are the parameters where they can be.

    Decay is for matrices alone.

    Args:
        model: all its parameters are trained.
        groups: which gradients are summed over which ranks.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, *, groups: ParallelGroups
    ) -> None:
        self.config = config
        self.groups = groups
        self.parameters = dict(model.named_parameters())
        self.masters = {
            name: parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
        }
        self.experts = grouped_experts(model)
        self.gradients = Gradients(self.parameters, self.experts, groups=groups)
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, master in self.masters.items():
            # The biases of experts are stacked, but vectors.
            is_vector = master.ndim < 2 or name.endswith("bias")
            (vectors if is_vector else matrices).append(master)
        decay = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        decay = [group for group in decay if group["params"]]
        if config.kind == "sgd":
            self.torch_optimizer = torch.optim.SGD(decay, lr=config.learning_rate)
        else:
            self.torch_optimizer = torch.optim.AdamW(
                decay,
                lr=config.learning_rate,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                # One pass over the state instead of about ten, which are bound by memory.
                fused=next(iter(self.masters.values())).is_cuda,
            )

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Run the backward pass of a microbatch; add its gradients, in float32, to those before.

        Args:
            loss: a scalar, this rank's part of a mean over all its microbatches.
            last: of this step. It begins the sums over the ranks that share a gradient: a
                collective of all ranks.
        """
        with self.gradients.taking(last=last):
            loss.backward()

    @torch.no_grad()
    def sync(self) -> None:
        """Wait for the sums of gradients over ranks."""
        summed = self.gradients.summed()
        for name, master in self.masters.items():
            master.grad = summed[name]
        self._align_replicas({name: summed[name] for name in self.experts})

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Divide summed gradients by the ranks and clip them; a collective of all ranks.

        Returns:
            The global norm before clipping, of the mean over ranks, a float32 scalar.
        """
        dense, expert = self._gradients()
        once = (self.experts[name].count_once(gradient) for name, gradient in expert.items())
        norm = global_norm(dense, once, groups=self.groups) / self.groups.num_ranks
        scale = torch.ones_like(norm)
        if self.config.clip_norm:
            scale = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [*dense, *expert.values()]
        torch._foreach_mul_(gradients, scale / self.groups.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate`` and forget the gradients."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()
        self.gradients.clear()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the float32 copies to the parameters."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps, as tensors that loading writes into.

        Experts are DTensors sharded over the expert-parallel group, so that a checkpoint does not
        depend on its size, nor on how many ranks share an expert.
        """
        state: dict[str, object] = {"parameters": self._sharded(self.masters)}
        if self.config.kind == "adamw":
            for key in ("exp_avg", "exp_avg_sq"):
                moments = {name: self._moments(name)[key] for name in self.masters}
                state[key] = self._sharded(moments)
        return state

    def resume(self, step: int) -> None:
        """Go on after ``step`` steps, once ``state()`` has been read from a checkpoint."""
        if self.config.kind == "adamw":
            for name in self.masters:
                self._moments(name)["step"].fill_(step)
        self.publish()

    def _gradients(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradients of dense parameters, and those of experts by name."""
        dense: list[torch.Tensor] = []
        expert: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            assert master.grad is not None, f"{name} has no gradient"
            if name in self.experts:
                expert[name] = master.grad
            else:
                dense.append(master.grad)
        return dense, expert

    def _align_replicas(self, expert: Mapping[str, torch.Tensor]) -> None:
        """Give replicas the same bits again, where sums over more than two copies may differ.

        Such a sum goes round the ranks from one that depends on the place in the buffer.
        """
        if self.groups.num_ranks <= 2 * self.groups.ep_size:
            return
        for module in dict.fromkeys(self.experts.values()):
            if module.replicas is None:
                continue
            own = [g for name, g in expert.items() if self.experts[name] is module]
            for gradient, aligned in zip(own, module.replicas.take_first(own), strict=True):
                gradient.copy_(aligned)

    def _moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a parameter, made before its first step if need be."""
        master = self.masters[name]
        moments = self.torch_optimizer.state[master]
        if not moments:
            # Where torch makes it: on the device if one kernel does all.
            moments["step"] = torch.zeros((), device=master.device if master.is_cuda else "cpu")
            moments["exp_avg"] = torch.zeros_like(master)
            moments["exp_avg_sq"] = torch.zeros_like(master)
        return moments

    def _sharded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        views = kept_views(tensors, self.experts)
        mesh = self.groups.expert_mesh
        sharded: dict[str, object] = {**views}
        if mesh is None:
            return sharded
        for name, module in self.experts.items():
            view = views[name]
            if not module.is_plain:
                ids, num_experts = module.expert_ids, module.placement.num_experts
                sharded[name] = ExpertShards(view, ids, num_experts)
                continue
            layout: list[Placement] = [Replicate(), Shard(0)]
            if self.groups.tp_size > 1:
                inner = module.sharded_dims[name.rpartition(".")[2]]
                layout.append(Shard(view.ndim + inner.dim))
            sharded[name] = DTensor.from_local(view, mesh, layout)
        return sharded


def kept_views(
    tensors: Mapping[str, torch.Tensor], experts: Mapping[str, GroupedExperts]
) -> dict[str, torch.Tensor]:
    """Return views of parameters, or of what belongs to them, as checkpoints keep them.

    Args:
        tensors: by the names of parameters.
        experts: as ``grouped_experts`` returns them.
    """
    return {
        name: experts[name].kept_view(name.rpartition(".")[2], tensor.detach())
        if name in experts
        else tensor.detach()
        for name, tensor in tensors.items()
    }
