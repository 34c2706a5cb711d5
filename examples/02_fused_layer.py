"""Compare three strategies on one MoE layer: outputs, gradients, and the symmetric memory.

Run it with ``torchrun --nproc-per-node 2 examples/02_fused_layer.py``, or with ``python`` for one
rank. Each rank uses one GPU. Without GPUs, Triton interprets the kernels, which takes some seconds.
"""

import sys

import torch

import halley
from halley.distributed.mesh import join_world
from halley.fused.buffers import Workspaces


NUM_TOKENS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 64, 256, 128
NUM_EXPERTS, TOP_K = 8, 2


def make_experts(groups: halley.ParallelGroups, device: torch.device) -> halley.Experts:
    """Return random weights of this rank's share of the experts."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def weight(rows: int, columns: int) -> torch.Tensor:
        shape = (NUM_EXPERTS // groups.ep_size, rows, columns)
        return (torch.randn(shape, device=device) * columns**-0.5).to(dtype)

    return halley.Experts(
        up_LGD=weight(2 * INTERMEDIATE_SIZE, HIDDEN_SIZE).requires_grad_(),
        down_LDF=weight(HIDDEN_SIZE, INTERMEDIATE_SIZE).requires_grad_(),
    )


def compare(groups: halley.ParallelGroups, device: torch.device) -> list[str]:
    """Run all strategies on the same tokens; return a report of this rank, line by line."""
    torch.manual_seed(groups.rank)
    experts = make_experts(groups, device)
    x_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device).to(experts.up_LGD.dtype)
    scores_TE = torch.randn(NUM_TOKENS, NUM_EXPERTS, device=device).softmax(dim=-1)
    weights_TK, idx_TK = scores_TE.topk(TOP_K, dim=-1)
    routing = halley.Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)

    recorder = halley.Recorder(device.type, enabled=False)
    workspaces = Workspaces(groups.ep, device)  # symmetric memory, shared by strategies and layers
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in ("sequential", "unfused", "fused"):
        strategy = halley.build_strategy(
            name, groups.ep, recorder=recorder, device=device, workspaces=workspaces
        )
        y_TD = strategy.forward(x_TD, routing, experts)
        gradients = torch.autograd.grad(y_TD.square().sum(), (experts.up_LGD, experts.down_LDF))
        results[name] = (y_TD.detach(), *gradients)

    errors = [
        float((fused - wanted).abs().max() / wanted.abs().max())
        for fused, wanted in zip(results["fused"], results["sequential"], strict=True)
    ]
    equal = all(map(torch.equal, results["fused"], results["unfused"]))
    lines = [
        f"{NUM_TOKENS} tokens a rank, {NUM_EXPERTS} experts on {groups.ep_size} ranks ({device})",
        "fused differs from sequential, relative to the largest value: "
        + ", ".join(
            f"{name} {error:.1e}"
            for name, error in zip(("output", "up.grad", "down.grad"), errors, strict=True)
        ),
        f"fused equals unfused bit for bit: {equal}",
    ]
    for workspace in workspaces.all():
        context = workspace.context()
        for name in ("routing_buffer", "send_buffer", "combine_buffer"):
            local = getattr(context, name).local
            lines.append(f"symmetric {name:<14} {tuple(local.shape)!s:>14} {local.nbytes:>9} bytes")
    workspaces.close()
    return lines


def main() -> None:
    with join_world("auto") as world:
        groups = halley.build_groups(0, device_type=world.device.type)  # experts over all ranks
        lines = compare(groups, world.device)
        if world.is_first:
            sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
