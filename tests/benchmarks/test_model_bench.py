"""The model benchmark: its step equals a training step; wrong values; numbers by hand."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console

from benchmarks import moe_perf
from benchmarks.model_bench import measure as model_bench
from benchmarks.model_bench.__main__ import main, model_table
from benchmarks.model_bench.case import ModelCase, Subject, build_subject, check_memory, cut_model
from benchmarks.model_bench.measure import bench_model
from halley.core.config import OptimizerConfig, RunConfig
from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.buffers import Workspaces
from halley.moe.layer import grouped_experts
from halley.moe.transformer import MoETransformer
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.candidates import wire_us
from halley.tools.timer import Row, summarise, to_float
from halley.train.optim import ModelOptimizer
from halley.train.step import train_step
from tests.cli.pool_command import run_command
from tests.moe.model_case import CPU, MODELS, destroy
from tests.rank_pool import RunRanks
from tests.tools.test_layer_bench import ScaledStrategy
from tests.train.run_case import ADAMW, SMALL, built, make_config, write_text


CASE = ModelCase(model=MODELS["softmax"], num_tokens=24, seq_len=12, dtype=torch.float32)
LINK = 1e3  # bytes/s: so slow that the wire time is the lower bound
FIGURES = {"tokens_per_s", "mfu", "exposed_comm_us", "peak_mib", "median_us", "p10_us", "p90_us"}
WORKLOAD = {"case", "model", "num_layers", "num_tokens", "seq_len", "batch_size", "ep_size"}
WORKLOAD |= {"tp_size", "skew", "seed", "dtype", "strategy", "setting", "passes", "direction"}
BOUNDS = {"floor_us", "gemm_us", "wire_us", "load_std"}
MACHINE = {"gpu", "num_gpus", "torch", "triton", "nccl", "commit", "date"}


def _bench(
    candidates: dict[str, AbstractStrategy], groups: ParallelGroups, recorder: Recorder
) -> list[Row]:
    return bench_model(
        CASE, candidates, groups=groups, recorder=recorder, device=CPU, link_bytes_per_s=LINK,
        make_optimizer=lambda m: ModelOptimizer(m, OptimizerConfig(), groups=groups),
        workspaces=Workspaces(groups.ep, CPU), num_samples=2,
    )  # fmt: skip


def _bench_wrong(rank: int, num_ranks: int) -> tuple[list[Row], float]:
    """Return the lines of right and wrong candidates, and the wire time of all layers."""
    groups = build_groups(0, device_type="cpu")
    recorder = Recorder(CPU, enabled=False)
    chunked = build_strategy("chunked", groups.ep, recorder=recorder, device=CPU, num_chunks=2)
    candidates: dict[str, AbstractStrategy] = {
        "sequential": AllToAllStrategy(groups.ep, recorder=recorder),
        "nan": ScaledStrategy(groups, math.nan),
        "wrong": ScaledStrategy(groups, 1.01),
        "chunked n=3": ScaledStrategy(groups, 0.5),
        "chunked n=2": chunked,
    }
    rows = _bench(candidates, groups, recorder)
    subject = build_subject(CASE, chunked, groups=groups, recorder=recorder, device=CPU)
    layers = subject.layers()
    counts_ME = subject.model(subject.tokens_BS).counts_ME
    for counts_E, layer in zip(counts_ME, layers, strict=True):
        assert counts_E.equal(layer.counts_WE[rank])
    crossings_us = sum(4 * wire_us(layer, link_bytes_per_s=LINK) for layer in layers)
    destroy(groups)
    return rows, crossings_us


def test_wrong_strategies_get_no_time(run_ranks: RunRanks) -> None:
    (rows, crossings_us), (others, _) = run_ranks(_bench_wrong, 2)
    assert [row["strategy"] for row in rows] == ["sequential", "nan", "wrong", "chunked"]
    for row, other in zip(rows, others, strict=True):
        assert set(row) == WORKLOAD | FIGURES | BOUNDS | {"samples", "max_rel_err", "bit_equal"}
        assert row["median_us"] == other["median_us"]
        assert row["floor_us"] == row["wire_us"] == pytest.approx(crossings_us, abs=0.1)
        assert 0 < to_float(row["gemm_us"]) < to_float(row["wire_us"])
        assert (row["num_layers"], row["batch_size"], row["direction"]) == (2, 2, "step")
    for row in rows[1:3]:
        assert all(row[key] is None for key in FIGURES)
        assert row["samples"] == 0
    assert rows[1]["max_rel_err"] == math.inf
    assert 1e-3 < to_float(rows[2]["max_rel_err"]) < 0.02
    for row in (rows[0], rows[3]):  # after a wrong one too
        assert to_float(row["max_rel_err"]) <= 1e-6
        p10, median, p90 = (to_float(row[key]) for key in ("p10_us", "median_us", "p90_us"))
        assert 0 < p10 <= median <= p90
        assert row["tokens_per_s"] == pytest.approx(24 * 2 / (median * 1e-6), rel=1e-3)
        assert to_float(row["exposed_comm_us"]) > 0
        assert (row["mfu"], row["peak_mib"], row["samples"]) == (None, None, 2)
    assert rows[3]["setting"] == "n=2"  # n=3 is wrong


def test_lines_are_shown_in_a_table() -> None:
    figures = dict.fromkeys(WORKLOAD | FIGURES | BOUNDS | MACHINE, 1.0)
    base: Row = {**figures, "strategy": "sequential", "setting": "", "max_rel_err": 1e-7}
    fast = base | {"median_us": 2e3, "p90_us": 3e3, "mfu": 0.125, "peak_mib": 1e3}
    slow = base | {"median_us": 4e3, "p90_us": 5e3, "strategy": "slow"}
    wrong = base | dict.fromkeys(FIGURES) | {"strategy": "odd", "max_rel_err": math.inf}
    console = Console(file=io.StringIO(), width=140)
    console.print(model_table([fast, slow, wrong]))
    assert isinstance(console.file, io.StringIO)
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in console.file.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert [row[3:7] for row in cells] == [
        ["sequential", "2.00", "3.00", "1.00x"],
        ["slow", "4.00", "5.00", "0.50x"],
        ["odd", "wrong", "", ""],
    ]
    assert (cells[0][10], cells[0][11], cells[2][12]) == ("12.5%", "1,000", "inf")


def _compare_with_training(rank: int, num_ranks: int, config: RunConfig) -> None:
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        tokens_BS, targets_BS = run.loader.batch(0, 0)
        output = run.model(tokens_BS)
        loss = F.cross_entropy(output.logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
        (loss + output.router_loss).backward()
        names = grouped_experts(run.model)
        squares = torch.zeros(())
        for name, parameter in run.model.named_parameters():
            if name in names and parameter.grad is not None:
                squares += (parameter.grad.float() / num_ranks).square().sum()
        dist.all_reduce(squares)
        run.model.zero_grad()

        batch = {"tokens_BS": tokens_BS, "targets_BS": targets_BS}
        subject = Subject(model=run.model, groups=run.groups, recorder=run.recorder, **batch)
        got = subject.values().tolist()
        run.recorder.collect()
        result = train_step(run, 0)
        trained = [span.name for span in run.recorder.collect()]
        want = [result.loss + result.router_loss, result.grad_norm, float(squares.sqrt())]
        assert got == pytest.approx(want, rel=1e-6)

        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        for _ in range(2):
            subject.step(run.optimizer)
            assert [span.name for span in run.recorder.collect()] == trained
        torch.testing.assert_close(dict(run.model.named_parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_equals_a_training_step_with_rate_zero(
    run_ranks: RunRanks, tmp_path: Path, dtype: str
) -> None:
    config = make_config(write_text(tmp_path), model=SMALL, optimizer=ADAMW, dtype=dtype)
    run_ranks(_compare_with_training, 2, config)


def test_tokens_per_second_and_mfu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of tiny: attention 128 x 128 twice, 128 x 64 twice, and scores and sums over half of
    256 positions; the router and two experts. Six operations each, on four ranks in 1 ms.
    """
    case = ModelCase(model=cut_model("tiny", num_layers=2), num_tokens=512, seq_len=256)
    rates = {"cuda": 1e12, "cpu": None}
    monkeypatch.setattr(model_bench, "peak_flops_per_s", lambda device: rates[device.type])
    groups, timing = ParallelGroups(num_ranks=4), summarise([500.0, 1000.0, 4000.0])
    attention = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128 * 128
    experts = 128 * 8 + 2 * 3 * 128 * 256
    flops = 6 * (2 * (attention + experts) + 128 * 256)
    row = model_bench._times(case, timing, groups=groups, device=torch.device("cuda"))
    assert row["tokens_per_s"] == 4 * 512 / 1e-3
    assert row["mfu"] == round(4 * 512 * flops / 1e-3 / 4e12, 4)
    assert (row["median_us"], row["samples"]) == (1000.0, 3)
    single = dataclasses.replace(case, dtype=torch.float32)
    for each, device in ((case, CPU), (single, torch.device("cuda"))):
        assert model_bench._times(each, timing, groups=groups, device=device)["mfu"] is None


