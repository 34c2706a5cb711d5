"""The experts of one rank as two stacked parameters, with Megatron's checkpoint format."""

from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from halley.core.types import DTYPES, Experts
from halley.integrations.contract import Framework, LocalExperts


FRAMEWORK = Framework(package="megatron.core", install="megatron-core", newest=(0, 19))

_mcore = FRAMEWORK.import_names(
    {
        "MegatronModule": "megatron.core.transformer.module",
        "ShardedTensor": "megatron.core.dist_checkpointing",
        "ShardedTensorFactory": "megatron.core.dist_checkpointing.mapping",
        "make_sharded_object_for_checkpoint": "megatron.core.transformer.utils",
        "apply_swiglu_sharded_factory": "megatron.core.transformer.mlp",
        "get_cuda_rng_tracker": "megatron.core.tensor_parallel",
        "get_expert_parallel_rng_tracker_name": "megatron.core.tensor_parallel.random",
        "set_tensor_model_parallel_attributes": "megatron.core.tensor_parallel.layers",
        "get_default_pg_collection": "megatron.core.transformer.moe.moe_utils",
    }
)
# For each parameter, the layer in Megatron's SequentialMLP whose matrices the parameter stacks.
_LAYERS = {"weight1": "linear_fc1", "weight2": "linear_fc2"}
# The axis of such a matrix that is split over tensor-parallel ranks.
_SPLIT_AXES = {"weight1": 0, "weight2": 1}


