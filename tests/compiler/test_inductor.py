"""Test the passes with Inductor: equal bits, and the planned order in the generated code."""

import re
import warnings
from typing import Any, cast
from unittest.mock import patch

import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.graph_bench.gpt2_moe import ROUTERS
from halley.compiler import Backend, OrderReport, node_cost
from halley.core.config import MoEConfig
from halley.cost.simulate import Contention
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import MoELayer
from halley.strategies.traceable import TraceableStrategy
from tests.compiler.model_case import (
    HIDDEN_SIZE,
    PaddedModel,
    fresh_graphs,
    make_input,
    whole_graphs,
)


def _run_inductor(rank: int, num_ranks: int) -> tuple[bool, str, list[OrderReport]]:
    """Return whether all values are equal, the code of the backward graph, and the reports.

    The reports of the two graphs of Inductor come first, then those of the inner compiler "eager".
    """
    from torch._inductor.utils import run_fw_bw_and_get_code

    found, codes, backend, model = {}, {}, Backend(), PaddedModel()
    x = make_input(rank)
    for passes, inner in (("none", "inductor"), ("wgrad", "inductor"), ("wgrad", "eager")):
        x.grad = None
        model.zero_grad()
        options = {"passes": passes, "inner": inner, "memory_margin": 1.0}
        with fresh_graphs():
            call = torch.compile(model, backend=backend, fullgraph=True, options=options)
            y, codes[passes, inner] = run_fw_bw_and_get_code(lambda: call(x))  # noqa: B023
        found[passes, inner] = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    same = all(map(torch.equal, found["none", "inductor"], found["wgrad", "inductor"]))
    return same, codes["wgrad", "inductor"][-1], backend.reports


def _count_overlapped(code: str) -> list[int]:
    """Return the number of extern kernels in the overlap window of each all-to-all."""
    open_starts: dict[str, int] = {}
    found: list[int] = []
    for line in code[code.index("def call(") :].splitlines():
        if line.strip().startswith("#"):
            continue
        if start := re.search(r"(buf\d+) = torch\.ops\._c10d_functional\.all_to_all_single", line):
            open_starts[start[1]] = len(found)
            found.append(0)
        elif wait := re.search(r"wait_tensor\.default\((buf\d+)\)", line):
            open_starts.pop(wait[1], None)
        elif "extern_kernels." in line:
            for at in open_starts.values():
                found[at] += 1
    return found


def test_order_survives_inductor(run_ranks) -> None:
    for same, code, reports in run_ranks(_run_inductor, 2, timeout_s=300.0):
        forward, backward, _, backward_of_eager = (report.windows for report in reports)
        assert same
        assert len(forward) == len(backward) == 4
        assert all(backward.values())
        assert _count_overlapped(code) == list(map(len, backward.values()))
        # Inductor's graph has other cheap operators, so a data gradient may move further back.
        assert backward.keys() == backward_of_eager.keys()
        for start, gemms in backward.items():
            assert gemms == backward_of_eager[start][: len(gemms)]


def _build_layer() -> MoELayer:
    """Return a layer of experts with a capacity."""
    groups = ParallelGroups(ep=dist.group.WORLD)
    config = MoEConfig(
        num_experts=2, top_k=1, intermediate_size=2 * HIDDEN_SIZE, activation="gelu",
        router=ROUTERS["switch"],
    )  # fmt: skip
    layer = MoELayer(config, HIDDEN_SIZE, strategy=TraceableStrategy(groups.ep), groups=groups)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return layer


