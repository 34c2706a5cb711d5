"""Layouts of a model over a cluster, compared with times, bytes and shares worked out by hand."""

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halley.cli.main import main
from halley.core.config import ModelConfig
from halley.core.models import find_model
from halley.core.types import LayerShape
from halley.cost.hardware import H100, H200, Predictor
from halley.cost.simulate import makespan_us
from halley.planner.cluster import Cluster, Layout, describe, explain, plan_layouts
from halley.strategies.all_to_all import all_to_all_tasks, choose_num_chunks
from halley.strategies.base import share_of_tokens


shape_of = partial(LayerShape, num_tokens=1, hidden_size=8, intermediate_size=8, ep_size=1)
# Source: config.json of Qwen/Qwen3-235B-A22B.
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94, "head_dim": 128,
    "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 12288,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def _plan(model: str | ModelConfig, *, num_nodes: int, gb_per_s: float = 50.0, **options: Any):
    hardware = dataclasses.replace(H100, network_bytes_per_s=gb_per_s * 1e9)
    cluster = Cluster(hardware=hardware, num_nodes=num_nodes, ranks_per_node=8)
    config = find_model(model) if isinstance(model, str) else model
    return plan_layouts(config, cluster, num_tokens=8192, **options)


def _find(layouts: list[Layout], text: str) -> Layout:
    return next(each for each in layouts if describe(each) == text)


def test_gradients_of_copies_by_hand() -> None:
    """Mixtral over 8 ranks: one expert of 3 * 4096 * 14336 weights a rank and layer, 2 copies.

    Both nodes send sums of gradients, and return totals. 8 copies of other weights share a node.
    """
    plan = partial(_plan, "mixtral-8x7b", num_nodes=2, gb_per_s=0.1, shard="none")
    layout = _find(plan(), "fused, 1 x 8 ranks")
    experts = 32 * 3 * 4096 * 14336
    others = 46_702_792_704 - 8 * experts  # the published model has 46.7e9 parameters
    crossing_us = 2 * (experts / 2 + others / 2 / 8) * 4 / 0.1e9 * 1e6
    micro_us = layout.experts_us + layout.dense_us + layout.exposed_us - layout.reduce_us
    assert 0.5 * micro_us < crossing_us - layout.reduce_us < 0.8 * micro_us  # hidden in backward
    more = _find(plan(num_microbatches=4), "fused, 1 x 8 ranks")
    assert more.reduce_us == pytest.approx(layout.reduce_us)  # once a step
    assert more.experts_us == pytest.approx(4 * layout.experts_us)
    sharded = _find(plan(num_microbatches=4) + plan(shard="all"), "fused, 1 x 8 ranks")
    assert sharded.tokens_per_s == pytest.approx(4 * 8192 / more.step_us * 1e6)


def test_sharded_weights_cross_the_network_in_each_microbatch() -> None:
    """Twice the weights in bfloat16, once the gradients in float32: as much as an all-reduce."""
    plan = partial(_plan, "mixtral-8x7b", num_nodes=2, gb_per_s=0.1)
    once, copied = (_find(plan(shard=s), "fused, 1 x 8 ranks") for s in ("all", "none"))
    micro_us = once.experts_us + once.dense_us + once.exposed_us - once.reduce_us
    # With "all", backward and forward hide this traffic; with "none", backward alone does.
    assert copied.reduce_us > once.reduce_us > copied.reduce_us - 0.5 * micro_us
    four = _find(plan(shard="all", num_microbatches=4), "fused, 1 x 8 ranks")
    assert four.reduce_us == pytest.approx(4 * once.reduce_us)


def test_rows_on_the_network_bound_the_layer() -> None:
    """Qwen3 over 2 x 8 ranks: 1 row a token crosses, or 8, half of which leave the node."""
    layouts = _plan("qwen3-30b-a3b", num_nodes=2, gb_per_s=1.0, shard="none", num_microbatches=64)
    row_us = 4 * 8192 * 2048 * 2 / 1e9 * 1e6  # dispatch and combine, forward and backward
    once = share_of_tokens(shape_of(num_experts=128, top_k=8), num_experts=64)
    for name, rows in (("hierarchical", once), ("sequential", 8 / 2)):
        found = _find(layouts, f"{name}, 2 x 8 ranks")
        layer_us = (found.experts_us + found.exposed_us - found.reduce_us) / (48 * 64)
        assert layer_us == pytest.approx(rows * row_us, rel=0.05)
    inside, across = (_find(layouts, f"{e} x 8 ranks") for e in ("fused, 1", "hierarchical, 2"))
    assert inside.step_us < across.step_us  # a slow network: only gradients should cross it


