"""The fused strategy on GPUs: right values, the bits of the unfused form, and lost peers.

TRITON_INTERPRET=0 pytest tests/strategies/test_fused_cuda.py
"""

import dataclasses
import re
import time

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.core.types import Experts, Routing
from halley.kernels.switch import INTERPRETED
from halley.ops.workspaces import Workspaces
from halley.strategies.fused import FusedStrategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, expected, local_experts_of, make_tokens


NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() and not INTERPRETED else 0
MAX_TOKENS = 320
TIMEOUT_S = 2.0

pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs and TRITON_INTERPRET=0")

each_size = pytest.mark.parametrize("num_ranks", [n for n in (2, 4) if n <= NUM_GPUS] or [2])


def _device(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _on(device: torch.device, case: LayerCase, rank: int) -> tuple[torch.Tensor, Routing, Experts]:
    x_TD, routing, _ = make_tokens(case, rank)
    experts = local_experts_of(case, rank)
    return (
        x_TD.detach().to(device),
        Routing(
            topk_idx_TK=routing.topk_idx_TK.to(device),
            topk_weights_TK=routing.topk_weights_TK.detach().to(device),
        ),
        dataclasses.replace(
            experts,
            up_LGD=experts.up_LGD.detach().to(device),
            down_LDF=experts.down_LDF.detach().to(device),
        ),
    )


def _build(workspaces: Workspaces, *, fused: bool) -> FusedStrategy:
    recorder = Recorder(workspaces.device, enabled=False)
    return FusedStrategy(workspaces, recorder=recorder, fused=fused)


@torch.no_grad()
def _check(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    workspaces = Workspaces(dist.group.WORLD, _device(rank), max_tokens=MAX_TOKENS)
    fused, unfused = (_build(workspaces, fused=each) for each in (True, False))
    for case in cases:
        inputs = _on(workspaces.device, case, rank)
        first, again, other = (s.forward(*inputs) for s in (fused, fused, unfused))
        torch.cuda.synchronize()
        workspaces.check()
        assert torch.equal(first, again), f"runs differ for {case}"
        assert torch.equal(first, other), f"fused differs from unfused for {case}"
        error = relative_error(first.cpu(), expected(case, rank)["y"])
        assert error <= RELATIVE_TOLERANCE[case.dtype], f"y is off by {error:.2e} for {case}"
    workspaces.close()


def _cases(num_ranks: int, **fields: object) -> list[LayerCase]:
    """Return cases of one layout: several token counts, loads and seeds."""
    tokens = (
        tuple(40 + 7 * rank for rank in range(num_ranks)),
        tuple(0 if rank == 1 else 200 for rank in range(num_ranks)),
        tuple(MAX_TOKENS for _ in range(num_ranks)),
        tuple(1 if rank == 0 else 0 for rank in range(num_ranks)),
    )
    skews = ("balanced", "zipf:1.2", "one-hot", "empty-expert")
    return [
        LayerCase(num_tokens_W=counts, skew=skew, seed=seed, **fields)  # pyright: ignore[reportArgumentType]
        for seed, (counts, skew) in enumerate((c, s) for c in tokens for s in skews)
    ]


@each_size
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8, 10])
def test_values_and_bits(run_ranks: RunRanks, num_ranks: int, top_k: int) -> None:
    cases = _cases(num_ranks, num_experts=12 * num_ranks, top_k=top_k, dtype=torch.bfloat16)
    run_ranks(_check, num_ranks, cases, timeout_s=180)


def test_float16_gelu_and_dropped_slots(run_ranks: RunRanks) -> None:
    fields = {"dtype": torch.float16, "activation": "gelu", "dropped": 0.3}
    run_ranks(_check, 2, _cases(2, **fields), timeout_s=180)


def test_more_tokens_than_there_was_room_for(run_ranks: RunRanks) -> None:
    counts = [(64, 64), (700, 3), (5, 900), (64, 64)]
    cases = [LayerCase(num_tokens_W=c, dtype=torch.bfloat16) for c in counts]
    run_ranks(_check, 2, cases, timeout_s=180)


@torch.no_grad()
def _lose_a_peer(rank: int, num_ranks: int) -> str:
    workspaces = Workspaces(
        dist.group.WORLD, _device(rank), max_tokens=MAX_TOKENS, timeout_s=TIMEOUT_S
    )
    strategy = _build(workspaces, fused=True)
    case = LayerCase(num_tokens_W=(64,) * num_ranks, dtype=torch.bfloat16)
    inputs = _on(workspaces.device, case, rank)
    strategy.forward(*inputs)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)  # past the limit of those that wait
        return ""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape("rank 1 did not publish")) as raised:
        strategy.forward(*inputs)
    assert time.monotonic() - begin < 3 * TIMEOUT_S
    with pytest.raises(RuntimeError, match=re.escape("rank 1 did not publish")):
        strategy.forward(*inputs)  # nothing works until all ranks make a new one
    return str(raised.value)


@each_size
def test_lost_peer_is_named_and_a_new_run_works(run_ranks: RunRanks, num_ranks: int) -> None:
    told = run_ranks(_lose_a_peer, num_ranks, timeout_s=120)
    for rank in set(range(num_ranks)) - {1}:
        assert told[rank].startswith(f"rank {rank}: rank 1 did not publish its routing")
    run_ranks(_check, num_ranks, _cases(num_ranks, dtype=torch.bfloat16)[:4], timeout_s=120)
