"""Call the fused strategy with random shapes and delays; check values, and that no call hangs.

Each call draws a layer, the number of ranks per expert, a load, the number of tokens of each rank
(also 0) and a delay of each rank. Every second call also runs backward, with a random choice of
saved activations. Outputs and gradients of `fused` must equal those of `unfused` bit for bit. They
must equal those of `sequential` within twice the tolerance of the dtype, because both are rounded.

    torchrun --nproc-per-node 4 benchmarks/stress_fused.py 2000
"""

import json
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.distributed.mesh import build_groups, join_world
from halley.fused.buffers import Workspaces
from halley.ops.kernels.launch import compile_only
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.skew import parse_load, sample_routing


LAYERS = ((8, 1, 256, 160), (8, 2, 1024, 512), (64, 8, 2048, 768), (32, 10, 520, 288))  # E, K, D, F
LAYERS_OF_TP_SIZE = {1: (0, 1, 2, 3), 2: (1,), 4: (2,)}  # kernels are compiled for each
LOADS = ("balanced", "std:0.005", "zipf:1.2", "one-hot")
FUSED = ("unfused", "fused", "fused:inputs", "fused:recompute")
MAX_TOKENS = 700
MAX_DELAY_CYCLES = 1_000_000  # about 0.6 ms


def main() -> None:
    num_calls = int(sys.argv[1])
    with join_world("cuda") as world:
        device, groups = world.device, build_groups(0, device_type="cuda")
        setups = [
            Setup(groups.ep, tp_size, device=device)
            for tp_size in LAYERS_OF_TP_SIZE
            if groups.ep_size % tp_size == 0
        ]
        compile_all(setups, device=device)
        begin, worst = time.perf_counter(), 0.0
        for call in range(num_calls):
            worst = max(worst, check_call(call, setups, device=device))
        seconds = time.perf_counter() - begin
        total = torch.tensor(worst, device=device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        if world.is_first:
            line = {"calls": num_calls, "seconds": round(seconds, 1), "max_rel_err": float(total)}
            sys.stdout.write(json.dumps(line) + "\n")


class Setup:
    """The strategies for one number of ranks per expert, with the experts of every layer."""

    def __init__(
        self, group: dist.ProcessGroup | None, tp_size: int, *, device: torch.device
    ) -> None:
        recorder = Recorder(device, enabled=False)
        workspaces = Workspaces(group, device, tp_size=tp_size, max_tokens=MAX_TOKENS)
        self.strategies: dict[str, Any] = {
            name: build_strategy(
                name,
                group,
                recorder=recorder,
                device=device,
                tp_size=tp_size,
                workspaces=workspaces,
            )
            for name in ("sequential", *FUSED)
        }
        self.experts = {
            which: draw_experts(LAYERS[which], tp_size, device=device)
            for which in LAYERS_OF_TP_SIZE[tp_size]
        }


def draw_experts(
    layer: tuple[int, int, int, int], tp_size: int, *, device: torch.device
) -> Experts:
    """Return random experts of this rank, or shards."""
    num_experts, _, hidden, inner = layer
    num_local, inner = num_experts * tp_size // dist.get_world_size(), inner // tp_size
    options = {"dtype": torch.bfloat16, "device": device}
    return Experts(
        up_LGD=(
            torch.randn(num_local, 2 * inner, hidden, **options) * hidden**-0.5
        ).requires_grad_(),
        down_LDF=(torch.randn(num_local, hidden, inner, **options) * inner**-0.5).requires_grad_(),
    )


def compile_all(setups: list[Setup], *, device: torch.device) -> None:
    """Compile all kernels; each rank compiles a share, and finds the others in the cache."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tasks = [(name, s, which) for name in FUSED for s in setups for which in s.experts]
    with compile_only(num_ranks):
        for index, (name, setup, which) in enumerate(tasks):
            num_experts, top_k, hidden, _ = LAYERS[which]
            load_E = parse_load("balanced", num_experts=num_experts, top_k=top_k)
            generator = torch.Generator().manual_seed(0)
            routing = sample_routing(load_E, 8, top_k=top_k, generator=generator, device=device)
            x_TD = torch.zeros(8, hidden, dtype=torch.bfloat16, device=device)
            strategy, layer = setup.strategies[name], (x_TD, routing, setup.experts[which])
            strategy.prepare(*layer)  # on all ranks
            if index % num_ranks == rank:
                for backward in (False, True):
                    strategy.compile(*layer, backward=backward)
    dist.barrier()


def check_call(
    call: int,
    setups: list[Setup],
    *,
    device: torch.device,
) -> float:
    """Run one random layer by all strategies; return the relative error.

    Raises:
        RuntimeError: a value is wrong.
    """
    alike = random.Random(call)  # the same on all ranks
    own = random.Random(call * 64 + dist.get_rank())
    setup, which = alike.choice([(s, which) for s in setups for which in s.experts])
    num_experts, top_k, hidden, _ = LAYERS[which]
    load_E = parse_load(alike.choice(LOADS), num_experts=num_experts, top_k=top_k)
    num_tokens = own.choice((0, 1, own.randrange(MAX_TOKENS + 1), MAX_TOKENS))
    generator = torch.Generator().manual_seed(call * 64 + dist.get_rank())
    routing: Routing = sample_routing(
        load_E, num_tokens, top_k=top_k, generator=generator, device=device
    )
    routing.topk_weights_TK.requires_grad_()
    x_TD = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=device).requires_grad_()
    grad_TD = torch.randn_like(x_TD) if call % 2 == 1 else None
    fused = alike.choice(FUSED[1:])
    results = {}
    for name in ("sequential", "unfused", fused):
        torch.cuda._sleep(own.randrange(MAX_DELAY_CYCLES))
        strategy, experts = setup.strategies[name], setup.experts[which]
        results[name] = run(strategy, x_TD, routing, experts, grad_TD)
    for value, unfused in zip(results[fused], results["unfused"], strict=True):
        if not torch.equal(value, unfused):
            raise RuntimeError(f"call {call}: {fused} is not unfused on rank {dist.get_rank()}")
    worst = largest_error(results[fused], results["sequential"], grad_TD)
    if worst > 2 * RELATIVE_TOLERANCE[torch.bfloat16]:
        raise RuntimeError(f"call {call}: relative error {worst} on rank {dist.get_rank()}")
    return worst


def largest_error(
    values: list[torch.Tensor], wanted: list[torch.Tensor], grad_TD: torch.Tensor | None
) -> float:
    """Return the largest relative error of the output and the gradients."""
    errors = [
        relative_error(value, right) if right.numel() else 0.0
        for value, right in zip(values, wanted, strict=True)
    ]
    if grad_TD is not None and grad_TD.numel():
        # The gradient of a routing weight is a dot product of two long vectors. That of a lone
        # token may be near zero by chance, so what it is held against is at least its usual size.
        y_TD, norm = wanted[0].double(), float(wanted[2].double().norm())
        norms_T = y_TD.norm(dim=1) * grad_TD.double().norm(dim=1)
        usual = float(norms_T.norm()) * y_TD.shape[1] ** -0.5
        errors[2] *= norm / max(norm, usual)
    return max(errors)


def run(
    strategy: AbstractStrategy,
    x_TD: torch.Tensor,
    routing: Routing,
    experts: Experts,
    grad_TD: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the output, and all gradients if the gradient of the output is given."""
    with torch.set_grad_enabled(grad_TD is not None):
        y_TD = strategy.forward(x_TD, routing, experts)
    if grad_TD is None:
        return [y_TD]
    leaves = (x_TD, routing.topk_weights_TK, experts.up_LGD, experts.down_LDF)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, grad_TD)]


if __name__ == "__main__":
    main()
