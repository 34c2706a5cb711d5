"""The module that holds the weights of the experts of one rank, or its shards of them."""

import torch
from torch import nn

from halley.core.field_types import check_type, parse_device
from halley.core.placement import ExpertPlacement
from halley.core.routing import local_experts
from halley.core.sharding import shard_size, sharded_dims
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.ops.replicas import Replicas


class GroupedExperts(nn.Module):
    """The stacked weights of this rank's experts, with the names and layout of Hugging Face.

    The parameters differ between the ranks of an expert-parallel group and are equal on the ranks
    of an "edp" group. If ``tp_size`` ranks share each expert, a rank holds one shard of it: a slice
    of the intermediate size, see ``core.sharding``.

    Attributes:
        expert_ids: expert id of each slice along the first dimension of the parameters.
        placement: the experts of each rank, or of each tensor-parallel group.
        replicas: the experts of this rank that other ranks of the group also hold; None if no
            expert has replicas.
        sharded_dims: the dimension that is the intermediate size, by parameter name. Biases have
            none, because ranks cannot share experts with biases.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        up_size: int,
        bias: bool,
        groups: ParallelGroups,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        device = parse_device(device, types=("cpu", "cuda", "meta"))
        self.tp_rank, self.tp_size = groups.tp_rank, groups.tp_size
        if self.tp_size > 1 and (bias or placement is not None):
            name = "expert_bias (true) must be false" if bias else "placement must be None"
            raise ValueError(f"{name} where ranks share experts")
        num_sets = groups.ep_size // self.tp_size  # tensor-parallel groups
        if placement is None:
            local_experts(num_experts, ep_size=groups.ep_size, tp_size=self.tp_size)
            placement = ExpertPlacement.plain(num_experts, num_ranks=num_sets)
        check_type(placement, ExpertPlacement, name="placement")
        found = placement.num_experts
        if found != num_experts:
            raise ValueError(f"placement ({found} experts) must be for num_experts {num_experts}")
        if placement.num_ranks != num_sets:
            found = placement.num_ranks
            raise ValueError(f"placement ({found} ranks) must be for ep_size {num_sets}")
        self.placement = placement
        self.expert_ids = placement.experts_WL[groups.ep_rank // self.tp_size]
        self.replicas: Replicas | None = None
        if groups.ep is not None and placement.replicated:
            self.replicas = Replicas(
                placement,
                rank=groups.ep_rank,
                group=groups.ep,
                device=device,
                recorder=recorder or Recorder(device, enabled=False),
            )
        up, down = sharded_dims(parts=up_size // intermediate_size)
        self.sharded_dims = {"gate_up_proj": up, "down_proj": down}
        intermediate_size = shard_size(intermediate_size, tp_size=self.tp_size)
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
        """Whether each rank holds a consecutive range of experts, in the order of the ranks."""
        experts = [expert for held in self.placement.experts_WL for expert in held]
        return experts == list(range(self.placement.num_experts))

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one expert's parameter before it is divided into shards."""
        shape = list(self.get_parameter(name).shape[1:])
        if name in self.sharded_dims:
            shape[self.sharded_dims[name].dim] *= self.tp_size
        return tuple(shape)

    def local_shard(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Cut this rank's shard out of a full weight.

        Args:
            name: name of the parameter that the weight is for.
            weight: shape ``full_shape(name)``, also with leading dimensions for several experts.

        Returns:
            The slice of the intermediate size that this rank holds. The whole weight if ranks do
            not share experts, or if the parameter has no intermediate size.
        """
        if name not in self.sharded_dims:
            return weight
        dim = self.sharded_dims[name]
        return dim.shard(weight, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def checkpoint_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a parameter, or of its optimizer state, in the layout of checkpoints.

        Gate and up rows are in different dimensions there. So the shards of all ranks are
        consecutive ranges of one dimension.
        """
        dim = self.sharded_dims.get(name)
        return tensor if dim is None else dim.apart(tensor)

    def without_replicas(self, gradient: torch.Tensor) -> torch.Tensor:
        """Select the experts that no lower rank holds, so that all ranks count each expert once.

        Args:
            gradient: gradient of one of the parameters, ``(L, ...)``.
        """
        return gradient if self.replicas is None else gradient[self.replicas.first]


def grouped_experts(model: nn.Module) -> dict[str, GroupedExperts]:
    """Return the module of each parameter that is sharded over the expert-parallel group."""
    return {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        if isinstance(module, GroupedExperts)
        for name, _ in module.named_parameters()
    }


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are sharded over the expert-parallel group."""
    return set(grouped_experts(model))
