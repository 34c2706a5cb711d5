"""``halley plan graph``: times and reasons of a small model, no ranks started."""

import json
import re

import pytest

from halley.cli.main import main
from halley.cost.profiles import Environment, ProfileTable


MODEL = [
    "--set=model.hidden_size=16",
    "--set=model.num_layers=2",
    "--set=model.head_dim=8",
    "--set=model.moe.intermediate_size=16",
    "--set=data.seq_len=16",
    "--set=train.batch_size=4",
]
ONE_LAYER = ["--set=model.num_layers=1", "--set=train.batch_size=2"]  # is traced in half the time


def test_ranges_in_parts_and_what_runs_behind(capsys) -> None:
    more = ["--ranks=4", "--num-parts=2", "--memory-margin=4", "--link=1"]
    more += ["--set=strategy=functional"]
    assert main(["plan", "graph", *MODEL, *more]) == 0
    out, table = capsys.readouterr()
    plan = json.loads(out)
    forward, backward = plan["forward"], plan["backward"]
    assert [each["num_parts"] for each in forward["ranges"]] == [2, 2]
    assert len(forward["windows"]) == 2 * 2 * 3  # layers, parts; counts, dispatch and combine
    assert backward["ranges"] == []
    assert len(backward["windows"]) == 2 * 2
    assert all(backward["windows"].values())
    exposed = [backward[when]["exposed_us"] for when in ("time_before", "time_after")]
    assert exposed[1] < exposed[0]
    assert "forward: " in table
    assert "2 microbatches, " in table
    modules = backward["modules"]
    layers = [modules[exchange] for exchange in backward["windows"]]
    assert layers == ["layers.1.mlp"] * 2 + ["layers.0.mlp"] * 2
    behind = {modules[name] for names in backward["windows"].values() for name in names}
    assert {"layers.1.self_attn.q_proj", "lm_head"} <= behind
    assert " of layers.0.mlp " in table


def test_timeline_is_drawn(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    wanted = ["--passes=wgrad", "--set=strategy=functional,fused", f"--timeline={path}"]
    assert main(["plan", "graph", *MODEL, *wanted]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    plan = json.loads(capsys.readouterr().out)
    assert "spans_after" not in plan["backward"]
    assert len(plan["backward"]["windows"]) == 2  # of the functional layer


def test_explain_says_why_layers_stay_whole(capsys) -> None:
    router = ["model.moe.top_k=1", "model.moe.router.kind=switch"]
    router += ["model.moe.router.capacity_factor=1.0", "model.moe.router.priority=weight"]
    sets = [f"--set={each}" for each in router]
    more = ["--passes=partition", "--explain", "--no-peer-access", *ONE_LAYER]
    assert main(["plan", "graph", *MODEL, *sets, *more]) == 0
    out, text = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == ["forward", "backward", "plan"]
    assert text.count("stays whole: no range around it is predicted to be faster in parts") == 1
    assert found["plan"]["strategies"] == ["functional"]
    assert "- not fused: ranks do not address each other's memory" in text


def test_strategies_are_chosen_beside_the_uniform_ones(capsys) -> None:
    more = ["--set=train.dtype=bfloat16", "--passes=wgrad", "--link=1", "--ranks=4", *ONE_LAYER]
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


def test_measured_times_are_taken_where_there_are_any(capsys, tmp_path) -> None:
    path = tmp_path / "profiles.jsonl"
    path.touch()

    def plan() -> tuple[float, list[str]]:
        wanted = ["--passes=wgrad", "--set=strategy=functional", "--ranks=4", *ONE_LAYER]
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
