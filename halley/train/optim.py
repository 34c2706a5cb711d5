"""The optimizer of a run: sum gradients over ranks during backward, clip, update master weights."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from halley.core.config import OptimizerConfig
from halley.distributed.mesh import BUCKET_BYTES, ParallelGroups, global_norm
from halley.moe.layer import grouped_experts
from halley.ops.gradient_hook import set_gradient_hook


@dataclass(kw_only=True)
class _Bucket:
    """A flat buffer of the gradients of some parameters, which one all-reduce sums over ranks."""

    group: dist.ProcessGroup | None  # ranks over which to sum; None for this rank alone
    offsets: dict[str, int] = field(default_factory=dict)  # index of a parameter's first element
    numel: int = 0
    buffer: torch.Tensor | None = None  # float32; None before the bucket's first gradient of a step
    missing: set[str] = field(default_factory=set)  # parameters that backward has not reached yet
    sum: dist.Work | None = None  # the all-reduce that is running, or None


@final
class GradientBuckets:
    """Adds up the gradients of a step in buckets, and all-reduces the buckets over ranks.

    A gradient is added to its bucket, and its memory freed, as soon as autograd or a compiled
    backward graph produces it. In the last backward pass of a step, the all-reduce of a bucket
    starts when the bucket is full, while backward continues. All ranks start the buckets in the
    same order. ``parameters`` are in forward order, and each must get a gradient in each step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        experts: Mapping[str, object],
        *,
        groups: ParallelGroups,
    ) -> None:
        self._parameters = parameters
        self._buckets: list[_Bucket] = []  # in the order in which backward should fill them
        open_buckets: dict[bool, _Bucket] = {}
        for name in reversed(list(parameters)):
            is_expert = name in experts
            bucket = open_buckets.get(is_expert)
            if bucket is None or 4 * bucket.numel >= BUCKET_BYTES:
                bucket = _Bucket(group=groups.edp if is_expert else groups.sums)
                open_buckets[is_expert] = bucket
            bucket.offsets[name] = bucket.numel
            bucket.numel += parameters[name].numel()
            # Backward reaches parameters in this order, so of these buckets this one fills last.
            self._buckets = [each for each in self._buckets if each is not bucket] + [bucket]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.offsets}
        self._collected: set[str] = set()
        self._stream: torch.cuda.Stream | None = None
        self._is_collecting = False
        self._pending: list[_Bucket] = []  # buckets still to all-reduce; the next is at the end
        for name, parameter in parameters.items():
            set_gradient_hook(parameter, partial(self._add, name))

    @contextmanager
    def collecting(self, *, last: bool) -> Generator[None]:
        """In the block, add gradients to buckets; if ``last``, all-reduce buckets. Collective."""
        device = next(iter(self._parameters.values())).device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pending = self._buckets[::-1] if last else []
        for each in self._buckets:
            each.missing = set(each.offsets)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_autograd_gradient, name))
            for name, parameter in self._parameters.items()
        ]
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            for handle in handles:
                handle.remove()
        assert not self._pending, f"{sorted(self._pending[-1].missing)} have no gradient"

    def wait_for_sums(self) -> dict[str, torch.Tensor]:
        """Wait for the all-reduces; return views of the float32 gradient sums by parameter name."""
        for bucket in self._buckets:
            if bucket.sum is not None:
                bucket.sum.wait()
                bucket.sum = None
        return {name: self._view(name) for name in self._parameters}

    def clear(self) -> None:
        """Free the buffers of the buckets; called after the optimizer step."""
        self._collected.clear()
        for bucket in self._buckets:
            bucket.buffer = None

    def _on_autograd_gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._add(name, gradient)

    @torch.no_grad()
    def _add(self, name: str, gradient: torch.Tensor) -> None:
        if not self._is_collecting:  # a backward pass outside ``collecting``: behave like autograd
            parameter = self._parameters[name]
            before = parameter.grad
            parameter.grad = gradient.clone() if before is None else before + gradient
            return
        bucket = self._bucket_of[name]
        if bucket.buffer is None:
            with torch.cuda.stream(self._stream):  # the main stream must own the memory
                bucket.buffer = gradient.new_empty(bucket.numel, dtype=torch.float32)
        with self._in_order(gradient.device):
            if name in self._collected:
                self._view(name).add_(gradient)
            else:
                # ``_foreach_copy_`` takes two thirds of the time of a ``copy_`` that converts.
                torch._foreach_copy_([self._view(name)], [gradient])  # pyright: ignore[reportPrivateImportUsage]
        self._collected.add(name)
        bucket.missing.discard(name)
        while self._pending and not self._pending[-1].missing:
            bucket = self._pending.pop()
            if bucket.group is not None:
                bucket.sum = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)

    @contextmanager
    def _in_order(self, device: torch.device) -> Generator[None]:
        """Order the block's kernels after earlier and before later kernels of the main CUDA stream.

        The main stream owns the buffers. Autograd may compute a gradient on another stream.
        """
        if self._stream is None or (stream := torch.cuda.current_stream(device)) == self._stream:
            yield
            return
        stream.wait_stream(self._stream)
        yield
        self._stream.wait_stream(stream)

    def _view(self, name: str) -> torch.Tensor:
        parameter, bucket = self._parameters[name], self._bucket_of[name]
        assert bucket.buffer is not None, f"{name} has no gradient"
        offset = bucket.offsets[name]
        return bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape)


