"""Experts of Megatron-Core as two stacks of matrices, saved as Megatron saves its own."""

from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.types import DTYPES, Experts
from halley.integrations.contract import LocalExperts
from halley.integrations.megatron.mcore import megatron


_LAYERS = {"weight1": "linear_fc1", "weight2": "linear_fc2"}  # by parameter, as SequentialMLP's


@final
class StackedExperts(megatron.MegatronModule):
    """The experts of one rank, without biases.

    ``weight1`` is ``(L, 2F, D)``, gate rows first, or ``(L, F, D)`` without a gate; ``weight2`` is
    ``(L, D, F)``. They start with the values that Megatron's ``SequentialMLP`` starts with, and
    its checkpoints are theirs.

    Args:
        num_local_experts: L.
        config: Megatron's, without what ``layer.find_problem`` finds.
        pg_collection: Megatron's process groups; those of the experts are read.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        groups = pg_collection or megatron.get_default_pg_collection()
        self.num_local_experts = num_local_experts
        self.ep_group, self.dp_group = groups.ep, groups.expt_dp
        size = config.moe_ffn_hidden_size
        columns = size * (2 if config.gated_linear_unit else 1)
        on_cpu = config.use_cpu_initialization
        place = {
            "dtype": config.params_dtype,
            "device": None if on_cpu else torch.cuda.current_device(),
        }
        shapes = ((columns, config.hidden_size), (config.hidden_size, size))
        for axis, (name, shape) in enumerate(zip(_LAYERS, shapes, strict=True)):
            weight: Any = nn.Parameter(torch.empty(num_local_experts, *shape, **place))
            megatron.set_tensor_model_parallel_attributes(weight, True, axis + 1, 1)
            # Megatron averages gradients over the ranks with the same experts where it is False.
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(name, weight)
        self.register_load_state_dict_post_hook(_forget_extra_state)
        self._gives = False
        if config.perform_initialization:
            self._initialize(on_cpu=on_cpu)

    def local_experts(self) -> LocalExperts:
        """Return the weights as strategies take them where they can."""
        reason = self._find_custom()
        stacked = None
        if not reason:
            up, down = self.weight1, self.weight2
            if self.config.gradient_accumulation_fusion:
                self._give_gradients()
            else:
                # Views have no ``main_grad``: their gradients are what Megatron adds to it itself.
                up, down = up.view_as(up), down.view_as(down)
            activation = "swiglu" if self.config.gated_linear_unit else "gelu"
            stacked = Experts(up_LGD=up, down_LDF=down, activation=activation)
        return LocalExperts(
            num_local=self.num_local_experts,
            function=self._apply_own,
            stacked=stacked,
            reason=reason,
        )

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed with the others."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return each expert's matrices under the keys that ``SequentialMLP`` and TE's have."""
        alone = (metadata or {}).get("singleton_local_shards", False)
        num_experts = self.ep_group.size() * self.num_local_experts
        first = self.ep_group.rank() * self.num_local_experts
        replica = (0, 0, self.dp_group.rank())
        axis = len(sharded_offsets)
        places = [
            (f"{index}." if alone else "", sharded_offsets if alone else (*sharded_offsets, own))
            for index in range(first, first + self.num_local_experts)
            for own in [(axis, index, num_experts)]
        ]
        state: dict[str, Any] = {}
        for name, layer in _LAYERS.items():
            gated = name == "weight1" and self.config.gated_linear_unit
            state[f"{prefix}{name}"] = megatron.ShardedTensorFactory(
                f"{prefix}experts.{layer}.weight",
                self.get_parameter(name),
                partial(_divide, tail=f"{layer}.weight", places=places, gated=gated, alone=alone),
                partial(_join, gated=gated),
                replica,
            )
            # What Transformer Engine keeps beside a matrix; Megatron's own layers have none.
            for index, (own, offsets) in enumerate(places, start=first):
                key = f"{layer}._extra_state"
                extra = megatron.make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{own}{key}", offsets, replica
                )
                state[f"{prefix}expert{index}.{key}"] = extra
        return state

    def _initialize(self, *, on_cpu: bool) -> None:
        """Fill one expert after another, as Megatron does, from the same stream of numbers."""
        name = megatron.get_expert_parallel_rng_tracker_name()
        stream = nullcontext() if on_cpu else megatron.get_cuda_rng_tracker().fork(name)
        methods = self.config.init_method, self.config.output_layer_init_method
        with stream, torch.no_grad():
            for index in range(self.num_local_experts):
                for weight, method in zip(self.parameters(), methods, strict=True):
                    if on_cpu:
                        whole = torch.empty(weight[index].shape, dtype=torch.float32)
                        method(whole)
                        weight[index].copy_(whole)
                    else:
                        method(weight[index])

    def _give_gradients(self) -> None:
        """Prepare the weights once, when Megatron has given them buffers."""
        if not self._gives and torch.is_grad_enabled() and hasattr(self.weight1, "main_grad"):
            self._gives = True
            for weight in (self.weight1, self.weight2):
                _give_gradient(weight)

    def _find_custom(self) -> str:
        """Return what in the experts' arithmetic no strategy knows, or ""."""
        config = self.config
        if config.params_dtype not in DTYPES.values():
            return f"dtype ({config.params_dtype}) of the experts is none of {', '.join(DTYPES)}"
        wanted = F.silu if config.gated_linear_unit else F.gelu
        if config.activation_func is not wanted:
            found = getattr(config.activation_func, "__name__", str(config.activation_func))
            return f"the experts' activation is {found}"
        if config.gated_linear_unit and (
            config.activation_func_clamp_value is not None or config.glu_linear_offset != 0
        ):
            return "the experts' gate is clamped or has an offset"
        return ""

    def _apply_own(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids_R, minlength=self.num_local_experts).tolist()
        return torch.cat(
            [
                F.linear(self._activate(F.linear(rows, up)), down)
                for rows, up, down in zip(
                    rows_RD.split(counts), self.weight1, self.weight2, strict=True
                )
            ]
        )

    def _activate(self, h_RG: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(h_RG)
        gate, up = h_RG.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return config.activation_func(gate) * (up + config.glu_linear_offset)


def _forget_extra_state(module: nn.Module, keys: Any) -> None:
    """Take what ``sharded_state_dict`` asked for beside the weights from the unexpected keys."""
    for key in list(keys.unexpected_keys):
        if "experts.expert" in key and key.endswith("._extra_state"):
            keys.unexpected_keys.remove(key)


def _give_gradient(weight: nn.Parameter) -> None:
    """Give Megatron a gradient to look at where a kernel has added it to ``main_grad`` itself.

    Megatron's overlapped reduction wants one before it forgets it. This one takes no memory.
    """
    function: Any = weight.expand_as(weight).grad_fn

    def give(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is None and getattr(weight, "grad_added_to_main_grad", False):
            weight.grad = weight.new_zeros(()).expand_as(weight)

    # The node that accumulates the gradient, which lives as long as Megatron holds it.
    function.next_functions[0][0].register_prehook(give)


@torch.no_grad()
def _divide(
    key: str,
    stack: torch.Tensor,
    replica: Any,
    flattened_range: Any,
    *,
    tail: str,
    places: list[tuple[str, tuple[Any, ...]]],
    gated: bool,
    alone: bool,
) -> list[Any]:
    """Return the parts of a stack for a checkpoint: of each expert one, or gate and up.

    Megatron may have changed the key's beginning by then.
    """
    parts: list[Any] = []
    for (own, offsets), matrix in zip(places, stack, strict=True):
        whole = megatron.ShardedTensor.from_rank_offsets(
            f"{key.removesuffix(tail)}{own}{tail}",
            matrix,
            *offsets,
            replica_id=replica,
            prepend_axis_num=len(offsets),
        )
        if gated:
            parts += megatron.apply_swiglu_sharded_factory(whole, offsets, alone).build()
        else:
            parts.append(whole)
    return parts


@torch.no_grad()
def _join(parts: list[torch.Tensor], *, gated: bool) -> torch.Tensor:
    """Return the stack of what ``_divide`` made."""
    if gated:
        parts = [torch.cat([gate, up]) for gate, up in zip(parts[::2], parts[1::2], strict=True)]
    return torch.stack(parts)
