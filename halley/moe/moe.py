"""``halley.MoE``: an MoE layer that sets up its process group, strategy and initial weights."""

from typing import final

import torch
import torch.distributed as dist
from torch import nn

from halley.core.config import MoEConfig, RouterConfig
from halley.core.timeline import Recorder
from halley.core.types import Activation
from halley.core.validation import check_type, parse_device
from halley.distributed.mesh import (
    ParallelGroups,
    check_launcher,
    is_launched,
    pick_device,
    sync_gradients,
)
from halley.distributed.peers import all_gather_objects, rank_and_size
from halley.moe.layer import MoELayer, MoEOutput, grouped_experts, init_parameters
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy


@final
class MoE(nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a process group.

    The constructor, forward and backward are collectives of the group. The number of tokens may
    differ between ranks. Gradients of experts include the tokens of all ranks. Every rank has a
    copy of the other parameters, and ``sync_gradients`` averages their gradients::

        layer = halley.MoE(hidden_size=1024, num_experts=64, top_k=8, intermediate_size=512)
        y = layer(x)  # (tokens, 1024) or (batch, seq, 1024)
        (loss(y) + layer.aux_loss).backward()
        layer.sync_gradients()

    A model with other parameters calls ``halley.sync_gradients`` for all of them instead, with
    ``layer.groups``. For data-parallel copies of the experts use ``MoELayer`` and ``build_groups``.

    Args:
        hidden_size: D; a row must be a multiple of 16 bytes.
        num_experts: experts of all ranks, divisible by the number of ranks.
        intermediate_size: intermediate size of one expert; a row must be a multiple of 16 bytes.
        group: the ranks over which the experts are spread. None for all ranks: those of the
            default process group, which is initialized from torchrun's environment if necessary
            (NCCL on CUDA, gloo on CPU). Without torchrun there is one rank and no process group.
        strategy: how the experts run: a name, see ``build_strategy``, or a strategy built for
            ``group``. "auto", the default, measures several strategies in the first call and keeps
            the fastest. (``halley train`` has another default, "sequential".)
        shared_intermediate_size: intermediate size of a shared expert; 0 for none.
        dtype: dtype of the parameters; None for torch's default.
        device: device of the parameters. None for the GPU of this rank, or the CPU if there is no
            GPU or the group's backend is gloo.
        seed: seed of the initial weights, which do not depend on the number of ranks. None draws a
            seed from torch's default generator on the first rank.

    Attributes:
        aux_loss: balance and z loss of the last call times their coefficients, a float32 scalar to
            add to the loss. It keeps the graph of that call alive.
        expert_counts: slots that the router gave to each expert in the last call on this rank,
            int64 ``(E,)``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int,
        intermediate_size: int,
        group: dist.ProcessGroup | None = None,
        strategy: str | AbstractStrategy = "auto",
        activation: Activation = "swiglu",
        shared_intermediate_size: int = 0,
        router: RouterConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_type(group, dist.ProcessGroup | None, name="group")
        check_type(seed, int | None, name="seed")
        config = MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=intermediate_size,
            activation=activation,
            shared_intermediate_size=shared_intermediate_size,
            router=router or RouterConfig(),
        )
        if group is None:
            group = _join_default_group(device)
        device = _pick_device(group) if device is None else parse_device(device)
        rank, num_ranks = rank_and_size(group)
        self.groups = ParallelGroups()
        if num_ranks > 1:
            ep = {"ep_rank": rank, "ep_size": num_ranks, "ep": group}
            self.groups = ParallelGroups(rank=rank, num_ranks=num_ranks, world=group, **ep)
        if isinstance(strategy, str):
            recorder = Recorder(device, enabled=False)
            strategy = build_strategy(strategy, self.groups.ep, recorder=recorder, device=device)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        place = {"dtype": dtype, "device": device}
        self.layer = MoELayer(config, hidden_size, strategy=strategy, groups=self.groups, **place)
        if seed is None:
            drawn = int(torch.randint(2**31, ()))
            seed = all_gather_objects(drawn, group=self.groups.ep, operation="seed of an MoE")[0]
        init_parameters(self.layer, seed=seed)
        self.aux_loss = torch.zeros((), device=device)
        self.expert_counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def forward(self, x: torch.Tensor, *, return_aux: bool = False) -> torch.Tensor | MoEOutput:
        """Run the layer as a collective; return the output, or an ``MoEOutput`` if ``return_aux``.

        ``x`` and the output are ``(..., hidden_size)``, in the dtype of the parameters or under
        autocast. Activation checkpointing needs ``return_aux``: it recomputes ``aux_loss``.
        """
        output = self.layer(x)
        self.aux_loss, self.expert_counts = output.router_loss, output.counts_E
        return output if return_aux else output.y

    def sync_gradients(self) -> None:
        """Average the gradients of this layer over the ranks, in place (``halley.sync_gradients``).

        A collective of the group. The loss is a mean on each rank.
        """
        shared, expert = (
            [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameters in (self.shared_parameters(), self.expert_parameters())
        )
        sync_gradients(shared, expert, groups=self.groups)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the routed experts' parameters, each stacked over all experts of this rank."""
        return list(self.layer.experts.parameters())

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of which every rank has a copy: router and shared expert."""
        names = grouped_experts(self)
        return [parameter for name, parameter in self.named_parameters() if name not in names]


def _join_default_group(device: torch.device | str | None) -> dist.ProcessGroup | None:
    """Return the default process group; create it if a launcher started this process; else None."""
    if not dist.is_initialized():
        check_launcher()
        if not is_launched():
            return None
        picked = pick_device("auto") if device is None else parse_device(device)
        if picked.type == "cuda":
            torch.cuda.set_device(picked)
            dist.init_process_group("nccl", device_id=picked)
        else:
            dist.init_process_group("gloo")
    return dist.group.WORLD


def _pick_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the current GPU if there is one and the group is None or uses NCCL, else the CPU."""
    on_gpu = torch.cuda.is_available() and (group is None or "nccl" in dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