@final
class StackedExperts(_mcore.MegatronModule):
    """The experts of one rank as two stacked weights without biases, in place of SequentialMLP.

    ``weight1`` is ``(L, 2F, D)``, gate rows first, or ``(L, F, D)`` without a gate. ``weight2`` is
    ``(L, D, F)``. With expert tensor parallelism, F is this rank's share. Initial values and
    checkpoint format are those of Megatron's ``SequentialMLP``. ``megatron.find_problem`` must find
    no problem in ``config``. Megatron-Core 0.18 and newer pass ``name``, which is unused.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any = None, name: str = ""
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or _mcore.get_default_pg_collection()
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        size, remainder = divmod(config.moe_ffn_hidden_size, self.tp_group.size())
        if remainder:
            raise ValueError(
                f"moe_ffn_hidden_size ({config.moe_ffn_hidden_size}) must be a multiple of "
                f"expert_tensor_parallel_size ({self.tp_group.size()})"
            )
        columns = size * (2 if config.gated_linear_unit else 1)
        on_cpu = config.use_cpu_initialization
        device = None if on_cpu else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        shapes = ((columns, config.hidden_size), (config.hidden_size, size))
        for name, shape in zip(_LAYERS, shapes, strict=True):
            weight: Any = nn.Parameter(torch.empty(num_local_experts, *shape, **options))
            axis, stride = _SPLIT_AXES[name] + 1, self._stride(name)
            _mcore.set_tensor_model_parallel_attributes(weight, True, axis, stride)
            # False: Megatron averages this gradient only over ranks with the same experts.
            same_tp = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
            weight.allreduce = config.expert_model_parallel_size == 1 and same_tp
            self.register_parameter(name, weight)
        self.register_load_state_dict_post_hook(_ignore_extra_state)
        self._has_gradient_hooks = False
        if config.perform_initialization:
            self._initialize(on_cpu=on_cpu)

    def local_experts(self) -> LocalExperts:
        """Return this rank's experts: stacked weights, or why no strategy can run them."""
        reason = self._find_unsupported()
        stacked = None
        if not reason:
            up, down = self.weight1, self.weight2
            if self.config.gradient_accumulation_fusion:
                self._register_gradient_hooks()
            else:
                # Strategies add gradients to ``main_grad`` of each weight that has this attribute.
                # Pass views, which lack it, so that Megatron adds the gradients from autograd.
                up, down = up.view_as(up), down.view_as(down)
            activation = "swiglu" if self.config.gated_linear_unit else "gelu"
            stacked = Experts(up_LGD=up, down_LDF=down, activation=activation)
        num_local, function = self.num_local_experts, self._apply_experts
        return LocalExperts(num_local=num_local, function=function, stacked=stacked, reason=reason)

    def backward_dw(self) -> None:
        """Do nothing: backward has computed the weight gradients already."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return checkpoint entries of weights and extra state, in ``SequentialMLP``'s format.

        If "singleton_local_shards" of ``metadata`` is true, each expert has a key of its own. Else
        all experts are slices of one tensor.
        """
        singleton = (metadata or {}).get("singleton_local_shards", False)
        num_experts = self.ep_group.size() * self.num_local_experts
        first = self.ep_group.rank() * self.num_local_experts
        replica = (0, 0, self.dp_group.rank())
        extra_replica = (0, self.tp_group.rank(), self.dp_group.rank())
        axis = len(sharded_offsets)
        experts = range(first, first + self.num_local_experts)
        places = [(f"{index}.", sharded_offsets) for index in experts]
        if not singleton:
            places = [("", (*sharded_offsets, (axis, index, num_experts))) for index in experts]
        state: dict[str, Any] = {}
        for name, layer in _LAYERS.items():
            gated = self._stride(name) == 2
            suffix, weight = f"{layer}.weight", self.get_parameter(name)
            shard = (_SPLIT_AXES[name], self.tp_group.rank(), self.tp_group.size())
            options = {"places": places, "shard": shard, "gated": gated, "singleton": singleton}
            split = partial(_split, suffix=suffix, **options)
            key, stack = f"{prefix}experts.{suffix}", partial(_stack, gated=gated)
            state[f"{prefix}{name}"] = _mcore.ShardedTensorFactory(
                key, weight, split, stack, replica
            )
            # As SequentialMLP does, write an extra state for each matrix; here its value is None.
            extra, make = f"{layer}._extra_state", _mcore.make_sharded_object_for_checkpoint
            for index, (expert_prefix, offsets) in enumerate(places, start=first):
                key = f"{prefix}experts.{expert_prefix}{extra}"
                entry = make(None, key, offsets, extra_replica)
                state[f"{prefix}expert{index}.{extra}"] = entry
        return state

    def _stride(self, name: str) -> int:
        """Return the number of parts of a matrix that are each split over ranks: gate and up."""
        return 2 if name == "weight1" and self.config.gated_linear_unit else 1

    def _initialize(self, *, on_cpu: bool) -> None:
        """Initialise one expert after another, to the values that ``SequentialMLP`` would have."""
        tracker = _mcore.get_expert_parallel_rng_tracker_name()
        generator = nullcontext() if on_cpu else _mcore.get_cuda_rng_tracker().fork(tracker)
        methods = self.config.init_method, self.config.output_layer_init_method
        rank, size = self.tp_group.rank(), self.tp_group.size()
        with generator, torch.no_grad():
            for index in range(self.num_local_experts):
                for name, method in zip(_LAYERS, methods, strict=True):
                    shard, axis = self.get_parameter(name)[index], _SPLIT_AXES[name]
                    if on_cpu:  # each rank that shares an expert initialises all of it
                        matrix = torch.empty_like(shard, dtype=torch.float32)
                        matrix = torch.cat([matrix] * size, dim=axis)
                        method(matrix)
                        parts = matrix.chunk(size * self._stride(name), dim=axis)
                        shard.copy_(torch.cat(parts[rank::size], dim=axis))
                    else:
                        method(shard)

    def _register_gradient_hooks(self) -> None:
        """Register hooks on both weights once grad mode is on and ``main_grad`` has been set."""
        ready = torch.is_grad_enabled() and hasattr(self.weight1, "main_grad")
        if ready and not self._has_gradient_hooks:
            self._has_gradient_hooks = True
            _register_gradient_hook(self.weight1)
            _register_gradient_hook(self.weight2)

    def _find_unsupported(self) -> str:
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

    def _apply_experts(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids_R, minlength=self.num_local_experts).tolist()
        groups = zip(rows_RD.split(counts), self.weight1, self.weight2, strict=True)
        return torch.cat(
            [F.linear(self._activate(F.linear(rows, up)), down) for rows, up, down in groups]
        )

    def _activate(self, h_RG: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(h_RG)
        gate, up = h_RG.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return config.activation_func(gate) * (up + config.glu_linear_offset)


def _ignore_extra_state(module: nn.Module, keys: Any) -> None:
    """Remove experts' extra state from the unexpected keys of a load: strict loads then succeed."""
    for key in list(keys.unexpected_keys):
        if "experts.expert" in key and key.endswith("._extra_state"):
            keys.unexpected_keys.remove(key)


def _register_gradient_hook(weight: nn.Parameter) -> None:
    """Register a hook that sets ``weight.grad`` to 0 if a kernel added to ``main_grad`` instead.

    Megatron's overlapped gradient reduction asserts that ``grad`` is not None. The zeros are an
    expanded scalar, which takes no memory.
    """
    function: Any = weight.expand_as(weight).grad_fn

    def set_zero_gradient(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is None and getattr(weight, "grad_added_to_main_grad", False):
            weight.grad = weight.new_zeros(()).expand_as(weight)

    # Hook the weight's AccumulateGrad node. Megatron's own hook keeps this node alive.
    function.next_functions[0][0].register_prehook(set_zero_gradient)


@torch.no_grad()
def _split(
    key: str,
    stack: torch.Tensor,
    replica: Any,
    flattened_range: Any,
    *,
    suffix: str,
    places: list[tuple[str, tuple[Any, ...]]],
    shard: tuple[int, int, int],
    gated: bool,
    singleton: bool,
) -> list[Any]:
    """Return a stacked weight's checkpoint tensors: one per expert, two (gate, up) if ``gated``.

    ``key`` is the key of the factory, to which Megatron may have added a prefix. ``shard`` is the
    axis of a matrix that is split over tensor-parallel ranks, then rank and number of these.
    """
    axis, *place = shard
    tensors: list[Any] = []
    for (expert_prefix, offsets), matrix in zip(places, stack, strict=True):
        name = f"{key.removesuffix(suffix)}{expert_prefix}{suffix}"
        options = {"replica_id": replica, "prepend_axis_num": len(offsets)}
        shards = (*offsets, (len(offsets) + axis, *place))
        tensor = _mcore.ShardedTensor.from_rank_offsets(name, matrix, *shards, **options)
        if gated:
            tensors += _mcore.apply_swiglu_sharded_factory(tensor, offsets, singleton).build()
        else:
            tensors.append(tensor)
    return tensors


@torch.no_grad()
def _stack(tensors: list[torch.Tensor], *, gated: bool) -> torch.Tensor:
    if gated:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        tensors = [torch.cat([gate, up]) for gate, up in pairs]
    return torch.stack(tensors)
