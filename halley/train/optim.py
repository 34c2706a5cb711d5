"""The optimizer step of a model with sharded experts: float32 state, global clipping, schedule."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from halley.core.config import OptimizerConfig
from halley.distributed.mesh import ParallelGroups, global_norm
from halley.moe.experts import grouped_experts
from halley.train.checkpoint_layout import checkpoint_tensors
from halley.train.gradients import GradientBuckets


def learning_rate(config: OptimizerConfig, step: int, *, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to ``final_fraction``.

    Args:
        step: the step, from 0.
        num_steps: steps of the whole run.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


@final
class ModelOptimizer:
    """AdamW or SGD on float32 master weights.

    A float32 parameter is its own master weight. Weight decay applies to matrices only.

    Args:
        model: the model; all its parameters are trained.
        groups: the process groups of the gradient sums.
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
        self.gradients = GradientBuckets(self.parameters, self.experts, groups=groups)
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, master in self.masters.items():
            # Stacked expert biases have two dimensions but are vectors.
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
                # One pass over the state instead of about ten memory-bound passes.
                fused=next(iter(self.masters.values())).is_cuda,
            )

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Run the backward pass of a microbatch and add its gradients, in float32, to those before.

        Args:
            loss: a scalar, this rank's share of the mean over all its microbatches.
            last: whether it is the last backward pass of the step, which starts the sums over
                ranks. It is then a collective.
        """
        with self.gradients.collecting(last=last):
            loss.backward()

    @torch.no_grad()
    def sync(self) -> None:
        """Wait for the sums of gradients over ranks."""
        summed = self.gradients.wait_for_sums()
        for name, master in self.masters.items():
            master.grad = summed[name]
        self._align_replicas({name: summed[name] for name in self.experts})

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Turn summed gradients into means over ranks and clip them. Collective.

        Returns:
            The global norm of the means before clipping, a float32 scalar.
        """
        dense, expert = self._gradients()
        once = (self.experts[name].without_replicas(gradient) for name, gradient in expert.items())
        norm = global_norm(dense, once, groups=self.groups) / self.groups.num_ranks
        scale = torch.ones_like(norm)
        if self.config.clip_norm:
            scale = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [*dense, *expert.values()]
        torch._foreach_mul_(gradients, scale / self.groups.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters with the learning rate ``rate`` and discard the gradients."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()
        self.gradients.clear()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weights to the parameters."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, object]:
        """Return the tensors of a checkpoint; loading writes into them.

        Experts are DTensors sharded over the expert-parallel group. So a checkpoint does not depend
        on the size of that group, or on the number of ranks that share an expert.
        """
        state: dict[str, object] = {"parameters": self._checkpoint_tensors(self.masters)}
        if self.config.kind == "adamw":
            for key in ("exp_avg", "exp_avg_sq"):
                moments = {name: self._moments(name)[key] for name in self.masters}
                state[key] = self._checkpoint_tensors(moments)
        return state

    def resume(self, step: int) -> None:
        """Continue after ``step`` steps, once a checkpoint has been loaded into ``state()``."""
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
        """Make the gradients of all replicas of an expert bit-equal.

        With more than two ranks, a ring all-reduce adds in an order that depends on the position in
        the buffer, so the sums of replicas may differ in their last bits.
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
        """Return AdamW's state of a parameter; before the first step, create it."""
        master = self.masters[name]
        moments = self.torch_optimizer.state[master]
        if not moments:
            # The device that torch itself uses; the fused kernel needs it on the GPU.
            moments["step"] = torch.zeros((), device=master.device if master.is_cuda else "cpu")
            moments["exp_avg"] = torch.zeros_like(master)
            moments["exp_avg_sq"] = torch.zeros_like(master)
        return moments

    def _checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        return checkpoint_tensors(tensors, self.experts, groups=self.groups)
