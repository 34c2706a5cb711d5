"""Use parameters that FSDP2 (``fully_shard``) shards in lanes: unshard, reduce gradients, reshard.

FSDP2 does this in hooks of module calls and of autograd, but lanes run graphs and no modules. Here
the same methods of FSDP2 run once a step: the forward hooks are replaced while Dynamo traces, and
gradient-ready hooks take the place of autograd's. These methods are private: torch has no public
one that reduces gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from halley.ops.gradient_hook import set_gradient_hook


@final
class ShardedParameters:
    """Unshards all parameters of FSDP2 modules for a step, and reduces each group's gradients once.

    A group has the parameters of one ``fully_shard`` call. It is reduced when all its parameters
    have the gradients of all microbatches, under the computation that remains. Groups are reduced
    in reverse order of modules, so that the order is the same on all ranks.
    """

    def __init__(self, loss_function: Callable[..., Any]) -> None:
        modules = loss_function.modules() if isinstance(loss_function, nn.Module) else ()
        self._modules: list[Any] = [each for each in modules if isinstance(each, FSDPModule)]
        self._pending: list[Any] = []  # groups to reduce; the next is at the end
        self._num_missing: dict[Any, int] = {}  # gradients that a group's microbatches still give

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def unsharded(self, num_microbatches: int) -> Iterator[None]:
        """In the block, modules have plain, whole parameters, and no forward hooks of FSDP2.

        Afterwards, ``.grad`` of the sharded parameters has the reduced gradients of the block.
        """
        roots = [module._get_fsdp_state() for module in _find_roots(self._modules)]
        for root in roots:
            root._lazy_init()
            # ``_root_post_backward_final_callback`` of torch 2.15 needs this to be set.
            root._state_ctx.manual_backward_finalization_active = False
        states = list(dict.fromkeys(module._get_fsdp_state() for module in self._modules))
        groups = [group for state in states for group in _groups_of(state)]
        for module in self._modules:
            module.unshard()
        self._pending = groups.copy()
        for group in groups:
            trained = [each for each in group.fsdp_params if each.unsharded_param.requires_grad]
            self._num_missing[group] = num_microbatches * len(trained)
            for each in trained:
                set_gradient_hook(each.unsharded_param, partial(self._add, group, each))
        try:
            with _without_forward_hooks(self._modules):
                yield
            while self._pending:
                _reduce(self._pending.pop())
            for root in roots:
                root._root_post_backward_final_callback()  # waits for the reductions
        finally:
            for group in groups:
                for each in group.fsdp_params:
                    set_gradient_hook(each.unsharded_param, None)
                if group.reshard_after_backward:
                    group.reshard()

    def _add(self, group: Any, sharded: Any, gradient: torch.Tensor) -> None:
        """Add a microbatch's gradient in the dtype in which FSDP2 adds and reduces gradients."""
        parameter = sharded.unsharded_param
        # Since torch 2.15, ``.grad`` itself has this dtype.
        dtype = getattr(sharded, "unsharded_grad_dtype", None) or parameter.dtype
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, dtype=dtype).copy_(gradient)
        else:
            parameter.grad += gradient
        if hasattr(sharded, "accumulate_unsharded_grad_if_needed"):
            sharded.accumulate_unsharded_grad_if_needed()
            sharded.to_accumulated_grad_if_needed()
        self._num_missing[group] -= 1
        while self._pending and not self._num_missing[self._pending[-1]]:
            _reduce(self._pending.pop())


def _reduce(group: Any) -> None:
    reshards, group.reshard_after_backward = group.reshard_after_backward, False
    group.post_backward()  # must not reshard, since other items may read the parameters
    group.reshard_after_backward = reshards


def _find_roots(modules: Sequence[Any]) -> list[Any]:
    """Return the modules that no other one contains; a module comes before those it contains."""
    roots: list[Any] = []
    covered: set[nn.Module] = set()
    for module in modules:
        if module not in covered:
            roots.append(module)
            covered.update(module.modules())
    return roots


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@contextmanager
def _without_forward_hooks(modules: Sequence[Any]) -> Iterator[None]:
    """Replace FSDP2's hooks, which Dynamo cannot trace, by hooks that only cast (mixed precision).

    FSDP2 casts the inputs and outputs of its modules.
    """
    replaced: list[tuple[dict[int, Any], int, Any]] = []
    try:
        for module in modules:
            policy = module._get_fsdp_state()._mp_policy
            dtype = policy.param_dtype if policy.cast_forward_inputs else None
            before = partial(_cast_inputs, dtype=dtype)
            after = partial(_cast_output, dtype=policy.output_dtype)
            for hooks, hook in (
                (module._forward_pre_hooks, before),
                (module._forward_hooks, after),
            ):
                for key, old in hooks.items():
                    if getattr(old, "__module__", "").startswith("torch.distributed.fsdp"):
                        replaced.append((hooks, key, old))
                        hooks[key] = hook
        yield
    finally:
        for hooks, key, old in replaced:
            hooks[key] = old


def _cast_inputs(
    module: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype | None
) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(module: nn.Module, args: Any, output: Any, *, dtype: torch.dtype | None) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of a tree; with ``dtype`` None, return the tree as it is."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree if dtype is None else tree_map(cast, tree)
