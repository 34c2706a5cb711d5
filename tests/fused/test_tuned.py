"""Tuned configurations: stored in a file, found by shape and tokens, used by new workspaces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halley.cost.hardware import Environment
from halley.fused.buffers import Workspaces
from halley.fused.config import (
    CPU_CONFIG,
    PATH_VARIABLE,
    ConfigTable,
    KernelConfig,
    TunedConfig,
    TunedShape,
    merge_tables,
    tuning_environment,
)
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, build, train


CPU = torch.device("cpu")
HERE = Environment(device="here", versions="1", topology="ranks 2")
SHAPE = TunedShape(hidden_size=64, num_experts=8, top_k=2, dtype="float32", num_tokens=1024)


def _tuned(shape: TunedShape, *settings: str) -> TunedConfig:
    return TunedConfig(shape=shape, settings=settings, median_us=9.0, default_us=10.0, sweeps={})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a table in a folder that does not exist yet."""
    return tmp_path / "deep" / "kernel_config.jsonl"


def test_settings_round_trip() -> None:
    settings = ["up.run=2", "up_grad.block_n=128", "combine_rows=16"]
    config = KernelConfig().changed(settings)
    assert (config.up.run, config.up_grad.block_n, config.combine_rows) == (2, 128, 16)
    assert config.down == KernelConfig().down
    assert sorted(config.settings(KernelConfig())) == sorted(settings)
    assert KernelConfig().changed([]) == KernelConfig()


@pytest.mark.parametrize("setting", ["fetchers=3", "up=3", "up.runs=3", "sum_rows=many", ""])
def test_unknown_setting_is_an_error(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"setting \({setting}\) must be the name of a setting"):
        KernelConfig().changed([setting])


def test_nearest_number_of_tokens_wins(path: Path) -> None:
    table = ConfigTable(path, HERE)
    table.write(_tuned(SHAPE, "combine_rows=1"))
    table.write(_tuned(replace(SHAPE, num_tokens=8192), "combine_rows=2"))
    table.write(_tuned(replace(SHAPE, top_k=4), "combine_rows=3"))
    table.write(_tuned(SHAPE, "combine_rows=5"))  # replaces the first
    for each in (table, ConfigTable(path, HERE)):
        for num_tokens, want in ((1, 5), (1024, 5), (2800, 5), (3000, 2), (10**6, 2)):
            found = each.find(replace(SHAPE, num_tokens=num_tokens), base=KernelConfig())
            assert found == replace(KernelConfig(), combine_rows=want), num_tokens
        assert each.find(replace(SHAPE, hidden_size=128), base=KernelConfig()) == KernelConfig()
        assert each.find(replace(SHAPE, dtype="bfloat16"), base=KernelConfig()) == KernelConfig()


@pytest.mark.parametrize("field", ["device", "versions", "topology"])
def test_lines_of_other_machines_are_skipped_with_a_warning(path: Path, field: str) -> None:
    ConfigTable(path, replace(HERE, **{field: "else"})).write(_tuned(SHAPE, "combine_rows=1"))
    warning = r"has no kernel configuration for this machine \(here, 1, ranks 2\)"
    with pytest.warns(UserWarning, match=warning):
        table = ConfigTable(path, HERE)
    assert table.find(SHAPE, base=KernelConfig()) == KernelConfig()
    table.write(_tuned(SHAPE, "combine_rows=2"))
    again = ConfigTable(path, HERE)  # without a warning
    assert again.find(SHAPE, base=KernelConfig()).combine_rows == 2


def test_lines_of_an_older_version_are_skipped_with_a_warning(path: Path) -> None:
    ConfigTable(path, HERE).write(_tuned(SHAPE, "combine_rows=1"))
    line = json.loads(path.read_text()) | {"version": 1}
    del line["shape"]  # other versions may have other keys
    path.write_text(json.dumps(line))
    with pytest.warns(UserWarning, match="version 1 of this file"):
        assert ConfigTable(path, HERE).found == []