def learning_rate(config: OptimizerConfig, step: int, *, num_steps: int) -> float:
    """Return a step's learning rate: linear warm-up, then cosine to ``final_fraction`` of peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


@final
class ModelOptimizer:
    """AdamW or SGD on float32 master weights; a float32 parameter is its own master weight.

    Weight decay applies to matrices only.
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
        by_decay: dict[float, list[nn.Parameter]] = {}
        for name, master in self.masters.items():
            # Stacked expert biases have two dimensions but are vectors, without weight decay.
            is_vector = master.ndim < 2 or name.endswith("bias")
            by_decay.setdefault(0.0 if is_vector else config.weight_decay, []).append(master)
        decay = [{"params": each, "weight_decay": rate} for rate, each in by_decay.items()]
        if config.kind == "sgd":
            self.torch_optimizer = torch.optim.SGD(decay, lr=config.learning_rate)
        else:
            self.torch_optimizer = torch.optim.AdamW(
                decay,
                lr=config.learning_rate,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                # The fused kernel reads the optimizer state once, instead of about ten times.
                fused=next(iter(self.masters.values())).is_cuda,
            )

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Run backward of one microbatch; add its gradients to the sums over earlier microbatches.

        The caller divides ``loss`` by the number of microbatches. If ``last``, this call also
        starts the all-reduces of the gradients, and is a collective.
        """
        with self.gradients.collecting(last=last):
            loss.backward()

    @torch.no_grad()
    def sync(self) -> None:
        """Wait for the all-reduces; set ``grad`` of the master weights to the sums. Collective."""
        summed = self.gradients.wait_for_sums()
        for name, master in self.masters.items():
            master.grad = summed[name]
        # Over more than two ranks, an all-reduce adds in an order that depends on an element's
        # position. Replicas of an expert may get different sums, so all take the first replica's.
        if self.groups.num_ranks > 2 * self.groups.ep_size:
            for module in dict.fromkeys(self.experts.values()):
                if module.replicas is not None:
                    own = [summed[name] for name in self.experts if self.experts[name] is module]
                    for gradient, first in zip(own, module.replicas.take_first(own), strict=True):
                        gradient.copy_(first)

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Average gradients over ranks, clip them; return the norm before clipping. Collective."""
        gradients = self.gradients.wait_for_sums()  # does not wait: ``sync`` has waited
        dense = [gradient for name, gradient in gradients.items() if name not in self.experts]
        once = [self.experts[name].without_replicas(gradients[name]) for name in self.experts]
        norm = global_norm(dense, once, groups=self.groups) / self.groups.num_ranks
        scale = torch.ones_like(norm)
        if self.config.clip_norm:
            scale = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        scale /= self.groups.num_ranks
        torch._foreach_mul_(list(gradients.values()), scale)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update master weights and parameters at the learning rate ``rate``; free gradients."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()
        self.gradients.clear()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy float32 master weights, rounded to the parameters' dtype, into the parameters."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, object]:
        """Return the tensors that a checkpoint saves and loads: master weights, AdamW moments."""
        # Imported here, because the import of torch.distributed.checkpoint takes a second.
        from halley.train.checkpoint_reader import checkpoint_tensors

        tensors: dict[str, Mapping[str, torch.Tensor]] = {"parameters": self.masters}
        if self.config.kind == "adamw":
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[key] = {name: self._moments(name)[key] for name in self.masters}
        return {
            key: checkpoint_tensors(each, self.experts, groups=self.groups)
            for key, each in tensors.items()
        }

    def resume(self, step: int) -> None:
        """After a load into ``state()``, set AdamW's step and copy master weights to parameters."""
        if self.config.kind == "adamw":
            for name in self.masters:
                self._moments(name)["step"].fill_(step)
        self.publish()

    def _moments(self, name: str) -> dict[str, torch.Tensor]:
        master = self.masters[name]
        moments = self.torch_optimizer.state[master]
        if not moments:
            # AdamW keeps "step" on the CPU, but its fused kernel, for GPUs, reads it on the GPU.
            moments["step"] = torch.zeros((), device=master.device if master.is_cuda else "cpu")
            moments["exp_avg"] = torch.zeros_like(master)
            moments["exp_avg_sq"] = torch.zeros_like(master)
        return moments
