"""The graph benchmark on two ranks: result lines, failures, cases and the chart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.graph_bench import __main__ as command_line
from benchmarks.graph_bench import measure
from benchmarks.graph_bench.__main__ import main
from benchmarks.graph_bench.case import VARIANTS, GraphCase, GraphSubject, compare
from benchmarks.graph_bench.catalogue import CatalogueShape, find_catalogue_shape
from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, find_shape
from benchmarks.graph_bench.measure import measure_graph_cases
from benchmarks.graph_bench.report import draw_graph_bench
from benchmarks.graph_bench.variants import _alike_on_all, _describe
from halley.core.types import DROPPED
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.router import AbstractRouter, RouterOutput
from halley.strategies.traceable import TraceableStrategy
from halley.tools.layer_case import relative_error
from halley.tools.timer import Row
from tests.cli.pool_command import run_command
from tests.moe.model_case import CPU, MODELS
from tests.rank_pool import RunRanks


BATCH_SIZE = 4
COMMAND = (
    f"--nproc 2 --inner eager --samples 1 --batch {BATCH_SIZE} --memory-margin 4 --device cpu "
    "--commit abc --output "
)


def _measure(rank: int, num_ranks: int, folder: Path) -> tuple[list[Row], str]:
    """Return the result lines and the output of the command, which measures all variants."""
    rows: list[Row] = []

    def measure_and_record(*cases: Any, **options: Any) -> list[Row]:
        rows.extend(measure_graph_cases(*cases, **options))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_TRACES", 1)  # the profiler needs a second for each trace
        patch.setattr(measure, "measure_graph_cases", measure_and_record)
        module = "benchmarks.graph_bench.__main__"
        output = run_command(rank, num_ranks, main, module, f"{COMMAND}{folder}")
    return rows, output


def test_every_variant_gets_a_correct_result_line(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (first, output), (second, _) = run_ranks(_measure, 2, tmp_path, timeout_s=240.0)
    for name in ("variant", "median_us", "exposed_comm_us", "max_rel_err", "bit_equal", "error"):
        assert [row[name] for row in first] == [row[name] for row in second]
    assert "Forward and backward on 2 x cpu" in output
    printed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (path,) = tmp_path.glob("*/graph.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert printed == written == json.loads(json.dumps(first))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for row in first:
        assert (row["case"], row["model"], row["gate"]) == ("graph", "gpt2-tiny-moe", "switch")
        assert (row["num_tokens"], row["ep_size"], row["num_experts"]) == (8 * BATCH_SIZE, 2, 4)
        assert row["commit"] == "abc"
        assert float(str(row["link_gb_per_s"])) > 0.0
    rows: dict[str, Any] = {str(row["variant"]): row for row in first}
    assert tuple(rows) == VARIANTS
    overlap = rows.pop("inductor-overlap")  # Inductor's scheduler may need a GPU
    assert bool(overlap["error"]) != bool(overlap["median_us"])
    baseline = min(("none", "sequential"), key=lambda name: rows[name]["median_us"])
    for name, row in rows.items():
        assert (row["error"], row["samples"], row["peak_mib"]) == (None, 1, None)
        assert row["bit_equal"] == (name not in ("sequential", "chunked", "divided"))
        assert row["max_rel_err"] < 1e-6
        assert row["baseline"] == baseline
        ratio = rows[baseline]["median_us"] / row["median_us"]
        assert row["speedup"] == pytest.approx(ratio, abs=1e-4)
        assert row["exposed_comm_us"] > 0.0
    assert rows["chunked"]["setting"] == "n=2"
    assert (rows["none"]["passes"], rows["wgrad"]["passes"]) == ("none", "wgrad")
    assert rows["wgrad"]["optimise_s"] > 0.0
    assert rows["wgrad"]["plan_s"] > 0.0
    for row in (rows["none"], rows["wgrad"]):
        predicted = row["predicted_over_measured"] * row["median_us"]
        assert predicted == pytest.approx(row["predicted_us"], rel=1e-2)
    assert rows["none"]["predicted_us"] > rows["none"]["predicted_exposed_us"] > 0.0
    assert rows["none"]["optimise_s"] is None


def _catalogue_case(max_load: float) -> GraphCase:
    """Return a model whose router has a buffer, the selection bias, which lanes must not write."""
    config = replace(MODELS["sigmoid"], num_layers=1)
    shape = CatalogueShape(config=config, experts_per_rank=4, seq_len=16)
    return GraphCase(
        shape=shape,
        batch_size=2,
        num_microbatches=2,
        dtype=torch.float32,
        inner="eager",
        fixed_sizes=True,
        max_load=max_load,
        activation_budget=0.5,
    )


def _measure_catalogue(rank: int, num_ranks: int) -> tuple[list[Row], str]:
    """Return the result lines, and the error of a load above ``max_load``."""
    groups = build_groups(0, device_type="cpu")
    run = {"groups": groups, "device": CPU, "num_samples": 1, "commit": "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_TRACES", 1)
        rows = measure_graph_cases([_catalogue_case(2.0)], ["lanes"], **run)
    error = _raised(lambda: GraphSubject(_catalogue_case(1.0), groups, CPU).fullest_rows())
    return rows, f"{type(error).__name__}: {error}"


def test_model_of_the_catalogue_runs_with_rows_of_fixed_size(run_ranks: RunRanks) -> None:
    (rows, error), (_, same_error) = run_ranks(_measure_catalogue, 2, timeout_s=120.0)
    none, lanes = rows
    for row in rows:
        assert (row["error"], row["model"], row["gate"]) == (None, "small", "sigmoid")
        assert (row["num_tokens"], row["num_experts"], row["ep_size"]) == (32, 8, 2)
        assert row["max_rel_err"] < 1e-5
    assert none["bit_equal"]
    assert lanes["bit_equal"]
    assert (lanes["strategy"], lanes["max_load"]) == ("functional:deduplicated", 2.0)
    assert (lanes["activation_budget"], lanes["sm_margins"]) == (0.5, (0, 0))
    assert lanes["num_lanes"] in (1, 2)
    assert none["num_lanes"] is None
    assert error == same_error
    assert error.startswith("ValueError: max_load (1.0) must be larger: the logits of ")


def test_experts_of_a_catalogue_model_have_nearly_equal_loads() -> None:
    shape = find_catalogue_shape("tiny", num_layers=4, num_ranks=1)
    place = {"dtype": torch.float32, "device": CPU}
    model = shape.build(ParallelGroups(), strategy=TraceableStrategy(None), **place)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(shape.vocab_size, (2, 256), generator=generator)

    def load() -> float:
        """Return the tokens of the fullest expert of all layers, as a multiple of the mean."""
        counts_ME = model(tokens_BS).counts_ME
        return float(counts_ME.max() / counts_ME.double().mean())

    assert load() < 1.5
    model.init_weights(seed=0)  # with the embeddings of a new model
    assert load() > 2.0


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"microbatches \(2\) must be 1 for variant divided"):
        command_line._variants("none,divided", num_microbatches=2)
    assert "divided" in command_line._variants("all", num_microbatches=1)
    assert "divided" not in command_line._variants("all", num_microbatches=2)
    assert find_catalogue_shape("tiny", num_layers=2, num_ranks=4).experts_per_rank == 2
    with pytest.raises(ValueError, match=r"num_experts \(8\)"):
        find_catalogue_shape("tiny", num_layers=2, num_ranks=3)
    for name, value in (("max_load", 0.5), ("activation_budget", 1.5)):
        with pytest.raises(ValueError, match=rf"{name} \({value}\) must be"):
            replace(_catalogue_case(2.0), **{name: value})


def _fail(rank: int, num_ranks: int, failing: tuple[int, ...], alike: bool) -> object:
    groups = build_groups(0, device_type="cpu")

    def make() -> int:
        if rank in failing:
            raise (ValueError if alike or rank == 0 else KeyError)(f"of  rank {rank}")
        return rank

    try:
        return _alike_on_all(make, "wgrad", groups=groups)
    except RuntimeError as error:
        return f"raised: {error}"


def test_only_a_failure_that_all_ranks_share_is_returned_as_text(run_ranks: RunRanks) -> None:
    assert run_ranks(_fail, 2, (), True) == [0, 1]
    assert run_ranks(_fail, 2, (0, 1), True) == [f"ValueError: of rank {r}" for r in (0, 1)]
    told = "raised: wgrad failed on ranks {} alone or not alike: "
    assert run_ranks(_fail, 2, (1,), True) == [
        told.format([1]),
        told.format([1]) + "ValueError: of rank 1",
    ]
    first, second = run_ranks(_fail, 2, (0, 1), False)
    assert first == told.format([0, 1]) + "ValueError: of rank 0"
    assert str(second).startswith(told.format([0, 1]) + "KeyError")


def _raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is compared below
        call()
    return caught.value


def _without_plan() -> None:
    try:
        find_shape("none")
    except ValueError as error:
        raise RuntimeError("x" * 500) from error


def test_error_text_names_the_line_of_halley() -> None:
    place = f" (benchmarks/graph_bench/gpt2_moe.py:{find_shape.__code__.co_firstlineno + 7})"
    assert _describe(_raised(_without_plan)) == f"RuntimeError: {'x' * 386}{place}"
    compiled = torch.compile(torch.neg, backend=lambda *_: find_shape("none"))
    wrapped = _describe(_raised(lambda: compiled(torch.ones(2))))
    assert "ValueError: model (none) must be one of" in wrapped
    assert wrapped.endswith(place)
    assert _describe(_raised(lambda: int("x  y"))) == (
        "ValueError: invalid literal for int() with base 10: 'x y'"
    )


def test_slow_links_set_variables_of_nccl_that_the_user_has_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(command_line.os, "environ", environment)
    command_line._slow_down("none")
    assert environment == {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    command_line._slow_down("sockets")
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert environment["NCCL_HOSTID"] == "halley-3"
    command_line._slow_down("channels")
    assert environment["NCCL_MAX_NCHANNELS"] == "1"


def test_red_share_of_a_bar_is_exposed_communication(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "graph.png"
    sizes = {"batch_size": 6, "num_gpus": 2, "exposed_comm_us": 2000.0, "link_gb_per_s": 1.0}
    names = {"model": "gpt2-tiny-moe", "gate": "switch", "dtype": "float32", "gpu": "cpu"}
    row: Row = {**sizes, **names, "inner": "eager", "setting": None}
    failed = {**row, "variant": "failed", "median_us": None}
    draw_graph_bench([{**row, "variant": "none", "median_us": 8000.0}, failed], path)
    pixels = np.round(image.imread(path)[..., :3] * 255).astype(int)
    colors = ((0, 114, 178), (193, 18, 31))
    blue, red = ((pixels == color).all(axis=2).sum(axis=1).max() for color in colors)
    assert red / blue == pytest.approx(1 / 3, rel=0.02)
    with pytest.raises(ValueError, match=r"rows \(1\) must hold at least one time"):
        draw_graph_bench([failed], path)


def test_sizes_are_those_of_the_paper() -> None:
    shape, groups = find_shape("gpt2-s-moe"), ParallelGroups(num_ranks=4, ep_size=4)
    strategy = TraceableStrategy(None)
    model = GPT2MoE(shape, "switch", groups, strategy=strategy, device="meta")
    size, inner = 768, 3072
    attention = 3 * size * size + 3 * size + size * size + size
    dense = size * inner + inner + inner * size + size
    experts = 2 * 2 * size * inner + 8 * size  # and a router over those of four ranks
    want = 2 * 50304 * size + 512 * size + 2 * size  # embeddings, head, last norm
    want += 12 * (attention + 4 * size) + 6 * dense + 6 * experts
    assert sum(parameter.numel() for parameter in model.parameters()) == want
    large = find_shape("gpt2-l-moe")
    assert (large.num_layers, large.hidden_size, large.num_heads) == (24, 1024, 16)
    assert shape.hidden_size // shape.num_heads == large.hidden_size // large.num_heads == 64


def _case(gate: Gate) -> GraphCase:
    return GraphCase(
        shape=find_shape("gpt2-tiny-moe"), gate=gate, batch_size=6, dtype=torch.float32
    )


def _rows(rank: int, num_ranks: int, gate: Gate) -> tuple[int, list[list[int]], int]:
    """Return the reported rows, the rows sent to each rank by layer, and the routed rows."""
    groups, case = build_groups(0, device_type="cpu"), _case(gate)
    subject, given = GraphSubject(case, groups, CPU), []

    def note(_: object, __: object, out: RouterOutput) -> None:
        idx_TK = out.routing.topk_idx_TK
        owners = idx_TK[idx_TK != DROPPED] // case.shape.experts_per_rank
        given.append(owners.bincount(minlength=num_ranks).tolist())

    for module in subject.plain.modules():
        if isinstance(module, AbstractRouter):
            module.register_forward_hook(note)
    return subject.fullest_rows(), given, case.num_slots


@pytest.mark.parametrize("gate", ["switch", "dropless"])
def test_rows_of_the_most_loaded_rank_exclude_dropped_rows(run_ranks, gate: Gate) -> None:
    ranks = run_ranks(_rows, 2, gate)
    layers = zip(*(given for _, given, _ in ranks), strict=True)
    fullest = [max(map(sum, zip(*sent, strict=True))) for sent in layers]
    for told, given, num_slots in ranks:
        assert told == round(sum(fullest) / len(fullest))
        assert (sum(map(sum, given)) < len(fullest) * num_slots) == (gate != "dropless")


def test_values_are_compared_by_name() -> None:
    wanted = {"loss": torch.tensor(2.0), "w": torch.tensor([3.0, 4.0])}
    assert compare(dict(wanted), wanted).names == ()
    found = compare(wanted | {"w": torch.tensor([3.0, 4.5])}, wanted)
    assert found.names == ("w",)
    assert (
        found.max_rel_err
        == pytest.approx(0.1)
        == relative_error(torch.tensor([3.0, 4.5]), wanted["w"])
    )
    with pytest.raises(RuntimeError, match="gradients differ in number"):
        compare({"loss": wanted["loss"]}, wanted)