@pytest.mark.parametrize("here", [1, 2, 4, 6])
def test_share_of_tokens_with_limited_groups_equals_enumeration(here: int) -> None:
    """Of 8 experts in 4 groups, a token uses 2 groups and 3 of their 4 experts."""
    found = [
        min(choice) < here
        for groups in itertools.combinations(range(4), 2)
        for choice in itertools.combinations([2 * g + i for g in groups for i in range(2)], 3)
    ]
    shape = shape_of(num_experts=8, top_k=3, num_groups=4, num_limited_groups=2)
    share = share_of_tokens(shape, num_experts=here)
    assert share == pytest.approx(sum(found) / len(found))


@pytest.mark.parametrize(("name", "num_nodes"), [("mixtral-8x7b", 1), ("qwen3-30b-a3b", 8)])
def test_no_layout_is_left_out(name: str, num_nodes: int) -> None:
    """All divisors of the ranks, of the experts and of the sizes, each with each strategy."""
    model, num_ranks, wanted = find_model(name), 8 * num_nodes, set[tuple[str, int, int, bool]]()
    for ep_size, tp_size in itertools.product(range(1, num_ranks + 1), range(1, 9)):
        sets, rest = divmod(ep_size, tp_size)
        fits = (num_ranks % ep_size, 8 % tp_size, model.moe.intermediate_size % (8 * tp_size))
        if any(fits) or rest or model.moe.num_experts % sets:
            continue
        names = ["sequential", "hierarchical" if ep_size > 8 else "fused"]
        names += ["chunked"] if model.moe.num_experts > sets else []
        names += ["deduplicated"] if ep_size > tp_size == 1 else []
        wanted |= {(n, ep_size, tp_size, again) for n in names for again in (False, True)}
        wanted |= {("functional", ep_size, tp_size, False)} if ep_size > 1 else set()
    layouts = _plan(name, num_nodes=num_nodes)
    found = {(each.strategy, each.ep_size, each.tp_size, each.recompute) for each in layouts}
    assert len(found) == len(layouts)
    # A layer is not chunked if one chunk is faster; the next test covers the number of chunks.
    assert wanted - found <= {each for each in wanted if each[0] == "chunked"}
    assert found <= wanted


