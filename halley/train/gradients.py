"""Gradients in float32: added up over microbatches, summed over ranks beside backward."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from halley.distributed.mesh import BUCKET_BYTES, ParallelGroups
from halley.ops.gradient_hook import set_taker


@dataclass(kw_only=True)
class _Bucket:
    """Gradients that are summed at once, one after another in one buffer.

    Attributes:
        group: the ranks that share them; None for this rank alone.
        buffer: float32; None until the first gradient of a step.
        missing: parameters whose gradient this backward pass has not given yet.
        sum: under way.
    """

    group: dist.ProcessGroup | None
    offsets: dict[str, int] = field(default_factory=dict)
    numel: int = 0
    buffer: torch.Tensor | None = None
    missing: set[str] = field(default_factory=set)
    sum: dist.Work | None = None


@final
class Gradients:
    """What backward passes of a model give its parameters in one step.

    A gradient is taken as soon as autograd has made it, or the graph of a compiled backward pass,
    so that no two of one parameter are in memory for long. In the last backward pass of a step each
    bucket is summed over the ranks that share it once it is full, while the rest of the pass runs;
    buckets follow one another in one order on all ranks.

    Args:
        parameters: by name, in the order of forward; all get a gradient in each step.
        experts: names of those that other ranks of the expert-parallel group do not share.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        experts: Mapping[str, object],
        *,
        groups: ParallelGroups,
    ) -> None:
        self._parameters = parameters
        self._buckets = _fill_buckets(parameters, experts, groups=groups)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.offsets}
        self._taken: set[str] = set()
        self._stream: torch.cuda.Stream | None = None
        self._is_taking = False
        self._waiting: list[_Bucket] = []  # to be summed, the next one last
        for name, parameter in parameters.items():
            set_taker(parameter, partial(self._take, name))

    @contextmanager
    def taking(self, *, last: bool) -> Generator[None]:
        """Take all gradients of the backward pass that runs inside ``with``.

        Args:
            last: of this step; then sums over ranks begin, and leaving is a collective of them.
        """
        device = next(iter(self._parameters.values())).device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._waiting = self._buckets[::-1] if last else []
        for each in self._buckets:
            each.missing = set(each.offsets)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take_from, name))
            for name, parameter in self._parameters.items()
        ]
        self._is_taking = True
        try:
            yield
        finally:
            self._is_taking = False
            for handle in handles:
                handle.remove()
        assert not self._waiting, f"{sorted(self._waiting[-1].missing)} have no gradient"

    def summed(self) -> dict[str, torch.Tensor]:
        """Return the sums over ranks, float32, by name, in their parameters' shapes."""
        for bucket in self._buckets:
            if bucket.sum is not None:
                bucket.sum.wait()
                bucket.sum = None
        return {name: self._view(name) for name in self._parameters}

    def clear(self) -> None:
        """Forget all gradients: a step is done."""
        self._taken.clear()
        for bucket in self._buckets:
            bucket.buffer = None

    def _take_from(self, name: str, parameter: torch.Tensor) -> None:
        """Take what autograd gave a parameter: nothing, where a graph has handed it over."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._take(name, gradient)

    @torch.no_grad()
    def _take(self, name: str, gradient: torch.Tensor) -> None:
        if not self._is_taking:  # somebody's own backward pass, which ends as autograd ends it
            parameter = self._parameters[name]
            before = parameter.grad
            parameter.grad = gradient.clone() if before is None else before + gradient
            return
        bucket = self._bucket_of[name]
        if bucket.buffer is None:
            with torch.cuda.stream(self._stream):  # whose the memory is
                bucket.buffer = gradient.new_empty(bucket.numel, dtype=torch.float32)
        with self._in_order(gradient.device):
            if name in self._taken:
                self._view(name).add_(gradient)
            else:
                # This conversion takes two thirds of the time that ``copy_`` takes.
                torch._foreach_copy_([self._view(name)], [gradient])  # pyright: ignore[reportPrivateImportUsage]
        self._taken.add(name)
        bucket.missing.discard(name)
        while self._waiting and not self._waiting[-1].missing:
            _begin_sum(self._waiting.pop())

    @contextmanager
    def _in_order(self, device: torch.device) -> Generator[None]:
        """Order what runs inside ``with`` on another stream, that of shared experts, by this one's.

        Sums begin on this one, and memory of the buffers is its.
        """
        stream = None if self._stream is None else torch.cuda.current_stream(device)
        if stream is None or self._stream is None or stream == self._stream:
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


def _fill_buckets(
    parameters: Mapping[str, nn.Parameter],
    experts: Mapping[str, object],
    *,
    groups: ParallelGroups,
) -> list[_Bucket]:
    """Return buckets of parameters of one group each, in the order in which backward fills them."""
    buckets: list[_Bucket] = []
    open_buckets: dict[bool, _Bucket] = {}
    for name in reversed(list(parameters)):
        is_expert = name in experts
        bucket = open_buckets.get(is_expert)
        if bucket is None or 4 * bucket.numel >= BUCKET_BYTES:
            bucket = _Bucket(group=groups.edp if is_expert else groups.sums)
            open_buckets[is_expert] = bucket
        bucket.offsets[name] = bucket.numel
        bucket.numel += parameters[name].numel()
        # Last in the list is the bucket that is filled last, as far as is known.
        buckets = [each for each in buckets if each is not bucket] + [bucket]
    return buckets


def _begin_sum(bucket: _Bucket) -> None:
    if bucket.group is not None:
        bucket.sum = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)
