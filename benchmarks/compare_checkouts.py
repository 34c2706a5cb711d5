"""Compare the bits of MoE layers, forward and backward, between two checkouts of Halley.

    python benchmarks/compare_checkouts.py --old ../old                  # CPU ranks, small layers
    python benchmarks/compare_checkouts.py --old ../old --device cuda    # the shapes of the models

Each checkout runs the same layers with the same inputs on its own ranks, and prints a checksum of
the output, the router's loss, the expert counts and every gradient. The script prints a table and
one JSON line, and exits with 1 if any checksum differs or if ``fused`` differs from ``unfused``.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist


MODELS = ("mixtral-8x7b", "phi-3.5-moe", "qwen2-moe", "qwen3-30b-a3b", "deepseek-v3")
STRATEGIES = {
    "cpu": ("sequential", "chunked", "functional", "gathered", "unfused", "fused"),
    "cuda": ("sequential", "chunked", "functional", "unfused", "fused", "fused:recompute"),
}
NUM_TOKENS = {"cpu": 24, "cuda": 2048}
_MARK = "checksum "


def checksum(tensor: torch.Tensor) -> str:
    """Return a checksum of the bits and their order, computed on the tensor's own device."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    sums = []
    for part in tensor.detach().contiguous().view(width).flatten().split(1 << 26):
        places = torch.arange(part.numel(), device=part.device) % 65521 + 1
        sums.append(int((part.to(torch.int64) * places).sum()))
    text = f"{tuple(tensor.shape)} {tensor.dtype} {sums}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_rank(device_type: str, models: list[str], num_tokens: int) -> None:
    """Run every case on this rank; the checkout is the one that PYTHONPATH names."""
    import halley  # the checkout under test
    from halley.core.models import find_model

    rank = int(os.environ["RANK"])
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    groups = halley.build_groups(0, device_type=device_type)
    for name in models:
        model = find_model(name)
        config, hidden_size = model.moe, model.hidden_size
        if device_type == "cpu":
            config = replace(
                config, num_experts=min(config.num_experts, 16), intermediate_size=32,
                shared_intermediate_size=min(config.shared_intermediate_size, 32),
            )  # fmt: skip
            hidden_size = 64
        for strategy in STRATEGIES[device_type]:
            for key, value in run_layer(
                halley, config, hidden_size, strategy, groups, device, num_tokens
            ):
                line = {"model": name, "strategy": strategy, "rank": rank, "tensor": key}
                sys.stdout.write(_MARK + json.dumps({**line, "checksum": value}) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def run_layer(
    halley,
    config,
    hidden_size: int,
    strategy_name: str,
    groups,
    device: torch.device,
    num_tokens: int,
) -> Iterator[tuple[str, str]]:
    """Yield the name and checksum of each result of one layer on this rank."""
    recorder = halley.Recorder(device.type, enabled=False)
    strategy = halley.build_strategy(strategy_name, groups.ep, recorder=recorder, device=device)
    dtype = torch.bfloat16
    layer = halley.MoELayer(
        config, hidden_size, strategy=strategy, groups=groups, dtype=dtype, device=device
    )
    for index, (name, parameter) in enumerate(sorted(layer.named_parameters())):
        own = 1000 * groups.rank if "experts" in name else 0
        generator = torch.Generator(device).manual_seed(index + own)
        with torch.no_grad():
            parameter.normal_(std=0.05, generator=generator)
    generator = torch.Generator(device).manual_seed(7 + groups.rank)
    shape = (num_tokens + groups.rank, hidden_size)
    x_TD = torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
    grad_TD = torch.randn(shape, generator=generator, device=device).to(dtype)
    for step in range(2):  # the second call replays what the first one recorded
        layer.zero_grad()
        x_TD.grad = None
        out = layer(x_TD)
        torch.autograd.backward((out.y, out.router_loss), (grad_TD, None))
        yield f"y.{step}", checksum(out.y)
        yield f"router_loss.{step}", checksum(out.router_loss)
        yield f"counts.{step}", checksum(out.counts_E)
        yield f"x.grad.{step}", checksum(x_TD.grad)
        for name, parameter in sorted(layer.named_parameters()):
            if parameter.grad is not None:
                yield f"{name}.grad.{step}", checksum(parameter.grad)
    release = getattr(getattr(strategy, "workspaces", None) or strategy, "close", None)
    if release is not None:
        release()


def run_checkout(checkout: Path, args: argparse.Namespace) -> dict[tuple[str, ...], str]:
    """Return the checksums of a checkout by model, strategy, tensor and rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={args.nproc}", __file__, "--rank", "--device", args.device,
        "--models", ",".join(args.models), "--tokens", str(args.tokens),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    if args.device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout} failed:\n{done.stderr[:6000]}")
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            row = json.loads(line.removeprefix(_MARK))
            key = (row["model"], row["strategy"], row["tensor"], str(row["rank"]))
            found[key] = row["checksum"]
    return found


def compare(old: dict[tuple[str, ...], str], new: dict[tuple[str, ...], str]) -> bool:
    """Print one line for each model and strategy; return whether everything is equal."""
    if old.keys() != new.keys():
        sys.stdout.write(f"only in one checkout: {sorted(old.keys() ^ new.keys())}\n")
        return False
    differing = [key for key in sorted(old) if old[key] != new[key]]
    differing += [
        key
        for key in sorted(new)
        if key[1] == "fused" and new[key] != new[(key[0], "unfused", *key[2:])]
    ]
    for case in dict.fromkeys(key[:2] for key in old):
        wrong = [key[2] for key in differing if key[:2] == case]
        verdict = "same bits" if not wrong else f"DIFFERENT: {', '.join(sorted(set(wrong)))}"
        sys.stdout.write(f"{case[0]:<16}{case[1]:<18}{verdict}\n")
    totals = {"num_compared": len(old), "num_different": len(differing)}
    sys.stdout.write(json.dumps(totals) + "\n")
    return not differing and bool(old)


def main() -> None:
    """Start both checkouts, or one rank of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="checkout to compare with this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", type=int, default=0, help="tokens a rank; 0: 24 or 2048")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.models = args.models.split(",")
    args.tokens = args.tokens or NUM_TOKENS[args.device]
    if args.rank:
        run_rank(args.device, args.models, args.tokens)
    else:
        new = run_checkout(Path(__file__).parents[1], args)
        sys.exit(0 if compare(run_checkout(args.old, args), new) else 1)


if __name__ == "__main__":
    main()
