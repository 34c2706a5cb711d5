"""Second GEMM and combine: exact sums of activations and weights with few bits."""

from dataclasses import replace

import pytest
import torch

from halley.core.types import Routing
from halley.fused.kernels.layout import MAX_CHUNKS, NUM_TICKETS, PASS
from tests.fused.kernel_case import KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank, Rows
from tests.fused.kernel_world import run_world


CASE = KernelCase(num_tokens_CW=((20, 13),), num_experts=4)


def _integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def _tokens(case: KernelCase, rank: int) -> tuple[torch.Tensor, Routing]:
    """Return tokens and a routing whose weights are multiples of a quarter."""
    x_TD, routing = make_tokens(case, rank)
    weights_TK = (routing.topk_weights_TK * 4).round() / 4
    return x_TD, Routing(topk_idx_TK=routing.topk_idx_TK, topk_weights_TK=weights_TK)


def _activations(case: KernelCase, rank: int) -> torch.Tensor:
    """Return an activation for each token of the rank and each expert, (T, E, F)."""
    shape = (case.num_tokens_CW[0][rank], case.num_experts, case.intermediate_size)
    return _integers(*shape, seed=rank, dtype=case.dtype)


def _down(case: KernelCase) -> torch.Tensor:
    shape = (case.num_experts, case.hidden_size, case.intermediate_size)
    return _integers(*shape, seed=99, dtype=case.dtype)


def _start(rank: KernelRank) -> Rows:
    """Make a plan and store the activations in the order of its rows."""
    case, layout = rank.case, rank.layout
    first = rank.rank * layout.num_local
    rank.experts.down_LDF.copy_(_down(case)[first : first + layout.num_local])
    rows = rank.make_rows(rank.make_plan(*_tokens(case, rank.rank)))
    for local, begin in enumerate(rank.section("expert_begin", layout.num_local).tolist()):
        row = begin
        for i in range(case.num_ranks):
            peer = (rank.rank + i) % case.num_ranks
            idx_TK = _tokens(case, peer)[1].topk_idx_TK
            chosen = (idx_TK == first + local).any(dim=1).nonzero().flatten()
            rows.h_RF[row : row + len(chosen)] = _activations(case, peer)[chosen, first + local]
            row += len(chosen)
    return rows


def _expected(case: KernelCase, rank: int) -> torch.Tensor:
    """Return the output; partial sums are rounded to the dtype before they are sent."""
    _, routing = _tokens(case, rank)
    z_TED = torch.einsum("tef,edf->ted", _activations(case, rank).float(), _down(case).float())
    z_TED = z_TED.to(case.dtype).float()
    weights_TE = torch.zeros(len(z_TED), case.num_experts + 1)
    index_TK = routing.topk_idx_TK % (case.num_experts + 1)
    weights_TE = weights_TE.scatter(1, index_TK, routing.topk_weights_TK)[:, :-1]
    parts = (weights_TE[:, :, None] * z_TED).unflatten(1, (case.num_ranks, -1)).sum(dim=2)
    return parts.to(case.dtype).float().sum(dim=1).to(case.dtype)


def _check_counters(rank: KernelRank) -> None:
    assert not rank.section("tickets", NUM_TICKETS).any()
    assert not rank.section("chunk_done", MAX_CHUNKS * rank.layout.num_groups).any()
    assert not rank.section("chunk_sent", MAX_CHUNKS).any()


def _run_and_check(case: KernelCase, *, seed: int = 0, fused: bool = True) -> None:
    def run(rank: KernelRank) -> None:
        rows = _start(rank)
        y_TD = rank.gemm_combine(rows, case.num_tokens_CW[0][rank.rank], fused=fused)
        rank.check()
        assert torch.equal(y_TD, _expected(case, rank.rank))
        _check_counters(rank)

    run_world(case, run, seed=seed)


CASES = {
    "balanced": CASE,
    "bfloat16": replace(CASE, dtype=torch.bfloat16),
    "float16": replace(CASE, dtype=torch.float16),
    "dropped": replace(CASE, dropped=0.5),
    "all dropped": replace(CASE, dropped=1.0),
    "three ranks, one without tokens": replace(CASE, num_tokens_CW=((20, 0, 9),), num_experts=6),
    "four ranks": replace(CASE, num_tokens_CW=((9, 20, 3, 4),), num_experts=8, top_k=3),
    "one rank": replace(CASE, num_tokens_CW=((35,),)),
    "all experts": replace(CASE, top_k=4),
    "one takes all": replace(CASE, load="one-hot", top_k=1, num_tokens_CW=((30, 41),)),
    "wide": replace(CASE, hidden_size=136, intermediate_size=40),
    "many token copies": replace(CASE, num_tokens_CW=((70, 66),), block_slots=64),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_exact_sums(name: str, fused: bool) -> None:
    _run_and_check(CASES[name], seed=len(name), fused=fused)


@pytest.mark.parametrize("chunk_columns", [32, 64, 128])
def test_any_chunk_width_gives_the_same_sums(chunk_columns: int) -> None:
    config = replace(CASE.config, chunk_columns=chunk_columns)
    _run_and_check(replace(CASE, hidden_size=104, config=config))


@pytest.mark.parametrize("num_programs", [1, 3, 5])
def test_any_number_of_ctas_gives_the_same_sums(num_programs: int) -> None:
    config = replace(CASE.config, num_programs=num_programs)
    _run_and_check(replace(CASE, hidden_size=72, config=config))


@pytest.mark.parametrize(("rows", "unroll"), [(8, 1), (64, 4), (16, 8)])
def test_any_rows_per_step_give_the_same_sums(rows: int, unroll: int) -> None:
    config = replace(CASE.config, combine_rows=rows, combine_stages=unroll, sum_rows=rows)
    _run_and_check(replace(CASE, top_k=3, config=config))


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_plan_combines_again_in_the_next_pass(fused: bool) -> None:
    def run(rank: KernelRank) -> None:
        rows = _start(rank)
        for _ in range(3):
            rows.z_RD.fill_(torch.nan)
            y_TD = rank.gemm_combine(rows, CASE.num_tokens_CW[0][rank.rank], fused=fused)
            rank.check()
            assert torch.equal(y_TD, _expected(CASE, rank.rank))
            _check_counters(rank)
            # Without a new dispatch, only a barrier keeps the next sums out of the buffer.
            rank.heap.barrier()
            rank.combine_buffer.local.fill_(torch.nan)
            rank.heap.barrier()
            rank.section("summary", 16)[PASS.value] += 1

    run_world(CASE, run)
