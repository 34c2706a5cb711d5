"""One MoE layer whose experts live on two ranks: forward, backward, and where the time went.

Run it with ``torchrun --nproc-per-node 2 examples/01_layer.py``, or alone on one rank.
"""

import os
import sys

import torch
import torch.distributed as dist

import halley


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    groups = halley.build_groups(0, device_type="cpu")  # all ranks share the experts
    recorder = halley.Recorder("cpu", rank=groups.rank)
    strategy = halley.build_strategy(
        "chunked", groups.ep, recorder=recorder, device=torch.device("cpu")
    )
    config = halley.MoEConfig(num_experts=8, top_k=2, intermediate_size=256)
    layer = halley.MoELayer(config, 128, strategy=strategy, groups=groups)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    x_TD = torch.randn(512, 128, requires_grad=True)
    out = layer(x_TD)
    (out.y.square().mean() + out.router_loss).backward()

    if groups.rank == 0:
        sys.stdout.write(f"slots of each expert on rank 0: {out.counts_E.tolist()}\n")
        for span in recorder.collect():
            sys.stdout.write(f"{span.start_us:9.0f} us  {span.duration_us:8.0f} us  {span.name}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
