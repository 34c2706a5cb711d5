"""``BoundedStep`` repeats steps in which a rank gets more rows than ``max_load`` allows."""

import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halley.core.types import Experts, Routing
from halley.fused.bounded import BoundedStep, CapturedStep, make_workspaces
from halley.fused.buffers import Workspaces, find_workspaces
from halley.fused.kernels import peer
from halley.interpreter import INTERPRETED
from halley.strategies.fused import FusedStrategy
from tests.fused.kernel_case import KernelCase
from tests.fused.kernel_case import make_tokens as make_kernel_tokens
from tests.fused.kernel_rank import KernelRank, run_world
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import CPU, LayerCase, build, local_experts_of, make_tokens


SIZES: dict[str, Any] = {"num_experts": 2, "top_k": 1}
BALANCED = LayerCase(num_tokens_W=(30, 30), seed=1, **SIZES)
# All 60 rows for the expert of one rank, whose buffers hold 48: 30 and the padding.
CROWD = LayerCase(num_tokens_W=(30, 30), skew="one-hot", seed=3, **SIZES)
ALONE = LayerCase(num_tokens_W=(30,), num_experts=1, top_k=1, seed=5)
MORE_TOKENS = LayerCase(num_tokens_W=(40, 10), seed=4, **SIZES)


class Layers(nn.Module):
    """Two MoE layers with the same experts, and a count of the tokens that they have seen."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        experts = local_experts_of(BALANCED, rank)
        self.up, self.down = nn.Parameter(experts.up_LGD), nn.Parameter(experts.down_LDF)
        self.num_tokens: torch.Tensor
        self.register_buffer("num_tokens", torch.zeros(1))

    def run(self, strategy: FusedStrategy, case: LayerCase, rank: int) -> torch.Tensor:
        """Run forward and backward on the tokens of a case; return the loss."""
        x_TD, routing, grad_TD = make_tokens(case, rank)
        experts = Experts(up_LGD=self.up, down_LDF=self.down)
        for _ in range(2):
            self.num_tokens += len(x_TD)
            x_TD = strategy.forward(x_TD, routing, experts)
        loss = (x_TD * grad_TD).sum()
        loss.backward()
        return loss.detach()


def _train(
    rank: int, num_ranks: int, steps: list[list[LayerCase]], max_load: float = 1.0
) -> tuple[list[int], list[str]]:
    """Run steps of microbatches with and without bounds; return numbers of repetitions, warnings.

    Loss of each microbatch that was run last, gradients and buffers must have the same bits.
    """
    exact, bounded = Workspaces(dist.group.WORLD, CPU), _make_bounded(max_load)
    wanted, found = Layers(rank), Layers(rank)
    strategy = build(bounded)

    def run(case: LayerCase) -> torch.Tensor:
        return found.run(strategy, case, rank)

    step = BoundedStep(run, run, model=found, num_microbatches=len(steps[0]))
    counts: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for microbatches in steps:
            for case in microbatches:
                assert torch.equal(step(case), wanted.run(build(exact), case, rank))
            counts.append(step.num_repeated)
            for name, parameter in wanted.named_parameters():
                got, want = found.get_parameter(name).grad, parameter.grad
                assert got is not None
                assert want is not None
                assert torch.equal(got, want), name
            assert torch.equal(found.num_tokens, wanted.num_tokens)
            wanted.zero_grad()
            found.zero_grad()
    for workspaces in (exact, bounded):
        workspaces.close()
    return counts, [str(warning.message) for warning in caught]


def _make_bounded(max_load: float = 1.0) -> Workspaces:
    return make_workspaces(dist.group.WORLD, CPU, max_load=max_load)


def test_steps_with_too_many_rows_have_the_bits_of_an_unbounded_run(run_ranks: RunRanks) -> None:
    """Steps after a repeated one run with bounds again, and only those beyond them are repeated."""
    steps = [[BALANCED], [CROWD], [MORE_TOKENS], [BALANCED]]
    (counts, said), (others, silent) = run_ranks(_train, 2, steps)
    assert counts == others == [0, 1, 2, 2]
    assert silent == []
    assert len(said) == 1
    assert said[0].startswith("rank 0: the experts of rank 0 got ")
    assert said[0].endswith(
        " rows, more than max_load allows; this layer needs a max_load of 1.6; the step runs again "
        "with exact sizes, and num_repeated counts such steps"
    )
    for counts, _ in run_ranks(_train, 2, [[BALANCED], [CROWD]], 1.6):
        assert counts == [0, 0]


def test_all_microbatches_of_a_step_are_repeated(run_ranks: RunRanks) -> None:
    """The gradients of the first microbatch are lost when the second one has too many rows."""
    for counts, _ in run_ranks(_train, 2, [[BALANCED, CROWD], [BALANCED, BALANCED]]):
        assert counts == [1, 1]


CALLS = KernelCase(num_tokens_CW=((20, 20, 20),) * 3, num_experts=3, top_k=1)
# The expert of all tokens of a rank, by call. In call 0, rank 0 gets 40 rows, and 32 fit. Rank 1
# exchanges no rows with it. In the other calls, rank 1 needs the sums of rank 2.
EXPERT_CW = ((0, 1, 0), (1, 2, 0), (1, 2, 0))
MAX_ROWS = 32


def _run_calls(rank: KernelRank) -> str:
    """Run all calls as a captured graph does, without a look at failures; return the failure."""
    rank.heap.barrier()
    for call, expert_W in enumerate(EXPERT_CW):
        x_TD, routing = make_kernel_tokens(CALLS, rank.rank, call=call)
        idx_TK = torch.full_like(routing.topk_idx_TK, expert_W[rank.rank])
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=routing.topk_weights_TK)
        rank.make_plan(x_TD, routing, max_rows=MAX_ROWS)
        rows = rank.make_rows(MAX_ROWS)
        rank.dispatch_gemm(rows)
        rank.gemm_combine(rows)
    return rank.failure()


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted kernels in a seeded schedule")
@pytest.mark.parametrize(
    "schedule",
    [
        {"seed": 0, "resident": 4},
        {"seed": 1, "resident": 4},
        {"seed": 8, "resident": 2, "starve": 0.05},
        {"seed": 6, "resident": 4, "starve": 0.1},
    ],
)
def test_rank_without_rows_of_the_overflowing_rank_knows_of_it(schedule: dict[str, Any]) -> None:
    """Else it makes plans in later calls, and waits for sums that no rank sends.

    With these seeds, this happens if ``rows_ready`` does not wait for the plan; with the last one,
    also if a failure ends that wait before the signals of the overflow. If a rank makes a usable
    plan after a failure, a kernel accesses memory outside of its buffers.
    """
    reports = run_world(CALLS, _run_calls, timeout_s=5.0, **schedule)
    problem = "the experts of rank 0 got 48 rows, more than max_load allows"
    assert reports == [f"rank {rank}: {problem}" for rank in range(3)]


def test_calls_outside_of_a_step_have_buffers_that_grow() -> None:
    workspaces = make_workspaces(None, CPU, max_load=1.0)
    assert find_workspaces(workspaces.handle) is workspaces
    found: list[Workspaces] = []
    step = BoundedStep(
        lambda: found.append(find_workspaces(workspaces.handle)), print, model=_EMPTY
    )
    step()
    assert found == [workspaces.bounded]


def test_host_waits_until_the_gpu_has_ended_the_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread stands for a GPU that replays a graph. Without the wait, no step is repeated."""
    workspaces = make_workspaces(None, CPU, max_load=1.0)
    strategy, model = build(workspaces), Layers(0)
    busy = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: busy)
    repeated: list[str] = []

    def replay() -> None:
        (workspace,) = workspaces.bounded.all()  # type: ignore[union-attr]
        time.sleep(0.2)
        workspace.host_status[0] = peer.MAX_ROWS.value << 48 | 99
        for _ in range(2):  # layers of the model
            workspace.ended._on_host += 1

    def bounded() -> None:
        if not workspaces.bounded.all():  # type: ignore[union-attr]
            model.run(strategy, ALONE, 0)
        else:
            threading.Thread(target=replay).start()

    step = BoundedStep(bounded, lambda: repeated.append("exact"), model=model)
    step()
    assert not repeated
    with pytest.warns(UserWarning, match="got 99 rows, more than max_load allows"):
        step()
    assert repeated == ["exact"]