@pytest.mark.parametrize("gb_per_s", [5.0, 50.0, 278.0])
@pytest.mark.parametrize("ep_size", [8, 64])
def test_number_of_chunks_is_within_5_percent_of_all_numbers(ep_size: int, gb_per_s: float) -> None:
    """The planner tries six numbers of chunks; here all are tried."""
    predictor = Predictor(dataclasses.replace(H100, link_bytes_per_s=gb_per_s * 1e9))
    shape = LayerShape(
        num_tokens=8192, hidden_size=4096, intermediate_size=1536, num_experts=128, top_k=8,
        ep_size=ep_size,
    )  # fmt: skip
    times = [
        makespan_us(all_to_all_tasks(shape, predictor, num_chunks=number))
        for number in range(1, 128 // ep_size + 1)
    ]
    assert times[choose_num_chunks(shape, predictor) - 1] <= 1.05 * min(times)


@pytest.mark.parametrize("num_nodes", [1, 8, 128, 1280])
def test_plans_of_large_models(num_nodes: int, tmp_path: Path) -> None:
    """On 8, 64, 1024 and 10,240 GPUs; those that exceed the memory come last and are counted."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_235B))
    for name, number in (("mixtral-8x7b", 46.7e9), (str(path), 235e9), ("deepseek-v3", 688e9)):
        layouts = _plan(name, num_nodes=num_nodes)
        too_large = [each for each in layouts if not each.fits]
        assert layouts[len(layouts) - len(too_large) :] == too_large
        times = [each.step_us for each in layouts[: len(layouts) - len(too_large)]]
        assert times == sorted(times)
        for each in layouts:
            parts = (each.experts_us, each.dense_us, each.update_us, each.exposed_us)
            assert each.step_us == pytest.approx(sum(parts))
            states = each.memory.weights + each.memory.optimizer
            # All ranks together hold each parameter at least once, if nothing is copied.
            assert states * 8 * num_nodes == pytest.approx(14 * number, rel=0.01)
        assert explain(layouts).endswith(" GB a GPU.")
        if 18 * number > 8 * num_nodes * 80e9:  # the states alone exceed the memory of all GPUs
            assert len(too_large) == len(layouts)
            assert " No layout fits the memory; the fastest of these, " in explain(layouts)


@pytest.mark.parametrize(
    ("layers", "hardware", "strategy", "measured_ms"),
    [(8, H200, "sequential", 194.5), (8, H200, "fused", 161.1), (6, H100, "fused", 154.6)],
)
def test_steps_are_within_10_percent_of_measurements(layers, hardware, strategy, measured_ms):
    """Qwen3-30B-A3B on two GPUs, 8192 tokens a rank, ``halley train``: docs/predictions.md."""
    model = dataclasses.replace(find_model("qwen3-30b-a3b"), num_layers=layers)
    cluster = Cluster(hardware=hardware, num_nodes=1, ranks_per_node=2)
    layouts = plan_layouts(model, cluster, num_tokens=8192, shard="none")
    found = _find(layouts, f"{strategy}, 1 x 2 ranks")
    assert found.step_us / 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_wgrad_hides_weight_gradients_under_all_to_alls() -> None:
    """On a slow link, both all-to-alls of backward hide all weight gradients of a layer."""
    model, hardware = find_model("qwen3-30b-a3b"), dataclasses.replace(H100, link_bytes_per_s=5e9)
    cluster = Cluster(hardware=hardware, num_nodes=1, ranks_per_node=8)
    # Many microbatches, so that sums of gradients do not fill the time that the pass gains.
    layouts = plan_layouts(model, cluster, num_tokens=8192, num_microbatches=100, shard="none")
    before = _find(layouts, "sequential, 1 x 8 ranks")
    after = _find(layouts, "functional with wgrad, 1 x 8 ranks")
    attention_us = 2 * 8192 * 2 * 2048 * (32 + 4) * 128 / 700e12 * 1e6
    experts_us = 2 * 65536 * 3 * 2048 * 768 / 700e12 * 1e6  # without tiles that are half full
    gained_us = (before.step_us - after.step_us) / 4800
    assert 1.0 <= gained_us / (attention_us + experts_us) <= 1.2


def test_explanation_is_made_of_the_differences() -> None:
    layouts = _plan("mixtral-8x7b", num_nodes=8)
    text = explain(layouts)
    assert text.startswith("fused, 1 x 8 ranks is fastest: 1,127.4 ms a step, 76 % experts, 21 % ")
    more_us = layouts[1].update_us - layouts[0].update_us
    assert f" Next is fused, 1 x 4 ranks: +{more_us / 1e3:.1f} ms (+{more_us / 1e3:.1f} ms" in text
    number = sum(not each.fits for each in layouts)
    fastest = "fused, 1 x 8 ranks, tp_size 8"
    assert f" {number} layouts do not fit the memory; the fastest of these, {fastest}" in text


def test_command_prints_the_fastest_layout(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "layout", "--model=mixtral-8x7b", "--nodes=4"]
    assert main([*command, "--what-if=link=10"]) == 0
    out, text = capsys.readouterr()
    first = json.loads(out.splitlines()[0])
    assert (first["strategy"], first["ep_size"], first["fits"]) == ("fused", 8, True)
    assert set(first["memory"]) == {
        "weights", "gradients", "optimizer", "saved", "buffers", "peak"
    }  # fmt: skip
    assert "With link=10 GB/s: " in text
    assert main([*command, "--shard=half"]) != 0
    error = "shard ('half') must be one of 'none', 'optimizer', 'all'"
    assert capsys.readouterr().err.strip().endswith(error)
    assert main([*command, "--device=A100"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["strategy"] != "fused"
