"""Train one torchtitan MoE layer whose experts Halley runs, enabled by one option.

Run it with ``torchrun --nproc-per-node 2 examples/04_torchtitan.py``, or with ``python`` on one
rank. Arguments are values of torchtitan's ``--override.imports``; the default enables Halley. Jobs
of torchtitan's trainer, which needs GPUs, take the same option.
"""

import os
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


NUM_STEPS, NUM_EXPERTS, DIM = 5, 8, 64
FLAG = 'halley.integrations.torchtitan.enable={"strategy": "sequential"}'


def build_layer(imports: list[str]) -> tuple[Any, list[str]]:
    """Return a layer as torchtitan builds it, and the messages of its overrides."""
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
    from torchtitan.models.common import config_utils

    normal = {"weight": partial(nn.init.normal_, std=0.1)}
    routed = config_utils.make_routed_experts_config(
        dim=DIM,
        hidden_dim=2 * DIM,
        num_experts=NUM_EXPERTS,
        top_k=2,
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"]),
        comm_backend="standard",
    )
    router = config_utils.make_router_config(
        dim=DIM, num_experts=NUM_EXPERTS, gate_param_init=normal, top_k=2
    )
    config = config_utils.make_moe_config(
        num_experts=NUM_EXPERTS, router=router, routed_experts=routed
    )
    messages = apply_overrides(OverrideConfig(imports=parse_cli_imports(imports)), config)
    layer = config.build()
    torch.manual_seed(0)  # the same layer on all ranks
    with torch.no_grad():
        layer.init_states()
    return layer, messages


def shard(layer: Any, num_ranks: int) -> None:
    """Shard the experts over the ranks, as torchtitan's trainer does on its own meshes."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    experts = layer.routed_experts.inner_experts
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)


def train(imports: list[str], num_ranks: int) -> list[str]:
    """Fit the layer to a linear map of random tokens; return the lines to print."""
    from torchtitan.distributed.utils import set_spmd_backend

    import halley.integrations.torchtitan as halley_torchtitan

    set_spmd_backend("partial_dtensor")
    layer, lines = build_layer(imports)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if num_ranks > 1:
        shard(layer, num_ranks)
    generator = torch.Generator().manual_seed(rank)
    target = torch.eye(DIM).roll(1, dims=0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        x_BLD = torch.randn(2, 64, DIM, generator=generator)
        loss = (layer(x_BLD) - x_BLD @ target).square().mean() / num_ranks
        loss.backward()
        if num_ranks > 1:
            for name, parameter in layer.named_parameters():
                if "inner_experts" not in name:  # their gradients already sum over all ranks
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {num_ranks * float(loss.detach()):.3f} on rank {rank}")
    lines += [f"{name}: {path}" for name, path in halley_torchtitan.describe(layer).items()]
    return [*lines, f"{NUM_EXPERTS} experts on {num_ranks} ranks"]


def main() -> None:
    if find_spec("torchtitan") is None:
        sys.stdout.write("no experts to run: pip install torchtitan\n")
        return
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    lines = train(sys.argv[1:] or [FLAG], num_ranks)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write("\n".join([*lines, ""]))
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