class _Replays:
    """Stands for a CUDA graph: from the second call on, it writes gradients to the same memory."""

    def __init__(self, model: nn.Module, step: Callable[..., Any]) -> None:
        self.parameters, self.step, self.num_calls = list(model.parameters()), step, 0
        self.written: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        before = [each.grad for each in self.parameters]
        if self.num_calls > 2:
            for each in self.parameters:
                each.grad = None
        result = self.step(*args)
        if self.num_calls == 2:
            self.written = [each.grad for each in self.parameters]
        elif self.num_calls > 2:
            for each, old, own in zip(self.parameters, before, self.written, strict=True):
                own.copy_(each.grad)
                each.grad = old
        return result


def test_gradients_of_a_captured_step_add_up() -> None:
    """Else a step would lose gradients, or train on those of an earlier one."""
    torch.manual_seed(0)
    wanted, found = nn.Linear(4, 3), nn.Linear(4, 3)
    found.load_state_dict(wanted.state_dict())

    def make(model: nn.Module) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        return step

    exact = make(wanted)
    captured = CapturedStep(make(found), model=found, capture=partial(_Replays, found))
    for after in ("keep", "keep", "drop", "drop", "zero", "keep", "keep", "drop", "keep"):
        x = torch.randn(5, 4)
        assert torch.equal(captured(x), exact(x))
        for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            for each in (one, other):
                if after == "drop":
                    each.grad = None
                elif after == "zero":
                    each.grad.zero_()  # type: ignore[union-attr]


_EMPTY = nn.Identity()


def test_number_of_microbatches_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^num_microbatches \(0\) must be at least 1$"):
        BoundedStep(print, print, model=_EMPTY, num_microbatches=0)


def test_layer_in_a_bounded_step_allocates_only_buffers_of_fixed_sizes() -> None:
    workspaces = make_workspaces(None, CPU, max_load=1.5)
    x_TD, routing, _ = make_tokens(ALONE, 0)
    prepare = partial(build(workspaces).prepare, x_TD, routing, local_experts_of(ALONE, 0))
    steps = BoundedStep(prepare, prepare, model=nn.Linear(1, 1))
    assert steps().max_rows >= 45
    assert workspaces.all() == []
    assert prepare().max_rows == 0