def _run_with_carveout(rank: int, num_ranks: int) -> tuple[list[float], str, OrderReport]:
    """Return the differences to a step without passes; code and report of the backward graph.

    Dense and grouped GEMMs leave 8 SMs free, as if that had been measured.
    """
    from torch._inductor.utils import run_fw_bw_and_get_code

    runs, layer, codes, backend = [], _build_layer(), [""], Backend()
    contention = Contention(sm_margin=8, grouped_sm_margin=8)
    for passes in ("none", "wgrad"):
        layer.zero_grad()
        generator = torch.Generator().manual_seed(rank)
        x_BSD = torch.randn(4, 8, HIDDEN_SIZE, generator=generator).requires_grad_()
        options: Any = {"passes": passes, "memory_margin": 4.0, "unknown_size": 32}
        with whole_graphs():
            call = torch.compile(layer, backend=backend, fullgraph=True, options=options)
            with patch.object(node_cost, "NO_CONTENTION", contention):
                _, codes = run_fw_bw_and_get_code(lambda: call(x_BSD).y.square().sum())  # noqa: B023
        runs.append([x_BSD.grad, *(parameter.grad for parameter in layer.parameters())])
    differences = [float((one - other).abs().max()) for one, other in zip(*runs, strict=True)]
    return differences, codes[-1], backend.reports[-1]


def test_gemms_under_all_to_alls_leave_sms_free(run_ranks) -> None:
    """Expert GEMMs stay operators on a CPU, as with float32 on a GPU, and are replaced, too."""
    ((differences, code, report),) = run_ranks(_run_with_carveout, 1, timeout_s=300.0)
    assert max(differences) < 1e-4
    assert report.sm_margins == (8, 8)
    num_overlapped = sum(map(len, report.windows.values()))
    assert num_overlapped > 0
    assert code.count("torch.ops.halley.gemm_with_carveout.default(") == num_overlapped
    assert "expert_weight_gemm.default(" not in code


def _count_autograd(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return how often a run of a compiled graph, and a plain call, use the autograd key."""
    seen: list[torch.Tensor] = []

    def pass_on(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return torch.ops.halley_tests.twice(x)

    with torch.library._scoped_library("halley_tests", "FRAGMENT") as library:  # pyright: ignore[reportPrivateUsage]
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("twice", pass_on, "AutogradCPU")
        twice, options = torch.ops.halley_tests.twice, cast(Any, {"inner": "inductor"})
        run = torch.compile(lambda x, w: twice(x) * w, backend=Backend(), options=options)
        x, w = torch.ones(4), torch.ones(4, requires_grad=True)
        with warnings.catch_warnings(action="ignore"):
            run(x, w)
        num_traced = len(seen)
        assert torch.equal(run(x, w), torch.full((4,), 2.0))
        num_compiled = len(seen) - num_traced
        twice(x)
        return num_compiled, len(seen) - num_traced - num_compiled


def test_compiled_graphs_skip_the_autograd_key(run_ranks) -> None:
    assert run_ranks(_count_autograd, 1, timeout_s=120.0) == [(0, 1)]


class _LossWithEarlySum(torch.nn.Module):
    """Inductor fuses the sum with the loss, which needs the all-to-all; the median does not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = torch.ops._c10d_functional
        total, half, own = x.sum(), len(x) // 2, x.detach()
        started = collectives.all_to_all_single(own, [half] * 2, [half] * 2, "0")
        median = own.flatten().kthvalue(half).values
        return (collectives.wait_tensor(started) + x).sum() * total, median


def _code_with_early_sum(rank: int, num_ranks: int) -> str:
    from torch._inductor import config
    from torch._inductor.utils import run_fw_bw_and_get_code

    call = torch.compile(_LossWithEarlySum(), backend=Backend(), options={"inner": "inductor"})
    x = torch.randn(8 * num_ranks, 16, requires_grad=True)
    with fresh_graphs(), config.patch(reorder_for_peak_memory=False):  # it may hide the difference
        return run_fw_bw_and_get_code(lambda: call(x)[0])[1][0]


def test_kernels_fused_with_the_loss_do_not_empty_a_window(run_ranks) -> None:
    for code in run_ranks(_code_with_early_sum, 2, timeout_s=300.0):
        names = re.findall(r"^ .*\.(all_to_all_single|kthvalue|wait_tensor)\.default\(", code, re.M)
        assert names == ["all_to_all_single", "kthvalue", "wait_tensor"]
