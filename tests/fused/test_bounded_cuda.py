"""A captured step that exceeds ``max_load`` is repeated with exact sizes, and has their bits.

TRITON_INTERPRET=0 pytest tests/fused/test_bounded_cuda.py
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.fused.bounded import BoundedStep, CapturedStep, make_workspaces
from halley.fused.buffers import Workspaces
from halley.strategies.fused import FusedStrategy
from tests.gpus import device_of, needs_kernels
from tests.rank_pool import RunRanks


pytestmark = needs_kernels

NUM_TOKENS, HIDDEN, INNER, NUM_EXPERTS = 512, 256, 128, 8
Step = Callable[..., torch.Tensor]
# For each step: whether it overflows, and what happens to the gradients after it.
STEPS = (
    (False, "drop"),  # runs
    (False, "drop"),  # is captured
    (False, "drop"),
    (True, "drop"),
    (False, "zero"),
    (True, "keep"),
    (False, "keep"),
    (False, "drop"),
)


def _experts(rank: int, device: torch.device) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(10 + rank)
    shapes = (NUM_EXPERTS // 2, 2 * INNER, HIDDEN), (NUM_EXPERTS // 2, HIDDEN, INNER)
    return nn.ParameterList(
        (torch.randn(shape, generator=generator) * 0.05).to(device, torch.bfloat16)
        for shape in shapes
    )


def _make_step(workspaces: Workspaces, weights: nn.ParameterList) -> Step:
    """Return forward and backward of two layers with the same experts."""
    recorder = Recorder(workspaces.device, enabled=False)
    strategy = FusedStrategy(workspaces, recorder=recorder)

    def step(x_TD: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
        experts = Experts(up_LGD=weights[0], down_LDF=weights[1])
        for _ in range(2):
            x_TD = strategy.forward(x_TD, routing, experts)
        loss = x_TD.float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def _compare(rank: int, num_ranks: int) -> list[int]:
    """Return the number of repeated steps after each step; skewed steps overflow."""
    device, group = device_of(rank), dist.group.WORLD
    wanted, bounded = _experts(rank, device), _experts(rank, device)
    exact = _make_step(Workspaces(group, device), wanted)
    plain = _make_step(make_workspaces(group, device, max_load=1.2), bounded)
    step = BoundedStep(CapturedStep(plain, model=bounded), plain, model=bounded)
    generator, counts = torch.Generator().manual_seed(rank), list[int]()
    for skewed, after in STEPS:
        x_TD = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(device, torch.bfloat16)
        most = NUM_EXPERTS // 2 if skewed else NUM_EXPERTS  # skewed: only experts of rank 0
        idx_TK = torch.rand(NUM_TOKENS, most, generator=generator).topk(2).indices.to(device)
        weights_TK = torch.rand(NUM_TOKENS, 2, generator=generator).to(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*the step runs again with exact sizes")
            got = step(x_TD, idx_TK, weights_TK)
        assert torch.equal(got, exact(x_TD, idx_TK, weights_TK))
        for parameter, other in zip(bounded, wanted, strict=True):
            assert torch.equal(parameter.grad, other.grad)
            for each in (parameter, other):
                if after == "drop":
                    each.grad = None
                elif after == "zero":
                    each.grad.zero_()
        counts.append(step.num_repeated)
    return counts


def test_captured_steps_beyond_max_load_are_repeated(run_ranks: RunRanks) -> None:
    assert run_ranks(_compare, 2) == [[0, 0, 0, 1, 1, 2, 2, 2]] * 2


def _is_running_after(rank: int, num_ranks: int) -> bool:
    """Return whether the GPU still runs when a replayed step, which ends with a pause, returns."""
    device, group = device_of(rank), dist.group.WORLD
    weights = _experts(rank, device)
    plain = _make_step(make_workspaces(group, device, max_load=2.0), weights)

    def run(*args: torch.Tensor) -> torch.Tensor:
        result = plain(*args)
        torch.cuda._sleep(500_000_000)  # a quarter of a second
        return result

    step = BoundedStep(CapturedStep(run, model=weights), run, model=weights)
    x_TD = torch.randn(NUM_TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    idx_TK = torch.rand(NUM_TOKENS, NUM_EXPERTS, device=device).topk(2).indices
    weights_TK = torch.rand(NUM_TOKENS, 2, device=device)
    for _ in range(3):
        torch.cuda.synchronize()
        step(x_TD, idx_TK, weights_TK)
    return not torch.cuda.current_stream().query()


def test_host_does_not_wait_for_the_end_of_a_step(run_ranks: RunRanks) -> None:
    assert run_ranks(_is_running_after, 2) == [True, True]


def test_forward_and_backward_of_a_graph_share_the_workspace_of_cublas() -> None:
    linear = nn.Linear(64, 64, bias=False, device="cuda")
    x_TD = torch.randn(64, 64, device="cuda")

    def run(x_TD: torch.Tensor) -> torch.Tensor:
        loss = linear(x_TD).sum()
        loss.backward()
        return loss.detach()

    step = CapturedStep(run, model=linear)
    step(x_TD)
    torch._C._cuda_clearCublasWorkspaces()
    linear.weight.grad = None
    before = torch.cuda.memory_allocated()
    step(x_TD)
    allocated = torch.cuda.memory_allocated() - before
    torch.mm(x_TD, x_TD)  # on another stream, so cuBLAS allocates one more workspace
    workspace = torch.cuda.memory_allocated() - before - allocated
    assert 2**21 < allocated < 1.5 * workspace
