"""Whole models on two ranks: with the pass, every bit of each step is what it was without."""

import warnings

import pytest
import torch
import torch._dynamo

from halley.compiler import Backend
from halley.moe.parallel import build_groups
from tests.compiler.model_case import build_model, run_steps, whole_graphs
from tests.compiler.padded_model import HIDDEN_SIZE, NUM_TOKENS, PaddedModel
from tests.moe.model_case import destroy


NUM_STEPS = 3
SLOTS_OF_AN_EXPERT = 3  # 18 tokens over 8 experts at capacity 1.0


def _train(
    rank: int, num_ranks: int, kind: str, num_layers: int
) -> tuple[bool, int, list[dict[str, tuple[str, ...]]]]:
    """Return whether all is equal, how many slots capacity dropped, and the last windows."""
    runs, backend, groups = {}, Backend(), build_groups(num_ranks, device_type="cpu")
    for passes in ("none", "wgrad"):
        model = build_model(kind, groups, num_layers=num_layers)
        options = {"passes": passes, "inner": "eager", "memory_margin": 0.5, "unknown_size": 40}
        with whole_graphs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of how it traces
            call = torch.compile(model, backend=backend, fullgraph=True, options=options)
            runs[passes] = run_steps(model, call, rank=rank, num_steps=NUM_STEPS)
    destroy(groups)
    same = all(
        torch.equal(first[name], second[name])
        for first, second in zip(runs["none"], runs["wgrad"], strict=True)
        for name in first | second
    )
    counts = torch.stack([step["counts"] for step in runs["wgrad"]])
    dropped = (counts - SLOTS_OF_AN_EXPERT).clamp_min(0).sum() if kind == "switch" else 0
    return same, int(dropped), [report.windows for report in backend.reports]


@pytest.mark.parametrize(("kind", "num_layers"), [("switch", 4), ("softmax", 2)])
def test_transformer_is_equal_bit_for_bit(run_ranks, kind: str, num_layers: int) -> None:
    for same, dropped, windows in run_ranks(_train, 2, kind, num_layers, timeout_s=300.0):
        assert same
        assert (dropped > 0) == (kind == "switch")
        forward, backward = windows
        assert len(forward) == 3 * num_layers // 2  # counts, dispatch, combine of every other
        assert len(backward) == 2 * num_layers // 2
        assert all(backward.values()), backward
        assert not any(forward.values())


def _run_inductor(rank: int, num_ranks: int) -> tuple[bool, str, list[dict[str, tuple[str, ...]]]]:
    """Return whether all is equal, the code of the passed backward, and the windows."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    found, backend = {}, Backend()
    model = PaddedModel()
    x = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()
    for passes in ("none", "wgrad"):
        torch._dynamo.reset()
        x.grad = None
        model.zero_grad()
        options = {"passes": passes, "inner": "inductor", "memory_margin": 1.0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = torch.compile(model, backend=backend, fullgraph=True, options=options)
            y, codes = run_fw_bw_and_get_code(lambda: call(x))  # noqa: B023
        found[passes] = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    torch._dynamo.reset()
    same = all(map(torch.equal, found["none"], found["wgrad"]))
    return same, codes[-1], [report.windows for report in backend.reports]


def _calls(code: str) -> list[str]:
    """Return the products, starts and waits of Inductor's code, in the order in which they run."""
    marks = {"extern_kernels.": "product", "all_to_all_single.default(": "start"}
    marks["wait_tensor.default("] = "wait"
    lines = code[code.index("def call(") :].splitlines()
    lines = [line for line in lines if not line.strip().startswith("#")]
    return [kind for line in lines for mark, kind in marks.items() if mark in line]


def test_order_survives_inductor(run_ranks) -> None:
    for same, code, (forward, backward) in run_ranks(_run_inductor, 2, timeout_s=300.0):
        assert same
        assert len(forward) == len(backward) == 4
        assert all(backward.values())
        want = [len(products) for products in backward.values()]
        calls, num_behind = _calls(code), []
        for call in calls:
            if call == "start":
                num_behind.append(0)
                is_open = True
            elif call == "wait":
                is_open = False
            elif num_behind and is_open:
                num_behind[-1] += 1
        assert num_behind == want
