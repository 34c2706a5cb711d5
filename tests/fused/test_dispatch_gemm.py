"""Dispatch and first GEMM: exact results with small integers."""

from dataclasses import replace

import pytest
import torch

from halley.core.reference import activate
from halley.core.types import Routing
from halley.fused.kernels.layout import NUM_TICKETS
from tests.fused.kernel_case import KernelCase, assert_close, make_tokens
from tests.fused.kernel_rank import KernelRank, Rows
from tests.fused.kernel_world import run_world


CASE = KernelCase(num_tokens_CW=((20, 13),), num_experts=4)


def _integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _tokens(case: KernelCase, rank: int) -> tuple[torch.Tensor, Routing]:
    x_TD, routing = make_tokens(case, rank)
    return _integers(*x_TD.shape, seed=rank, dtype=case.dtype), routing


def _start(rank: KernelRank) -> Rows:
    """Replace the weights by small integers and make a plan."""
    rank.experts.up_LGD.copy_(
        _integers(*rank.experts.up_LGD.shape, seed=10 + rank.rank, dtype=rank.case.dtype)
    )
    return rank.make_rows(rank.make_plan(*_tokens(rank.case, rank.rank)))


def _check_rows(rank: KernelRank, rows: Rows, *, save_pre: bool = True) -> None:
    """Compare every row with its token; padding is zero if the pre-activations are saved."""
    case, layout = rank.case, rank.layout
    is_real = torch.zeros(len(rows.x_RD), dtype=torch.bool)
    is_clear = is_real.clone()
    wanted = torch.zeros_like(rows.x_RD)
    expert_of = torch.zeros(len(rows.x_RD), dtype=torch.long)
    begins = rank.section("expert_begin", layout.num_local).tolist()
    ring = [(rank.rank + i) % case.num_ranks for i in range(case.num_ranks)]
    tokens = [_tokens(case, peer) for peer in range(case.num_ranks)]
    for local, begin in enumerate(begins):
        expert, row = rank.rank * layout.num_local + local, begin
        for x_TD, routing in (tokens[peer] for peer in ring):
            chosen = (routing.topk_idx_TK == expert).any(dim=1).nonzero().flatten()
            wanted[row : row + len(chosen)] = x_TD[chosen]
            is_real[row : row + len(chosen)] = True
            expert_of[row : row + len(chosen)] = local
            row += len(chosen)
        step = case.config.weight.block_k
        is_clear[row : begin - (begin - row) // step * step] = save_pre
    assert torch.equal(rows.x_RD[is_real], wanted[is_real])
    assert (rows.x_RD[is_clear] == 0).all(), "gradients of weights sum over padding"
    assert rows.x_RD[~is_real & ~is_clear].isnan().all(), "padding was written"
    up_RGD = rank.experts.up_LGD[expert_of].float()
    pre_RG = torch.einsum("rgd,rd->rg", up_RGD, wanted.float())
    if save_pre:
        assert torch.equal(rows.pre_RG[is_real].float(), pre_RG[is_real].to(case.dtype).float())
    else:
        assert rows.pre_RG.isnan().all()
    assert_close(rows.h_RF[is_real], activate(pre_RG[is_real], case.activation), "h")


def _check_counters(rank: KernelRank) -> None:
    """The counters are zero again, so that another pass can use the plan."""
    assert not rank.section("tickets", NUM_TICKETS).any()
    assert not rank.section("tile_arrived", int(rank.host_status[1]) // rank.layout.block_m).any()


CASES = {
    "float16": replace(CASE, dtype=torch.float16, activation="gelu"),
    "three ranks, one without tokens": replace(CASE, num_tokens_CW=((20, 0, 9),), num_experts=6),
    "wide": replace(CASE, hidden_size=136, intermediate_size=40),
}


@pytest.mark.parametrize(("name", "fused"), [*((name, True) for name in CASES), ("float16", False)])
def test_rows_and_activations_are_exact(name: str, fused: bool) -> None:
    def run(rank: KernelRank) -> None:
        rows = _start(rank)
        rank.dispatch_gemm(rows, fused=fused)
        rank.check()
        _check_rows(rank, rows)
        _check_counters(rank)

    run_world(CASES[name], run, seed=len(name))


def test_pre_activations_are_not_written_unless_saved() -> None:
    def run(rank: KernelRank) -> None:
        rows = _start(rank)
        rank.dispatch_gemm(rows, save_pre=False)
        _check_rows(rank, rows, save_pre=False)

    run_world(CASE, run)


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_plan_dispatches_again(fused: bool) -> None:
    def run(rank: KernelRank) -> None:
        num_rows = len(_start(rank).x_RD)
        for _ in range(3):
            rows = rank.make_rows(num_rows)
            rank.dispatch_gemm(rows, fused=fused)
            _check_rows(rank, rows)
            _check_counters(rank)
        rank.check()

    run_world(CASE, run)


def test_too_few_rows_write_nothing() -> None:
    def run(rank: KernelRank) -> None:
        num_rows = len(_start(rank).x_RD)
        assert num_rows == int(rank.host_status[1])
        small = rank.make_rows(num_rows - rank.layout.block_m)
        rank.dispatch_gemm(small)
        rank.check()
        assert all(rows.isnan().all() for rows in vars(small).values())
        _check_counters(rank)
        large = rank.make_rows(num_rows + rank.layout.block_m)
        rank.dispatch_gemm(large)
        _check_rows(rank, large)

    run_world(CASE, run)


@pytest.mark.parametrize("num_programs", [1, 5])
def test_any_number_of_ctas_gives_the_same_rows(num_programs: int) -> None:
    config = replace(CASE.config, num_programs=num_programs, fetch_elements=512)

    def run(rank: KernelRank) -> None:
        rows = _start(rank)
        rank.dispatch_gemm(rows)
        rank.check()
        _check_rows(rank, rows)

    run_world(replace(CASE, config=config), run, resident=min(4, num_programs))
