"""``halley plan graph``: predicted times and reasons for a small model, without ranks."""

import json
import re

import pytest

from halley.cli.main import main
from halley.cost.hardware import Environment
from halley.cost.profiles import ProfileTable


MODEL = [
    "--set=model.hidden_size=16",
    "--set=model.num_layers=2",
    "--set=model.head_dim=8",
    "--set=model.moe.intermediate_size=16",
    "--set=data.seq_len=16",
    "--set=train.batch_size=4",
]
ONE_LAYER = ["--set=model.num_layers=1", "--set=train.batch_size=2"]  # half the nodes to trace


def test_overlap_windows_and_timeline_of_a_plan(capsys, tmp_path) -> None:
    """The second layer is fused: one operator, without all-to-alls in the graph."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    more = ["--ranks=4", "--memory-margin=4", "--link=1", f"--timeline={path}"]
    more += ["--set=strategy=functional,fused"]
    assert main(["plan", "graph", *MODEL, *more]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    out, table = capsys.readouterr()
    plan = json.loads(out)
    forward, backward = plan["forward"], plan["backward"]
    assert "spans_after" not in backward
    assert len(forward["windows"]) == 3  # counts, dispatch and combine
    assert len(backward["windows"]) == 2
    assert all(backward["windows"].values())
    exposed = [backward[when]["exposed_us"] for when in ("time_before", "time_after")]
    assert exposed[1] < exposed[0]
    assert "forward: " in table
    modules = backward["modules"]
    assert [modules[exchange] for exchange in backward["windows"]] == ["layers.0.mlp"] * 2
    moved = {modules[name] for names in backward["windows"].values() for name in names}
    assert {"layers.1.self_attn.q_proj", "lm_head"} <= moved
    assert " of layers.0.mlp " in table


def test_plan_names_the_strategies_that_cannot_run(capsys) -> None:
    assert main(["plan", "graph", *MODEL, "--no-peer-access", *ONE_LAYER]) == 0
    out, text = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == ["forward", "backward", "plan"]
    assert found["plan"]["strategies"] == ["functional"]
    problem = "ranks do not address each other's memory"
    assert f"- not fused: {problem}" in text
    assert main(["plan", "graph", *MODEL, "--no-peer-access", "--set=strategy=fused"]) == 2
    assert f"strategy (fused) must not be fused: {problem}" in capsys.readouterr().err


def test_plan_is_compared_with_one_strategy_for_all_layers(capsys) -> None:
    more = ["--set=train.dtype=bfloat16", "--link=1", "--ranks=4", *ONE_LAYER]
    assert main(["plan", "graph", *MODEL, *more]) == 0
    out, text = capsys.readouterr()
    plan = json.loads(out)["plan"]
    times_us = plan["uniform_us"]
    assert set(times_us) == {"functional", "fused"}
    assert set(plan["unpassed_us"]) == {"sequential", "chunked"}
    assert plan["step_us"] <= min(times_us.values())
    for name, us in times_us.items():
        assert re.search(rf"all {name}\W+{us / 1e3:.2f} ms", text), name
    assert f"{plan['step_us'] / 1e3:.2f} ms" in text.partition("chosen: ")[2].splitlines()[0]


def test_measured_times_replace_predicted_ones(capsys, tmp_path) -> None:
    path = tmp_path / "profiles.jsonl"
    path.touch()

    def plan() -> tuple[float, list[str]]:
        wanted = ["--set=strategy=functional", "--ranks=4", *ONE_LAYER]
        assert main(["plan", "graph", *MODEL, *wanted, f"--profiles={path}"]) == 0
        forward = json.loads(capsys.readouterr().out)["forward"]
        return forward["time_before"]["makespan_us"], forward["predicted"]

    before_us, keys = plan()
    head = next(key for key in keys if key.startswith("aten.mm.default("))
    far = Environment(device="NVIDIA H200", versions="torch 9", topology="ranks 2")
    ProfileTable(path, far).add_time(head, 1e6)
    after_us, left = plan()
    assert after_us > before_us + 9e5
    assert set(keys) - set(left) == {head}
