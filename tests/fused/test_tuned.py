"""Tuned knobs: kept in a file, found by shape and tokens, and used by new workspaces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.cost.profiles import Environment
from halley.fused.buffer_cache import CPU_KNOBS, Workspaces
from halley.fused.tuned import (
    PATH_VARIABLE,
    KnobTable,
    Tuned,
    TunedShape,
    merge_tables,
    tuning_environment,
)
from halley.ops.kernels.gemm_config import Knobs
from halley.strategies.fused import FusedStrategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, local_experts_of, make_tokens


CPU = torch.device("cpu")
HERE = Environment(device="here", versions="1", topology="ranks 2")
SHAPE = TunedShape(hidden_size=64, num_experts=8, top_k=2, dtype="float32", num_tokens=1024)


def _tuned(shape: TunedShape, *settings: str) -> Tuned:
    return Tuned(shape=shape, settings=settings, median_us=9.0, default_us=10.0, sweeps={})


def test_settings_there_and_back() -> None:
    settings = ["up.run=2", "up_grad.block_n=128", "combine_rows=16"]
    knobs = Knobs().changed(settings)
    assert (knobs.up.run, knobs.up_grad.block_n, knobs.combine_rows) == (2, 128, 16)
    assert knobs.down == Knobs().down
    assert sorted(knobs.settings(Knobs())) == sorted(settings)
    assert Knobs().changed([]) == Knobs()


@pytest.mark.parametrize("setting", ["fetchers=3", "up=3", "up.runs=3", "home_rows=many", ""])
def test_setting_that_is_none(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"setting \({setting}\) must be the name of a knob"):
        Knobs().changed([setting])


def test_nearest_number_of_tokens_is_found(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "knobs.jsonl"
    table = KnobTable(path, HERE)
    table.write(_tuned(SHAPE, "combine_rows=1"))
    table.write(_tuned(replace(SHAPE, num_tokens=8192), "combine_rows=2"))
    table.write(_tuned(replace(SHAPE, top_k=4), "combine_rows=3"))
    table.write(_tuned(SHAPE, "combine_rows=5"))  # instead of the first
    for each in (table, KnobTable(path, HERE)):
        for num_tokens, want in ((1, 5), (1024, 5), (2800, 5), (3000, 2), (10**6, 2)):
            found = each.find(replace(SHAPE, num_tokens=num_tokens), base=Knobs())
            assert found == replace(Knobs(), combine_rows=want), num_tokens
        assert each.find(replace(SHAPE, hidden_size=128), base=Knobs()) == Knobs()
        assert each.find(replace(SHAPE, dtype="bfloat16"), base=Knobs()) == Knobs()


@pytest.mark.parametrize("field", ["device", "versions", "topology"])
def test_lines_of_other_machines_are_passed_over_and_told(tmp_path: Path, field: str) -> None:
    path = tmp_path / "knobs.jsonl"
    KnobTable(path, replace(HERE, **{field: "else"})).write(_tuned(SHAPE, "combine_rows=1"))
    with pytest.warns(UserWarning, match=r"has no knobs for this machine \(here, 1, ranks 2\)"):
        table = KnobTable(path, HERE)
    assert table.find(SHAPE, base=Knobs()) == Knobs()
    table.write(_tuned(SHAPE, "combine_rows=2"))
    assert KnobTable(path, HERE).find(SHAPE, base=Knobs()).combine_rows == 2  # and no warning


def test_line_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "knobs.jsonl"
    KnobTable(path, HERE).write(_tuned(SHAPE, "combine_rows=1"))
    line = json.loads(path.read_text()) | {"version": 0}
    del line["shape"]  # as other versions may have it
    path.write_text(json.dumps(line))
    with pytest.warns(UserWarning, match="version 0 of this file"):
        assert KnobTable(path, HERE).found == []


def test_what_comes_with_the_package_stands_behind_what_was_measured(tmp_path: Path) -> None:
    path, shipped = tmp_path / "knobs.jsonl", tmp_path / "shipped.jsonl"
    longer = replace(SHAPE, num_tokens=8192)
    table = KnobTable(shipped, replace(HERE, versions="2"))
    table.write(_tuned(SHAPE, "combine_rows=1"))
    table.write(_tuned(longer, "combine_rows=2"))
    for field in ("device", "topology"):
        elsewhere = tmp_path / f"{field}.jsonl"
        table = KnobTable(elsewhere, replace(HERE, **{field: "else"}))
        table.write(_tuned(SHAPE, "combine_rows=7"))
        shipped.write_text(shipped.read_text() + elsewhere.read_text())
    KnobTable(path, HERE).write(_tuned(SHAPE, "combine_rows=3"))
    table = KnobTable(path, HERE, shipped=shipped)
    found = [table.find(shape, base=Knobs()).combine_rows for shape in (SHAPE, longer)]
    assert found == [3, 2]

    other = tmp_path / "other.jsonl"
    KnobTable(other, replace(HERE, topology="ranks 4")).write(_tuned(SHAPE, "combine_rows=4"))
    with pytest.warns(UserWarning, match="those that come with Halley are used"):
        table = KnobTable(other, HERE, shipped=shipped)
    assert table.find(SHAPE, base=Knobs()).combine_rows == 1


def test_files_of_several_machines_become_one(tmp_path: Path) -> None:
    first, second, merged = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "merged"))
    there = replace(HERE, device="there")
    KnobTable(first, HERE).write(_tuned(SHAPE, "combine_rows=1"))
    KnobTable(first, HERE).write(_tuned(replace(SHAPE, top_k=4), "combine_rows=2"))
    KnobTable(second, there).write(_tuned(SHAPE, "combine_rows=3"))
    KnobTable(merged, HERE).write(_tuned(replace(SHAPE, top_k=1), "combine_rows=4"))
    with pytest.warns(UserWarning, match="has no knobs for this machine"):
        KnobTable(second, HERE).write(_tuned(SHAPE, "combine_rows=5"))  # instead of the first's
    assert merge_tables([first, second], merged) == 4
    assert merge_tables([first, second], merged) == 4
    for environment, top_k, want in ((HERE, 2, 5), (HERE, 4, 2), (HERE, 1, 4), (there, 2, 3)):
        found = KnobTable(merged, environment).find(replace(SHAPE, top_k=top_k), base=Knobs())
        assert found == replace(Knobs(), combine_rows=want)
    with pytest.raises(ValueError, match=r"merge \(.*none.jsonl\) must be a file of tuned knobs"):
        merge_tables([tmp_path / "none.jsonl"], merged)
    first.write_text(first.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(ValueError, match=r"first.jsonl must be of version 1, has 0"):
        merge_tables([first], merged)


@pytest.mark.parametrize("broken", ["{", "[]", "{}", "knob", "setting"])
def test_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "knobs.jsonl"
    table = KnobTable(path, HERE)
    table.write(_tuned(SHAPE, "combine_rows=1"))
    line = path.read_text()
    if broken == "knob":
        broken = line.replace("combine_rows", "combine_row")
    elif broken == "setting":
        broken = line.replace('"settings"', '"setting"')
    path.write_text(f"{line}{broken}\n")
    with pytest.raises(ValueError, match=r"knobs.jsonl:2 must be a line of tuned knobs"):
        KnobTable(path, HERE)


def test_links_are_tuned_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "knobs.jsonl", {}
    for link in ("NVLink", "PCIe"):
        monkeypatch.setattr("halley.fused.tuned.link_kind", lambda _, link=link: link)
        found[link] = tuning_environment(CPU, num_ranks=2, tp_size=2)
        assert found[link].topology == f"ranks 2, {link}, 2 an expert"
        assert tuning_environment(CPU, num_ranks=1).topology == "ranks 1"
    KnobTable(path, found["NVLink"]).write(_tuned(SHAPE, "combine_rows=1"))
    with pytest.warns(UserWarning, match=r"no knobs for this machine .*PCIe.*NVLink"):
        assert KnobTable(path, found["PCIe"]).find(SHAPE, base=Knobs()) == Knobs()
    assert KnobTable(path, found["NVLink"]).find(SHAPE, base=Knobs()).combine_rows == 1


def _knobs_in_use(rank: int, num_ranks: int, folder: Path) -> list[Knobs]:
    """Return the knobs that layers of two shapes run with, where only rank 0 knows better ones."""
    path = folder / f"{rank}.jsonl"
    shape = TunedShape(hidden_size=24, num_experts=8, top_k=2, dtype="float32", num_tokens=9)
    if rank == 0:
        table = KnobTable(path, tuning_environment(CPU, num_ranks=num_ranks))
        table.write(_tuned(shape, "home_rows=16", "down.group=1", "down_grad.block_n=32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATH_VARIABLE, str(path))
        workspaces = Workspaces(dist.group.WORLD, CPU)
    layer = FusedStrategy(workspaces, recorder=Recorder(CPU, enabled=False))
    for top_k in (2, 4):
        case = LayerCase(num_tokens_W=(9, 6), top_k=top_k)
        x_TD, routing, grad_TD = make_tokens(case, rank)
        layer.forward(x_TD, routing, local_experts_of(case, rank)).backward(grad_TD)
    return [workspace.knobs for workspace in workspaces.all()]


def test_ranks_run_with_the_knobs_of_the_first(run_ranks: RunRanks, tmp_path: Path) -> None:
    tuned = CPU_KNOBS.changed(["home_rows=16", "down.group=1", "down_grad.block_n=32"])
    assert run_ranks(_knobs_in_use, 2, tmp_path) == [[tuned, CPU_KNOBS]] * 2
