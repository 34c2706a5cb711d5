"""Fine-tune a Transformers MoE model whose experts Halley runs.

Run it with ``torchrun --nproc-per-node 2 examples/03_transformers.py``, or with ``python`` on one
rank. A small random model is used, so that nothing is downloaded. ``enable`` is the only line for
Halley.
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import halley.integrations.transformers as halley_transformers


NUM_STEPS = 5
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def load_model(folder: str, num_ranks: int) -> Any:
    """Return the model of a folder, with its experts spread over all ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if num_ranks == 1:
        return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="halley")
    config = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def train(num_ranks: int) -> list[str]:
    """Train some steps on random tokens; return the lines to print."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    lines = [halley_transformers.enable(strategy="sequential")]
    torch.manual_seed(0)  # the same model on all ranks
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
        model = load_model(folder, num_ranks)
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = torch.randint(0, SIZES["vocab_size"], (num_ranks, 2, 32))[rank].to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {float(loss.detach()):.3f} on rank {rank}")
    lines += [f"{name}: {path}" for name, path in halley_transformers.describe(model).items()]
    return [*lines, f"{SIZES['num_experts']} experts on {num_ranks} ranks"]


def main() -> None:
    if find_spec("transformers") is None:
        sys.stdout.write("no experts to run: pip install '.[hf]' installs transformers\n")
        return
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    lines = train(num_ranks)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write("\n".join([*lines, ""]))
    if num_ranks > 1:
        dist.destroy_process_group()
    halley_transformers.disable()


if __name__ == "__main__":
    main()
