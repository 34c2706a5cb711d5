"""The simulation of papers ranks systems, adds up layers, and meets its limits."""

import pytest

from benchmarks.papers.__main__ import find_bars, rank
from benchmarks.papers.layer_figures import FITTED, all_values, model_time
from benchmarks.papers.moe_systems import Case, layer_time
from benchmarks.papers.paper_values import TIE_MS, figure_9, make_values


def test_rank_ignores_near_published_values_and_counts_equal_simulated_ones_as_wrong() -> None:
    rows = [
        ("near", "a", 100.0, 2.0),
        ("near", "b", 100.0 + TIE_MS, 1.0),  # a tie: the simulated order does not matter
        ("equal", "a", 100.0, 1.0),
        ("equal", "b", 100.1 + TIE_MS, 1.0),
    ]
    ranking = rank(make_values("figure", rows), tie=TIE_MS)
    assert (ranking.num_pairs, ranking.num_right, ranking.num_equal) == (1, 0, 1)
    assert (ranking.num_cells, ranking.num_whole) == (2, 1)


def test_layer_without_tokens_takes_the_host_time() -> None:
    case = Case(num_tokens=1, num_experts=8, top_k=2, hidden_size=8, intermediate_size=8)
    assert layer_time("COMET", case).time_us == FITTED.host_us["COMET"].before
    # Megatron reads the counts after one all-to-all of 40 us.
    host = FITTED.host_us["Megatron-Cutlass"]
    wanted = host.before + host.after + host.expert + 40.0
    assert layer_time("Megatron-Cutlass", case).time_us == pytest.approx(wanted, rel=0.01)


def test_time_of_a_model_is_the_rest_and_its_layers() -> None:
    cell = next(cell for cell in figure_9() if cell.name == "Mixtral (8,1) M=4096")
    # 32 layers; the host bounds COMET here. The part without MoE layers takes 54 ms.
    wanted = 54 + 32 * FITTED.host_us["COMET"].before / 1e3
    assert model_time("COMET", cell) == pytest.approx(wanted)


def test_limits_of_comet_are_met() -> None:
    assert [bar.name for bar in find_bars(all_values()) if not bar.is_met] == []