def test_files_of_several_machines_are_merged(tmp_path: Path) -> None:
    first, second, merged = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "merged"))
    there = replace(HERE, device="there")
    ConfigTable(first, HERE).write(_tuned(SHAPE, "combine_rows=1"))
    ConfigTable(first, HERE).write(_tuned(replace(SHAPE, top_k=4), "combine_rows=2"))
    ConfigTable(second, there).write(_tuned(SHAPE, "combine_rows=3"))
    ConfigTable(merged, HERE).write(_tuned(replace(SHAPE, top_k=1), "combine_rows=4"))
    with pytest.warns(UserWarning, match="has no kernel configuration for this machine"):
        ConfigTable(second, HERE).write(_tuned(SHAPE, "combine_rows=5"))  # replaces the first's
    assert merge_tables([first, second], merged) == 4
    assert merge_tables([first, second], merged) == 4
    for environment, top_k, want in ((HERE, 2, 5), (HERE, 4, 2), (HERE, 1, 4), (there, 2, 3)):
        shape = replace(SHAPE, top_k=top_k)
        found = ConfigTable(merged, environment).find(shape, base=KernelConfig())
        assert found == replace(KernelConfig(), combine_rows=want)
    message = r"merge \(.*none.jsonl\) must be a file of tuned kernel configurations"
    with pytest.raises(ValueError, match=message):
        merge_tables([tmp_path / "none.jsonl"], merged)
    first.write_text(first.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ValueError, match=r"first.jsonl must be of version 2, has 1"):
        merge_tables([first], merged)


@pytest.mark.parametrize("broken", ["{", "[]", "{}", "name", "setting"])
def test_error_names_the_invalid_line(path: Path, broken: str) -> None:
    ConfigTable(path, HERE).write(_tuned(SHAPE, "combine_rows=1"))
    line = path.read_text()
    if broken == "name":
        broken = line.replace("combine_rows", "combine_row")
    elif broken == "setting":
        broken = line.replace('"settings"', '"setting"')
    path.write_text(f"{line}{broken}\n")
    message = r"kernel_config.jsonl:2 must be a line of tuned kernel configurations"
    with pytest.raises(ValueError, match=message):
        ConfigTable(path, HERE)


def test_configurations_of_different_links_are_separate(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for link in ("NVLink", "PCIe"):
        monkeypatch.setattr("halley.fused.config.link_kind", lambda _, link=link: link)
        found[link] = tuning_environment(CPU, num_ranks=2, tp_size=2)
        assert found[link].topology == f"ranks 2, {link}, 2 an expert"
        assert tuning_environment(CPU, num_ranks=1).topology == "ranks 1"
    ConfigTable(path, found["NVLink"]).write(_tuned(SHAPE, "combine_rows=1"))
    warning = r"no kernel configuration for this machine .*PCIe.*NVLink"
    with pytest.warns(UserWarning, match=warning):
        assert ConfigTable(path, found["PCIe"]).find(SHAPE, base=KernelConfig()) == KernelConfig()
    assert ConfigTable(path, found["NVLink"]).find(SHAPE, base=KernelConfig()).combine_rows == 1


def _configs_in_use(rank: int, num_ranks: int, folder: Path) -> list[KernelConfig]:
    """Return the configurations of two layers if only the file of rank 0 has a tuned one."""
    path = folder / f"{rank}.jsonl"
    shape = TunedShape(hidden_size=24, num_experts=8, top_k=2, dtype="float32", num_tokens=9)
    if rank == 0:
        table = ConfigTable(path, tuning_environment(CPU, num_ranks=num_ranks))
        table.write(_tuned(shape, "sum_rows=16", "down.group=1", "down_grad.block_n=32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATH_VARIABLE, str(path))
        workspaces = Workspaces(dist.group.WORLD, CPU)
    for top_k in (2, 4):
        train(build(workspaces).forward, LayerCase(num_tokens_W=(9, 6), top_k=top_k), rank)
    return [workspace.config for workspace in workspaces.all()]


def test_all_ranks_use_the_configuration_of_the_first(run_ranks: RunRanks, tmp_path: Path) -> None:
    tuned = CPU_CONFIG.changed(["sum_rows=16", "down.group=1", "down_grad.block_n=32"])
    assert run_ranks(_configs_in_use, 2, tmp_path) == [[tuned, CPU_CONFIG]] * 2
