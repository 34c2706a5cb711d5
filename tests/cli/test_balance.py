"""``halley plan balance``: plan a placement from the counts of a run, and resume with it."""

import dataclasses
import json
from pathlib import Path

import pytest

from halley.cli.main import main
from halley.core.placement import load_placements
from tests.rank_pool import RunRanks
from tests.train.run_case import change_training, make_config, train_on_ranks, write_text


def test_loads_and_memory_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expert 0 of the first layer has half of all tokens, so it gets a replica."""
    counts, output = tmp_path / "counts.json", tmp_path / "placement.json"
    counts.write_text("[[12, 0, 0, 0, 6, 6, 0, 0], [3, 3, 3, 3, 3, 3, 3, 3]]")
    options = f"--ranks 4 --spare 1 --model mixtral-8x7b --output {output}"
    assert main(["plan", "balance", str(counts), *options.split()]) == 0
    out, table = capsys.readouterr()
    assert json.loads(out) == {
        "max_over_mean_before": (12 + 6) / 12,  # rank 0 and 2 have 12 each, then all of them 6
        "max_over_mean_after": 1.0,
        "spare_experts_per_rank": 1,
        "spare_bytes_per_rank": 3 * 4096 * 14336 * 2,
        "layers": [
            {"max_over_mean_before": 2.0, "max_over_mean_after": 1.0, "spare_experts_per_rank": 1},
            {"max_over_mean_before": 1.0, "max_over_mean_after": 1.0, "spare_experts_per_rank": 0},
        ],
        "output": str(output),
    }
    assert "200 0 200 0" in table
    assert "100 100 100 100" in table
    assert "1 spare experts a rank in 2 layers: 336 MiB of weights in bfloat16" in table
    first, second = load_placements(output, num_experts=8, num_ranks=4, num_layers=2)
    assert (first.num_local, second.num_local) == (3, 2)


def test_a_run_resumes_with_the_placement_planned_from_its_counts(
    run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(write_text(tmp_path), num_steps=3)
    run_ranks(train_on_ranks, 2, config)
    output, placement = Path(config.output), tmp_path / "placement.json"
    options = f"--ranks 2 --spare 1 --output {placement}"
    assert main(["plan", "balance", str(output / "counts.json"), *options.split()]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["max_over_mean_after"] < plan["max_over_mean_before"]
    config = dataclasses.replace(change_training(config, num_steps=5), placement=str(placement))
    assert run_ranks(train_on_ranks, 2, config) == [[4, 5]] * 2