def test_out_of_memory_names_model_and_strategy() -> None:
    groups, recorder = ParallelGroups(), Recorder(CPU, enabled=False)
    sequential = AllToAllStrategy(None, recorder=recorder)
    full = ScaledStrategy(groups, 1.0, problem="CUDA out of memory. Tried to allocate 2 GiB")
    wanted = r"model small, layers 2, tokens 24, strategy full n=1: CUDA out of memory\. Tried"
    with pytest.raises(MemoryError, match=wanted):
        _bench({"sequential": sequential, "full n=1": full}, groups, recorder)
    broken = ScaledStrategy(groups, 1.0, problem="a bug")
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        _bench({"sequential": sequential, "broken": broken}, groups, recorder)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 16), (torch.bfloat16, 18)])
def test_model_larger_than_memory_is_an_error(dtype: torch.dtype, num_bytes: int) -> None:
    """All weights except vectors count, each with its gradient, master and moments."""
    groups, recorder = ParallelGroups(ep_size=2), Recorder(CPU, enabled=False)
    shared = dataclasses.replace(find_model("tiny").moe, shared_intermediate_size=64)
    model = dataclasses.replace(
        find_model("tiny"), moe=shared, num_dense_layers=1, dense_intermediate_size=96
    )
    case = ModelCase(model=model, num_tokens=8, seq_len=8, dtype=dtype)
    built_model = MoETransformer(
        model, strategy=AllToAllStrategy(None, recorder=recorder), groups=groups, recorder=recorder
    )
    num_weights = sum(p.numel() for p in built_model.parameters() if p.ndim > 1)
    check_memory(case, num_ranks=2, memory_bytes=num_bytes * num_weights)
    rule = r"layers \(4\) of model tiny must fit .* take 0\.0 GiB on each of 2 ranks"
    with pytest.raises(ValueError, match=rule):
        check_memory(case, num_ranks=2, memory_bytes=num_bytes * num_weights - 1)


