"""Train a Transformers model with DeepSpeed's AutoEP and experts that Halley runs.

Run it with ``DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/06_deepspeed.py``, or with
``python`` on one rank. A small random model is used, so that nothing is downloaded.
"""

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist


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


def train(num_ranks: int) -> list[str]:
    """Train some steps on random tokens; return the lines to print."""
    import deepspeed
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    import halley.integrations.deepspeed as halley_deepspeed

    lines = [halley_deepspeed.enable("sequential")]  # the only line for Halley
    torch.manual_seed(0)  # the same model on all ranks
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES))
    experts = {"enabled": True, "autoep_size": num_ranks, "preset_model": "qwen3_moe"}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
            "expert_parallel": experts,
        },
    )
    rank = dist.get_rank()
    tokens = torch.randint(0, SIZES["vocab_size"], (num_ranks, 2, 32))[rank].to(engine.device)
    for step in range(NUM_STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        lines.append(f"step {step}: loss {float(loss.detach()):.3f} on rank {rank}")
    lines += [f"{name}: {path}" for name, path in halley_deepspeed.describe(engine.module).items()]
    halley_deepspeed.disable()
    return [*lines, f"{SIZES['num_experts']} experts on {num_ranks} ranks"]


def main() -> None:
    if find_spec("deepspeed") is None or find_spec("transformers") is None:
        sys.stdout.write("no experts to run: pip install deepspeed '.[hf]'\n")
        return
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:  # variables that torchrun would set
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT="29533")
    lines = train(num_ranks)
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join([*lines, ""]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
