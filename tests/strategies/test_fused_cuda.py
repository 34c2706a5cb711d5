"""The fused strategy on GPUs: values, gradients, reproducible bits, and missing ranks.

TRITON_INTERPRET=0 pytest tests/strategies/test_fused_cuda.py
"""

import re
import time
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from halley.core.types import Experts, Routing, Save
from halley.fused.buffers import Workspaces
from tests.gpus import device_of, needs_kernels
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    LayerCase,
    assert_close,
    build,
    check_values,
    expected,
    import_inductor,
    make_inputs,
    make_tokens,
    run_forward,
    train,
)
from tests.strategies.test_fused_compile import compare_sources


MAX_TOKENS = 320
TIMEOUT_S = 2.0

pytestmark = needs_kernels

each_size = pytest.mark.parametrize("num_ranks", [2, 4])


def _make_workspaces(rank: int, cases: list[LayerCase], *, max_tokens: int) -> Workspaces:
    return Workspaces(
        dist.group.WORLD, device_of(rank), tp_size=cases[0].tp_size, max_tokens=max_tokens
    )


@torch.no_grad()
def _check(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    workspaces = _make_workspaces(rank, cases, max_tokens=MAX_TOKENS)
    fused, unfused = (build(workspaces, fused=each) for each in (True, False))
    for case in cases:
        inputs = make_inputs(case, rank, device=workspaces.device)
        first, again, other = (s.forward(*inputs) for s in (fused, fused, unfused))
        torch.cuda.synchronize()
        workspaces.check()
        assert torch.equal(first, again), f"runs differ for {case}"
        assert torch.equal(first, other), f"fused differs from unfused for {case}"
        assert_close(first.cpu(), expected(case, rank)["y"], f"y: {case}", dtype=case.dtype)
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


def _check_gradients(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    """Run all cases forward, some with larger buffers, then backward in another order."""
    workspaces = _make_workspaces(rank, cases, max_tokens=64)
    device = workspaces.device
    first: list[dict[str, torch.Tensor]] = []
    for save in get_args(Save):
        for fused in (True, False, True):  # the first form twice, to compare two runs
            strategy = build(workspaces, fused=fused, save=save)
            calls = [run_forward(strategy.forward, case, rank, device=device) for case in cases]
            for call in calls[::2] + calls[1::2]:
                call.y_TD.backward(call.grad_TD)
            got = [call.values() for call in calls]
            torch.cuda.synchronize()
            workspaces.check()
            first = first or got
            for case, values, others in zip(cases, got, first, strict=True):
                for name, value in others.items():
                    assert torch.equal(values[name], value), f"{name}, {fused}, {save}, {case}"
    for case, values in zip(cases, first, strict=True):
        check_values(values, case, rank)
    workspaces.close()


@each_size
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_gradients(run_ranks: RunRanks, num_ranks: int, top_k: int) -> None:
    cases = _cases(num_ranks, num_experts=12 * num_ranks, top_k=top_k, dtype=torch.bfloat16)
    run_ranks(_check_gradients, num_ranks, cases, timeout_s=300)


def test_float16_gelu_and_dropped_slots(run_ranks: RunRanks) -> None:
    fields = {"dtype": torch.float16, "activation": "gelu", "dropped": 0.3}
    run_ranks(_check, 2, _cases(2, **fields), timeout_s=180)
    run_ranks(_check_gradients, 2, _cases(2, **fields), timeout_s=300)


@each_size
def test_ranks_that_share_experts(run_ranks: RunRanks, num_ranks: int) -> None:
    fields = {"tp_size": 2, "top_k": 3, "dropped": 0.2, "dtype": torch.bfloat16}
    cases = _cases(num_ranks, num_experts=12, **fields)
    run_ranks(_check, num_ranks, cases, timeout_s=180)
    run_ranks(_check_gradients, num_ranks, cases, timeout_s=300)


def _compare_compiled(rank: int, num_ranks: int, save: Save) -> None:
    """Two layers in a row, in one graph by Inductor, on tokens that vary in number."""
    import_inductor()
    strategy = build(Workspaces(dist.group.WORLD, device_of(rank)), fused=True, save=save)

    def run(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        x_TD = x_TD + strategy.forward(x_TD, routing, experts)
        return x_TD + strategy.forward(x_TD, routing, experts)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for seed, tokens in enumerate([(90, 60), (5, 7), (0, 70)]):
        case = LayerCase(num_tokens_W=tokens, dtype=torch.bfloat16, seed=seed)
        results: list[tuple[torch.Tensor, ...]] = []
        for forward in (run, compiled):
            inputs = make_inputs(case, rank, device=strategy.workspaces.device)
            y_TD, leaves = forward(*inputs), list(inputs.leaves().values())
            results.append((y_TD, *torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))))
        torch.cuda.synchronize()
        for want, got in zip(*results, strict=True):
            assert torch.equal(got, want), case
    strategy.workspaces.close()


@pytest.mark.parametrize("save", get_args(Save))
def test_compiled_layers_have_the_bits_of_eager_layers(run_ranks: RunRanks, save: Save) -> None:
    run_ranks(_compare_compiled, 2, save, timeout_s=300)


def _add_to_main_grad(rank: int, num_ranks: int, case: LayerCase) -> None:
    workspaces = Workspaces(dist.group.WORLD, device_of(rank))
    strategy = build(workspaces, fused=True)
    plain = train(strategy.forward, case, rank, device=workspaces.device)
    inputs = make_inputs(case, rank, device=workspaces.device)
    grad_TD, weights = make_tokens(case, rank)[2], inputs.experts.tensors()
    for weight in weights.values():
        main_grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
        vars(weight).update(main_grad=main_grad, grad_added_to_main_grad=False)
    for times in (1, 2):
        strategy.forward(*inputs).backward(grad_TD.to(workspaces.device))
        for name, weight in weights.items():
            assert weight.grad is None
            assert vars(weight)["grad_added_to_main_grad"]
            once = vars(weight)["main_grad"] / times  # exact, because times is 1 or 2
            assert torch.equal(once.to(case.dtype), plain[f"{name}.grad"])
    workspaces.close()


def test_main_grad_is_added_to(run_ranks: RunRanks) -> None:
    case = LayerCase(num_tokens_W=(60, 30), dtype=torch.bfloat16, skew="zipf:1.0")
    run_ranks(_add_to_main_grad, 2, case)


def _skip_backward(rank: int, num_ranks: int) -> str:
    workspaces = Workspaces(dist.group.WORLD, device_of(rank), timeout_s=TIMEOUT_S)
    strategy = build(workspaces, fused=True)
    case = LayerCase(num_tokens_W=(64,) * num_ranks, dtype=torch.bfloat16)
    call = run_forward(strategy.forward, case, rank, device=workspaces.device)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)  # longer than the other ranks wait
        return ""

    with pytest.raises(RuntimeError) as raised:  # noqa: PT012
        call.y_TD.backward(call.grad_TD)  # raises here if the wait fails while a kernel is compiled
        torch.cuda.synchronize()
        workspaces.check()
    return str(raised.value)


