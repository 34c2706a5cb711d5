"""Whole models on two ranks: with the pass, every bit of each step is what it was without."""

import warnings

import pytest
import torch

from halley.compiler import Backend
from halley.distributed.mesh import build_groups
from tests.compiler.model_case import build_model, run_steps, whole_graphs
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
