"""An MoE layer in three lines, forward and backward, on one process or on many.

Run it with ``python examples/01_layer.py``, or with ``torchrun --nproc-per-node 2
examples/01_layer.py``: the experts are then spread over the ranks, one GPU each if there are any.
"""

import sys

import torch
import torch.distributed as dist

import halley


def main() -> None:
    layer = halley.MoE(hidden_size=128, num_experts=8, top_k=2, intermediate_size=256)
    x = torch.randn(4, 128, 128, device=next(layer.parameters()).device)  # (batch, seq, hidden)
    y = layer(x)

    (y.square().mean() + layer.aux_loss).backward()
    layer.sync_gradients()
    if layer.groups.rank == 0:
        counts = layer.expert_counts.tolist()
        sys.stdout.write(f"slots of the experts on rank 0: {counts}, output {tuple(y.shape)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
