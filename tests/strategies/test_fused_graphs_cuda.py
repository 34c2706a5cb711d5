"""The fused strategy in CUDA graphs: replays have the bits of eager calls and report overflows.

TRITON_INTERPRET=0 pytest tests/strategies/test_fused_graphs_cuda.py
"""

import dataclasses
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from halley.core.types import Save
from halley.fused.buffers import Workspaces
from halley.tools.timer import captured
from tests.gpus import device_of, needs_kernels
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, build, make_inputs, make_tokens


TOKENS = (200, 120, 0, 77)
SKEWS = ("balanced", "zipf:1.2", "empty-expert")

pytestmark = needs_kernels

each_size = pytest.mark.parametrize("num_ranks", [2, 4])


class Layer:
    """One rank's part of a layer, in tensors whose addresses a CUDA graph can use again."""

    def __init__(self, case: LayerCase, rank: int, workspaces: Workspaces, save: Save) -> None:
        self.case, self.rank = case, rank
        self.strategy = build(workspaces, save=save)
        self.inputs = make_inputs(case, rank, device=workspaces.device)
        self.grad_TD = make_tokens(case, rank)[2].to(workspaces.device)
        self.idx_TK = self.inputs.routing.topk_idx_TK
        self.out: list[torch.Tensor] = []

    def load(self, skew: str, seed: int) -> None:
        """Copy other tokens, routing and gradients into the tensors."""
        case = dataclasses.replace(self.case, skew=skew, seed=seed)
        x_TD, routing, grad_TD = make_tokens(case, self.rank)
        with torch.no_grad():
            self.inputs.x_TD.copy_(x_TD)
            self.inputs.routing.topk_weights_TK.copy_(routing.topk_weights_TK)
        self.idx_TK.copy_(routing.topk_idx_TK)
        self.grad_TD.copy_(grad_TD)

    def run(self) -> None:
        """Run forward and backward into ``out``."""
        y_TD, leaves = self.strategy.forward(*self.inputs), list(self.inputs.leaves().values())
        self.out = [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, self.grad_TD)]


def _case(num_ranks: int, *, times: int = 1) -> LayerCase:
    num_tokens_W = tuple(times * num_tokens for num_tokens in TOKENS[:num_ranks])
    return LayerCase(num_tokens_W=num_tokens_W, num_experts=12, top_k=3, dtype=torch.bfloat16)


def _replay(rank: int, num_ranks: int, save: Save) -> None:
    workspaces = Workspaces(dist.group.WORLD, device_of(rank), max_load=3.0)
    layer = Layer(_case(num_ranks), rank, workspaces, save)
    replay = captured(layer.run, device=workspaces.device)
    results = layer.out
    for seed, skew in enumerate(SKEWS * 2):
        layer.load(skew, seed)
        replay()
        torch.cuda.synchronize()
        workspaces.check()
        got = [part.clone() for part in results]
        layer.run()  # between replays, in the same buffers
        torch.cuda.synchronize()
        for index, (value, want) in enumerate(zip(got, layer.out, strict=True)):
            assert torch.equal(value, want), f"output {index}, {skew}, {save}"
    workspaces.close()


@each_size
def test_replays_have_the_bits_of_eager_calls(run_ranks: RunRanks, num_ranks: int) -> None:
    for save in get_args(Save):
        run_ranks(_replay, num_ranks, save, timeout_s=180)


def _overflow(rank: int, num_ranks: int) -> str:
    workspaces = Workspaces(dist.group.WORLD, device_of(rank), max_load=1.0, timeout_s=5.0)
    # More rows than the capacity for a balanced load and the padding of each expert's last tile.
    layer = Layer(_case(num_ranks, times=4), rank, workspaces, "all")
    replay = captured(layer.run, device=workspaces.device)
    replay()
    torch.cuda.synchronize()
    workspaces.check()
    layer.idx_TK.copy_(torch.arange(3).expand_as(layer.idx_TK))  # all slots go to experts of rank 0
    replay()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError) as caught:
        workspaces.check()
    return str(caught.value)


@each_size
def test_a_replay_that_overflows_is_an_error_on_all_ranks(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    for rank, said in enumerate(run_ranks(_overflow, num_ranks, timeout_s=180)):
        assert said.startswith(f"rank {rank}: the experts of rank 0 got "), said
        assert "more than max_load allows" in said


def _capture_exact(rank: int, num_ranks: int) -> str:
    workspaces = Workspaces(dist.group.WORLD, device_of(rank))
    layer = Layer(_case(num_ranks), rank, workspaces, "all")
    with pytest.raises(RuntimeError) as caught:
        captured(layer.run, device=workspaces.device)
    return str(caught.value)


def test_a_graph_needs_max_load(run_ranks: RunRanks) -> None:
    for said in run_ranks(_capture_exact, 2, timeout_s=180):
        assert "a CUDA graph of strategy fused needs max_load" in said
