"""GPT-2 with MoE layers on several ranks: the passes keep every bit, though tokens are dropped."""

import warnings
from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.graph_bench.gpt2_moe import Gate
from halley.compiler.options import Options
from halley.compiler.pipeline import find_batch_inputs, run_passes
from halley.compiler.wgrad.schedule import OrderReport
from halley.core.types import DROPPED
from halley.distributed.mesh import build_groups
from halley.moe.router import AbstractRouter, RouterOutput
from tests.compiler.model_case import SEQ_LEN, build_narrow, run_steps, whole_graphs
from tests.moe.model_case import destroy, make_tokens


NUM_STEPS = 3
BATCH_SIZE = 6
NUM_PARTS = 3
# The model is so small that concats are a large part of its memory: allow the passes more of it.
OPTIONS = {"inner": "eager", "memory_margin": 4.0, "num_parts": NUM_PARTS, "unknown_size": 100}


@final
class _Backend:
    """A backend of torch.compile that traces a model once and runs its graphs with any passes.

    Attributes:
        passes: the passes that the next calls of the model use.
        reports: reports of both passes, forward first.
    """

    def __init__(self) -> None:
        self.passes = "none"
        self.reports: list[OrderReport | None] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        inputs = [
            at for at, value in enumerate(example_inputs) if not isinstance(value, nn.Parameter)
        ]

        def compile_graph(half: fx.GraphModule, _: Sequence[Any]) -> Any:
            modules: dict[str, fx.GraphModule] = {}
            for passes in ("none", "both"):
                graph = fx.Graph(owning_module=half)
                graph.output(graph.graph_copy(half.graph, {}))
                report = run_passes(
                    graph,
                    Options(passes=passes, **OPTIONS),
                    batch_inputs=find_batch_inputs(half.graph, inputs),
                )
                modules[passes] = fx.GraphModule(half, graph)
            self.reports.append(report)

            def call(args: list[Any]) -> Any:
                return fx.Interpreter(modules[self.passes]).boxed_run(args)

            call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
            return call

        compiler = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiler(gm, example_inputs)


def _train(
    rank: int, num_ranks: int, gate: Gate, num_layers: int
) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return the results that the passes change, and numbers of microbatches and reasons."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_narrow(gate, groups, num_layers=num_layers)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    backend, runs = _Backend(), {}
    with whole_graphs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from PyTorch, about tracing
        call = torch.compile(model, backend=backend, fullgraph=True)
        for backend.passes in ("none", "both"):
            model.load_state_dict(start)
            runs[backend.passes] = run_steps(
                model, call, rank=rank, num_steps=NUM_STEPS, batch_size=BATCH_SIZE, seq_len=SEQ_LEN
            )
    destroy(groups)
    changed = [
        name
        for first, second in zip(runs["none"], runs["both"], strict=True)
        for name in first | second
        if not torch.equal(first[name], second[name])
    ]
    forward = backend.reports[0]
    assert forward is not None
    return changed, [each.num_parts for each in forward.ranges], forward.skipped


@pytest.mark.parametrize(
    ("gate", "num_layers", "reason"),
    [("switch", 4, ""), ("top2", 2, "takes first choices of the full batch before second ones")],
)
def test_steps_are_equal_bit_for_bit(run_ranks, gate: Gate, num_layers: int, reason: str) -> None:
    for changed, parts, skipped in run_ranks(_train, 2, gate, num_layers, timeout_s=300.0):
        assert changed == []
        assert parts == [NUM_PARTS] * (num_layers // 2)
        assert any(reason in text for text in skipped) if reason else not skipped


def _count_dropped(rank: int, num_ranks: int) -> dict[str, tuple[int, int]]:
    """Return by gate the slots that capacity drops from full batches, and from microbatches."""
    groups = build_groups(num_ranks, device_type="cpu")
    found: dict[str, tuple[int, int]] = {}
    for gate in ("switch", "top2", "prioritized"):
        model = build_narrow(gate, groups, num_layers=4)
        num_dropped = 0

        def count(router: nn.Module, inputs: object, output: RouterOutput) -> None:
            nonlocal num_dropped
            num_dropped += int((output.routing.topk_idx_TK == DROPPED).sum())

        for module in model.modules():
            if isinstance(module, AbstractRouter):
                module.register_forward_hook(count)
        totals: list[int] = []
        for num_parts in (1, NUM_PARTS):
            num_dropped = 0
            for step in range(NUM_STEPS):
                tokens_BS = make_tokens(rank, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, step=step)
                for microbatch in tokens_BS.chunk(num_parts):
                    with torch.no_grad():
                        model(microbatch)
            totals.append(num_dropped)
        found[gate] = totals[0], totals[1]
    destroy(groups)
    return found


def test_separate_microbatches_would_drop_more_tokens(run_ranks) -> None:
    for dropped in run_ranks(_count_dropped, 2):
        for gate, (full_batch, microbatches) in dropped.items():
            assert 0 < full_batch < microbatches, gate