def test_rank_that_runs_no_backward_is_named(run_ranks: RunRanks) -> None:
    told, _ = run_ranks(_skip_backward, 2, timeout_s=120)
    assert told.startswith("rank 0: rank 1 did not publish its rows for another pass of call 1")


@torch.no_grad()
def _lose_rank_1(rank: int, num_ranks: int) -> str:
    workspaces = Workspaces(
        dist.group.WORLD, device_of(rank), max_tokens=MAX_TOKENS, timeout_s=TIMEOUT_S
    )
    strategy = build(workspaces, fused=True)
    case = LayerCase(num_tokens_W=(64,) * num_ranks, dtype=torch.bfloat16)
    inputs = make_inputs(case, rank, device=workspaces.device)
    strategy.forward(*inputs)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)  # longer than the other ranks wait
        return ""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape("rank 1 did not publish")) as raised:
        strategy.forward(*inputs)
    assert time.monotonic() - begin < 3 * TIMEOUT_S
    with pytest.raises(RuntimeError, match=re.escape("rank 1 did not publish")):
        strategy.forward(*inputs)  # later calls of this strategy raise the same error
    return str(raised.value)


@each_size
def test_missing_rank_is_named_and_a_new_strategy_works(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    told = run_ranks(_lose_rank_1, num_ranks, timeout_s=120)
    for rank in set(range(num_ranks)) - {1}:
        assert told[rank].startswith(f"rank {rank}: rank 1 did not publish its routing")
    run_ranks(_check, num_ranks, _cases(num_ranks, dtype=torch.bfloat16)[:4], timeout_s=120)


def _compare_sources(rank: int, num_ranks: int) -> None:
    compare_sources(rank, num_ranks, device_of(rank))


def test_weights_that_are_copied_get_gradients_of_their_dtype(run_ranks: RunRanks) -> None:
    run_ranks(_compare_sources, 2)