def test_command_prints_and_writes_the_lines_of_two_ranks(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    command = "--nproc 2 --layers 1 --tokens 32 --seq-len 16 --samples 1 --device cpu --commit abc"
    module = "benchmarks.model_bench.__main__"
    out, other = run_ranks(run_command, 2, main, module, f"{command} --output {tmp_path}")
    assert other == ""
    rows = [json.loads(line) for line in out.splitlines()[-2:]]
    for row, strategy in zip(rows, ("sequential", "chunked"), strict=True):
        assert set(row) >= WORKLOAD | FIGURES | BOUNDS | MACHINE
        assert (row["case"], row["model"], row["strategy"]) == ("model", "tiny", strategy)
        assert (row["num_layers"], row["num_tokens"], row["batch_size"]) == (1, 32, 2)
        assert (row["ep_size"], row["num_gpus"], row["dtype"]) == (2, 2, "float32")
        assert (row["samples"], row["commit"]) == (1, "abc")
        assert row["max_rel_err"] <= 1e-6
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / (row["median_us"] * 1e-6), rel=1e-3)
        assert row["floor_us"] >= max(row["gemm_us"], row["wire_us"]) - 0.2
    assert "Training step on 2 x cpu" in out
    (path,) = tmp_path.glob("*/model.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_layers_of_megatron_keep_the_experts_of_a_rank(capsys) -> None:
    words = "--models tiny --tokens 16 --samples 1 --device cpu --nproc 1"
    assert moe_perf.main([*words.split()]) == 0  # an error if strategies have different values
    assert capsys.readouterr().out.count('"strategy": "fused"') == 1
    sizes = [moe_perf.fit(moe_perf.LAYERS[0], num_ranks) for num_ranks in (1, 2, 8)]
    assert sizes == [(1, 1, 8192), (2, 2, 4096), (8, 2, 4096)]
