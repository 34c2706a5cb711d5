"""The MoE layer: a router, routed experts that a strategy runs, and shared experts."""

import zlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from halley.core.config import MoEConfig
from halley.core.field_types import check_type, parse_device
from halley.core.placement import ExpertPlacement, choose_replicas, replica_choices
from halley.core.sharding import shard_size
from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.distributed.mesh import ParallelGroups
from halley.moe.dense import FeedForward, RMSNorm
from halley.moe.experts import GroupedExperts
from halley.moe.memory_check import check_layer_memory
from halley.moe.router import SigmoidRouter, build_router
from halley.ops.expert_gemm import check_alignment
from halley.ops.replicas import share_gradients
from halley.strategies.base import AbstractStrategy, under_autocast


_STD = 0.02


@torch.no_grad()
def init_parameters(model: nn.Module, *, seed: int) -> None:
    """Initialize a model, or one layer: matrices normal with std 0.02, norms 1, biases 0.

    The values of a parameter depend on the seed and on its name, those of an expert also on its id.
    So they are the same for every number of ranks, and equal on all ranks that hold a copy.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif isinstance(module, GroupedExperts):
                for index, expert in zip(module.expert_ids, parameter, strict=True):
                    shape, expert_name = module.full_shape(name), f"{full_name}.{index}"
                    full = _draw(shape, expert_name, seed=seed, device=expert.device)
                    expert.copy_(module.local_shard(name, full))
            else:
                parameter.copy_(
                    _draw(parameter.shape, full_name, seed=seed, device=parameter.device)
                )
        if isinstance(module, SigmoidRouter):
            module.bias.zero_()


def _draw(shape: tuple[int, ...], name: str, *, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device)
    # crc32 because Python's hash of strings differs between processes.
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.empty(shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, _STD, generator=generator)


class MoEOutput(NamedTuple):
    """Result of an MoE layer.

    Attributes:
        y: output, with the shape and dtype of the input.
        router_loss: balance and z loss times their coefficients, a float32 scalar to add to the
            model's loss.
        counts_E: slots that the router gave to each expert on this rank, int64.
    """

    y: torch.Tensor
    router_loss: torch.Tensor
    counts_E: torch.Tensor


class MoELayer(nn.Module):
    """A mixture of experts whose experts are spread over the ranks of a group.

    Args:
        config: configuration of experts and router.
        hidden_size: D.
        strategy: runs the routed experts; built for ``groups.ep`` and ``groups.tp_size``.
        groups: the ranks over which the experts are spread.
        dtype, device: dtype and device of the parameters, which the constructor does not
            initialize: call ``init_parameters`` or load a checkpoint.
        placement: the experts of each rank; None for consecutive ranges. Replicas of an expert
            must have equal initial values.
        recorder: records the time of waiting for the gradients of replicas.

    Raises:
        ValueError: the experts do not divide over the ranks, the placement is for other sizes,
            sizes are not aligned, strategy and groups have different ``tp_size``, an argument has
            the wrong type, or the parameters do not fit into the device's memory.
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
        device = parse_device(device, types=("cpu", "cuda", "meta"))
        _check_arguments(config, hidden_size, strategy=strategy, groups=groups, dtype=dtype)
        check_alignment(hidden_size, name="hidden_size", dtype=dtype)
        own_size = shard_size(config.intermediate_size, tp_size=groups.tp_size)
        check_alignment(own_size, name="intermediate_size", dtype=dtype)
        if strategy.tp_size != groups.tp_size:
            raise ValueError(
                f"strategy's tp_size ({strategy.tp_size}) must be that of groups ({groups.tp_size})"
            )
        num_local = -(-config.num_experts * groups.tp_size // groups.ep_size)
        place = {"tp_size": groups.tp_size, "dtype": dtype, "device": device}
        check_layer_memory(config, hidden_size, num_local=num_local, **place)
        self.config = config
        self.strategy = strategy
        self.router = build_router(config, hidden_size=hidden_size, dtype=dtype, device=device)
        gated = config.activation == "swiglu"
        self.experts = GroupedExperts(
            num_experts=config.num_experts,
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            up_size=config.intermediate_size * (2 if gated else 1),
            bias=config.expert_bias,
            groups=groups,
            dtype=dtype,
            device=device,
            placement=placement,
            recorder=recorder,
        )
        self.ep_rank = groups.ep_rank
        self._register_replica_tables(device)
        self.shared_expert: FeedForward | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if config.shared_intermediate_size:
            self.shared_expert = FeedForward(
                hidden_size,
                config.shared_intermediate_size,
                gated=gated,
                dtype=dtype,
                device=device,
            )
            if config.shared_gate:
                self.shared_expert_gate = nn.Linear(
                    hidden_size, 1, bias=False, dtype=dtype, device=device
                )

    def _register_replica_tables(self, device: torch.device) -> None:
        """Register the tables that map an expert id to the replicas a token may be sent to.

        They are buffers, so that they move with the module to another device. They are not in
        checkpoints, because they follow from the placement. None if no expert is moved or
        replicated.
        """
        choices_EC = num_choices_E = None
        if not self.experts.is_plain:
            tables = replica_choices(self.experts.placement, rank=self.ep_rank)
            choices_EC, num_choices_E = (table.to(device) for table in tables)
        self.register_buffer("choices_EC", choices_EC, persistent=False)
        self.register_buffer("num_choices_E", num_choices_E, persistent=False)
        self.choices_EC: torch.Tensor | None
        self.num_choices_E: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> MoEOutput:
        """Apply the layer; a collective of the expert-parallel group.

        Args:
            x: ``(..., D)`` in the dtype of the parameters. Under autocast any dtype, and the
                output has the dtype of autocast.

        Raises:
            ValueError: the input's shape, dtype or device does not fit the parameters.
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
        y_TD = self.strategy.forward(rows_TD, self._to_replicas(routed.routing), experts)
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = self.shared_expert_gate(x_TD).sigmoid() * shared_TD
            y_TD = y_TD + shared_TD
        return MoEOutput(y_TD.view_as(x), routed.loss, routed.counts_E)

    def local_experts(self) -> Experts:
        """Return this rank's experts in the form that strategies take; views of the parameters.

        If experts have replicas, backward sums the gradients over the replicas of each expert.
        """
        parameters = self.experts
        experts = Experts(
            up_LGD=parameters.gate_up_proj,
            down_LDF=parameters.down_proj,
            up_bias_LG=parameters.gate_up_proj_bias,
            down_bias_LD=parameters.down_proj_bias,
            activation=self.config.activation,
        )
        replicas = parameters.replicas
        return experts if replicas is None else share_gradients(experts, replicas)

    def _to_replicas(self, routing: Routing) -> Routing:
        """Replace each expert id by the id of the replica to which the token is sent."""
        if self.choices_EC is None or self.num_choices_E is None:
            return routing
        replicas_TK = choose_replicas(
            routing.topk_idx_TK, self.choices_EC, self.num_choices_E, rank=self.ep_rank
        )
        return replace(routing, topk_idx_TK=replicas_TK)


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
