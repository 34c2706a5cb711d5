"""The MoE layer: a router, routed experts that a strategy runs, and an optional shared expert."""

import zlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from halley.core.config import MoEConfig
from halley.core.placement import ExpertPlacement, choose_replicas, replica_choices
from halley.core.routing import shard_size, sharded_dims
from halley.core.timeline import Recorder
from halley.core.types import Experts, local_experts
from halley.core.validation import check_type, parse_device
from halley.distributed.mesh import ParallelGroups
from halley.moe.dense import FeedForward
from halley.moe.memory_check import check_fits, num_layer_parameters
from halley.moe.router import SigmoidRouter, build_router
from halley.ops.exchange import Replicas, share_gradients
from halley.ops.expert_rows import check_alignment
from halley.strategies.base import AbstractStrategy, under_autocast


_STD = 0.02


@torch.no_grad()
def init_parameters(model: nn.Module, *, seed: int) -> None:
    """Initialize a model or a layer in place: matrices normal with std 0.02, norms 1, biases 0.

    Values depend on the seed, the kind of device, the parameter's name and, for an expert, its id.
    So they are the same for every number of ranks, and equal on all ranks that hold a copy.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            if isinstance(module, nn.RMSNorm):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif isinstance(module, GroupedExperts):
                for index, expert in zip(module.expert_ids, parameter, strict=True):
                    shape, expert_name = module.full_shape(name), f"{full_name}.{index}"
                    full = _draw(shape, expert_name, seed=seed, device=expert.device)
                    expert.copy_(module.local_shard(name, full))
            else:
                shape, device = parameter.shape, parameter.device
                parameter.copy_(_draw(shape, full_name, seed=seed, device=device))
        if isinstance(module, SigmoidRouter):
            module.bias.zero_()


def _draw(shape: tuple[int, ...], name: str, *, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device)
    # Use crc32, because Python's hash of a string differs between processes.
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.empty(shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, _STD, generator=generator)


class GroupedExperts(nn.Module):
    """This rank's experts of one MoE layer: stacked weights, named and laid out as in Hugging Face.

    If ``tp_size`` ranks share each expert, a rank holds one shard of it, see ``core.routing``.

    Attributes:
        expert_ids: expert id of each slice along the first dimension of the parameters.
        placement: the experts of each rank, or of each tensor-parallel group.
        replicas: sums gradients of experts that several ranks hold; None if there are none.
        sharded_dims: the dimension that is the intermediate size, by parameter name. Biases have
            none, because ranks cannot share experts with biases.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        groups: ParallelGroups,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        device = parse_device(device, types=("cpu", "cuda", "meta"))
        self.tp_rank, self.tp_size = groups.tp_rank, groups.tp_size
        bias, num_experts = config.expert_bias, config.num_experts
        if self.tp_size > 1 and (bias or placement is not None):
            name = "expert_bias (true) must be false" if bias else "placement must be None"
            raise ValueError(f"{name} where ranks share experts")
        num_sets = groups.ep_size // self.tp_size  # number of tensor-parallel groups
        if placement is None:
            local_experts(num_experts, ep_size=groups.ep_size, tp_size=self.tp_size)
            placement = ExpertPlacement.plain(num_experts, num_ranks=num_sets)
        check_type(placement, ExpertPlacement, name="placement")
        found = placement.num_experts
        if found != num_experts:
            raise ValueError(f"placement ({found} experts) must be for num_experts {num_experts}")
        found = placement.num_ranks
        if found != num_sets:
            raise ValueError(f"placement ({found} ranks) must be for ep_size {num_sets}")
        self.placement = placement
        self.expert_ids = placement.experts_WL[groups.ep_rank // self.tp_size]
        self.replicas: Replicas | None = None
        if groups.ep is not None and placement.replicated:
            recorder = recorder or Recorder(device, enabled=False)
            place = {"rank": groups.ep_rank, "group": groups.ep, "device": device}
            self.replicas = Replicas(placement, recorder=recorder, **place)
        up, down = sharded_dims(parts=2 if config.activation == "swiglu" else 1)
        self.sharded_dims = {"gate_up_proj": up, "down_proj": down}
        intermediate_size = shard_size(config.intermediate_size, tp_size=self.tp_size)
        up_size = up.parts * intermediate_size

        def empty(*shape: int) -> nn.Parameter:
            num_local = placement.num_local
            return nn.Parameter(torch.empty(num_local, *shape, dtype=dtype, device=device))

        self.gate_up_proj = empty(up_size, hidden_size)
        self.down_proj = empty(hidden_size, intermediate_size)
        self.gate_up_proj_bias = empty(up_size) if bias else None
        self.down_proj_bias = empty(hidden_size) if bias else None

    @property
    def is_plain(self) -> bool:
        """Whether ranks hold consecutive ranges of experts, in order of rank, without replicas."""
        experts = [expert for held in self.placement.experts_WL for expert in held]
        return experts == list(range(self.placement.num_experts))

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter for one expert, before tensor parallelism shards it."""
        shape = list(self.get_parameter(name).shape[1:])
        if name in self.sharded_dims:
            shape[self.sharded_dims[name].dim] *= self.tp_size
        return tuple(shape)

    def local_shard(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor-parallel shard of weights ``(..., *full_shape(name))``."""
        if name not in self.sharded_dims:
            return weight
        dim = self.sharded_dims[name]
        return dim.shard(weight, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def checkpoint_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a parameter, or of its optimizer state, in the layout of checkpoints."""
        dim = self.sharded_dims.get(name)
        return tensor if dim is None else dim.unstack(tensor)

    def without_replicas(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of ``gradient`` for the local experts that no lower rank holds."""
        return gradient if self.replicas is None else gradient[self.replicas.first]


def grouped_experts(model: nn.Module) -> dict[str, GroupedExperts]:
    """Return a dict from the name of each expert parameter of a model to its ``GroupedExperts``."""
    return {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        if isinstance(module, GroupedExperts)
        for name, _ in module.named_parameters()
    }


class MoEOutput(NamedTuple):
    """Result of ``MoELayer.forward``: output, router loss, and number of slots of each expert."""

    y: torch.Tensor  # output, with the shape of the input
    router_loss: torch.Tensor  # weighted balance and z loss, a float32 scalar to add to the loss
    counts_E: torch.Tensor  # slots of this rank's tokens per expert, dropped ones included, int64


class MoELayer(nn.Module):
    """An MoE layer that takes groups and strategy as arguments; ``halley.MoE`` builds them.

    Args:
        strategy: runs the routed experts; built for ``groups.ep`` and ``groups.tp_size``.
        groups: the ranks over which the experts are spread; None for this process alone.
        dtype, device: dtype and device of the parameters, which the constructor does not
            initialize: call ``init_parameters`` or load a checkpoint.
        placement: the experts of each rank; None for consecutive ranges. Replicas of an expert
            must have equal initial values.
        recorder: records the time of waiting for the gradients of replicas.

    Raises:
        ValueError: arguments do not fit each other, or parameters do not fit into memory.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        strategy: AbstractStrategy,
        groups: ParallelGroups | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        placement: ExpertPlacement | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        groups = groups or ParallelGroups()
        place = {"dtype": dtype, "device": parse_device(device, types=("cpu", "cuda", "meta"))}
        _check_arguments(config, hidden_size, strategy=strategy, groups=groups, dtype=dtype)
        split = {"ep_size": groups.ep_size, "tp_size": groups.tp_size}
        num_bytes = num_layer_parameters(config, hidden_size, **split) * dtype.itemsize
        names = ("num_experts", "intermediate_size", "shared_intermediate_size")
        sizes = {"hidden_size": hidden_size, **{name: getattr(config, name) for name in names}}
        check_fits(num_bytes, sizes, device=place["device"])
        self.config = config
        self.strategy = strategy
        self.router = build_router(config, hidden_size=hidden_size, **place)
        run = {"groups": groups, "placement": placement, "recorder": recorder}
        self.experts = GroupedExperts(config, hidden_size, **run, **place)
        self.ep_rank = groups.ep_rank
        # Tables by expert id: the replicas to which this rank may send a token, and their number.
        # None if ``experts.is_plain``. Checkpoints omit both tables: the placement determines
        # them.
        self.choices_EC: torch.Tensor | None
        self.num_choices_E: torch.Tensor | None
        tables = (None, None)
        if not self.experts.is_plain:
            tables = replica_choices(self.experts.placement, rank=self.ep_rank)
        for name, table in zip(("choices_EC", "num_choices_E"), tables, strict=True):
            moved = None if table is None else table.to(place["device"])
            self.register_buffer(name, moved, persistent=False)
        self.shared_expert: FeedForward | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_size := config.shared_intermediate_size:
            gated = config.activation == "swiglu"
            self.shared_expert = FeedForward(hidden_size, shared_size, gated=gated, **place)
            if config.shared_gate:
                self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **place)

    def forward(self, x: torch.Tensor) -> MoEOutput:
        """Return the ``MoEOutput`` of routed and shared experts; a collective of the "ep" group.

        ``x`` is ``(..., D)`` in the dtype of the parameters. Under autocast, ``x`` may have any
        dtype, and the output has the dtype of autocast.
        """
        weight = self.router.weight
        if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x {tuple(x.shape)} must be (..., hidden_size) with hidden_size {weight.shape[1]}"
            )
        if x.device != weight.device:
            raise ValueError(f"x device ({x.device}) must be that of the router ({weight.device})")
        x_TD = x.reshape(-1, x.shape[-1])
        routed = self.router(x_TD)
        experts = under_autocast(self.local_experts())
        is_cast = torch.is_autocast_enabled(x.device.type)
        rows_TD = x_TD.to(experts.up_LGD.dtype) if is_cast else x_TD
        routing = routed.routing
        if self.choices_EC is not None and self.num_choices_E is not None:
            tables = (self.choices_EC, self.num_choices_E)
            replicas_TK = choose_replicas(routing.topk_idx_TK, *tables, rank=self.ep_rank)
            routing = replace(routing, topk_idx_TK=replicas_TK)
        y_TD = self.strategy.forward(rows_TD, routing, experts)
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = self.shared_expert_gate(x_TD).sigmoid() * shared_TD
            y_TD = y_TD + shared_TD
        return MoEOutput(y_TD.view_as(x), routed.loss, routed.counts_E)

    def local_experts(self) -> Experts:
        """Return this rank's expert parameters as ``Experts``, which ``strategy.forward`` takes.

        If experts have replicas, backward sums the gradients over the replicas of each expert.
        """
        experts = Experts(
            up_LGD=self.experts.gate_up_proj,
            down_LDF=self.experts.down_proj,
            up_bias_LG=self.experts.gate_up_proj_bias,
            down_bias_LD=self.experts.down_proj_bias,
            activation=self.config.activation,
        )
        replicas = self.experts.replicas
        return experts if replicas is None else share_gradients(experts, replicas)


def _check_arguments(
    config: MoEConfig,
    hidden_size: int,
    *,
    strategy: AbstractStrategy,
    groups: ParallelGroups,
    dtype: torch.dtype,
) -> None:
    check_type(config, MoEConfig, name="config")
    check_type(hidden_size, int, name="hidden_size")
    check_type(strategy, AbstractStrategy, name="strategy")
    check_type(groups, ParallelGroups, name="groups")
    check_type(dtype, torch.dtype, name="dtype")
    if hidden_size < 1:
        raise ValueError(f"hidden_size ({hidden_size}) must be at least 1")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be a floating dtype")
    check_alignment(hidden_size, name="hidden_size", dtype=dtype)
    own_size = shard_size(config.intermediate_size, tp_size=groups.tp_size)
    check_alignment(own_size, name="intermediate_size", dtype=dtype)
    if strategy.tp_size != groups.tp_size:
        raise ValueError(
            f"strategy's tp_size ({strategy.tp_size}) must be that of groups ({groups.tp_size})"
        )
