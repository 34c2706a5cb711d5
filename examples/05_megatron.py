"""Train one Megatron-Core MoE layer that Halley runs, enabled by one call on its spec.

Run it with ``torchrun --nproc-per-node 2 examples/05_megatron.py``, or with ``python`` on one rank.
Jobs of Megatron-LM, which needs GPUs, take ``--spec halley.integrations.megatron layer_spec``.
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist


NUM_STEPS, NUM_EXPERTS, HIDDEN = 5, 8, 64


def build_layer(num_ranks: int) -> Any:
    """Return a layer as Megatron builds it from a spec."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    from halley.integrations.megatron import enable

    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=2 * HIDDEN,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=num_ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        init_method_std=0.1,
        use_cpu_initialization=True,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS)
    torch.manual_seed(0)  # the same router on all ranks
    layer = enable(spec, strategy="sequential")(config=config)
    # Megatron's own gating moves the router's weights to a GPU.
    layer.router.gating = lambda x_SBD: torch.nn.functional.linear(x_SBD, layer.router.weight)
    return layer


def train(num_ranks: int) -> list[str]:
    """Fit the layer to a linear map of random tokens; return the lines to print."""
    from halley.integrations.megatron import describe

    layer, rank = build_layer(num_ranks), dist.get_rank()
    lines: list[str] = []
    generator = torch.Generator().manual_seed(rank)
    target = torch.eye(HIDDEN).roll(1, dims=0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        x_SBD = torch.randn(64, 2, HIDDEN, generator=generator)
        y_SBD, _ = layer(x_SBD)
        loss = (y_SBD - x_SBD @ target).square().mean() / num_ranks
        loss.backward()
        for parameter in layer.parameters():
            if getattr(parameter, "allreduce", True):  # not the experts'
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {num_ranks * float(loss.detach()):.3f} on rank {rank}")
    return [*lines, *describe(layer).values(), f"{NUM_EXPERTS} experts on {num_ranks} ranks"]


def main() -> None:
    if find_spec("megatron") is None:
        sys.stdout.write("no experts to run: pip install megatron-core\n")
        return
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        alone = {} if num_ranks > 1 else {"init_method": f"file://{folder}/store"}
        dist.init_process_group(
            "gloo", rank=int(os.environ.get("RANK", "0")), world_size=num_ranks, **alone
        )
        lines = train(num_ranks)
        if dist.get_rank() == 0:
            sys.stdout.write("\n".join([*lines, ""]))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
