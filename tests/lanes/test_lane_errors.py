"""Lanes name the reason when they cannot run, on all ranks, and never hang."""

import re
import warnings
from collections.abc import Callable
from typing import final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn

from halley.compiler.consensus import open_consensus
from halley.lanes import compile_step
from halley.lanes.capture import Inner
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import (
    SIZE,
    Result,
    SmallModel,
    exchange,
    is_equal,
    run_uncompiled,
    take_result,
)


Loss = Callable[[SmallModel, torch.Tensor], object]
_library = torch.library.Library("_dtensor", "FRAGMENT")
_library.define("unknown_sum(Tensor x) -> Tensor")


def _unknown_sum(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


_library.impl("unknown_sum", _unknown_sum, "CompositeExplicitAutograd")
torch.library.register_fake("_dtensor::unknown_sum", torch.empty_like, lib=_library)


def _world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def _with_graph_break(model: SmallModel, x_TD: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return model(x_TD)


def _with_other_collectives(model: SmallModel, x_TD: torch.Tensor) -> torch.Tensor:
    loss = model(x_TD)
    return loss + exchange(x_TD * model.first.bias).mean() if dist.get_rank() else loss


def _with_buffer(model: SmallModel, x_TD: torch.Tensor) -> torch.Tensor:
    model.num_calls.add_(1)  # type: ignore[operator]
    return model(x_TD)


LOSSES: dict[str, Loss] = {
    "plain": lambda model, x: model(x),
    "alias on one rank": lambda model, x: (
        torch.ops.aten.alias(model(x)) if dist.get_rank() else model(x)
    ),
    "all-reduce": lambda model, x: model(x / fc.all_reduce(x.detach().abs(), "sum", _world())),
    "buffer": _with_buffer,
    "constant": lambda model, x: model(x * torch.tensor([1.0, 2.0] * (SIZE // 2))),
    "dropout": lambda model, x: model(F.dropout(x, 0.5)),
    "graph break": _with_graph_break,
    "no collectives": lambda model, x: (model.first(x) * model.second(x)).mean(),
    "no gradient": lambda model, x: exchange(x).mean(),
    "no scalar": lambda model, x: exchange(model.first(x)),
    "other collectives": _with_other_collectives,
    "other computation": lambda model, x: model(x) * 2.0 if dist.get_rank() else model(x),
    "two results": lambda model, x: (loss := model(x), loss * 2),
    "unknown collective": lambda model, x: model(
        x / torch.ops._dtensor.unknown_sum(x.detach().abs())
    ),
}


@final
class _Wrapped(nn.Module):
    """A loss function with its model."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.model = SmallModel()
        self.model.register_buffer("num_calls", torch.zeros(()))
        self.loss = loss

    def forward(self, x_TD: torch.Tensor) -> object:
        return self.loss(self.model, x_TD)


def _run(
    rank: int, num_ranks: int, loss: str, inner: Inner = "eager"
) -> tuple[str, str, list[bool]]:
    """Return the warning or error of steps, the fallback, and which steps equal uncompiled ones."""
    torch.manual_seed(0)
    model = _Wrapped(LOSSES[loss])
    torch.manual_seed(rank)
    batch = (torch.randn(4 * num_ranks, SIZE),)
    with fresh_graphs(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compile_step(model, 2, inner=inner, timeout_s=30.0)
        results: list[Result] = []
        for _ in range(4):
            torch.manual_seed(rank)
            try:
                results.append(take_result(step(*batch), model))
            except Exception as error:
                return f"{type(error).__name__}: {error}", "", []
        texts = [str(each.message) for each in caught]
    torch.manual_seed(rank)
    wanted = run_uncompiled(model, batch, num_microbatches=2)
    warned = "".join(text for text in texts if "one after another" in text)
    return warned, step.fallback, [is_equal(each, wanted) for each in results]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ("no collectives", "the graph has no all-to-all"),
        ("unknown collective", "how these operators communicate: _dtensor::unknown_sum"),
        ("dropout", "lanes would change the order of random numbers of"),
        ("other computation", "the computation of ranks [1] differs from that of rank 0"),
    ],
)
def test_fallback_runs_one_after_another_and_names_its_reason(
    run_ranks, loss: str, reason: str
) -> None:
    for warned, fallback, equal in run_ranks(_run, 2, loss):
        assert reason in fallback
        assert warned == f"microbatches run one after another: {fallback}"
        # Eager dropout draws its numbers by another kernel than the compiled one.
        assert equal == [True] * 4 or loss == "dropout"


def test_compiled_dropout_runs_one_after_another(run_ranks) -> None:
    for warned, fallback, _ in run_ranks(_run, 2, "dropout", "inductor"):
        assert "lanes would change the order of random numbers of" in fallback
        assert warned == f"microbatches run one after another: {fallback}"


@pytest.mark.parametrize("loss", ["plain", "alias on one rank", "all-reduce", "constant"])
def test_other_operators_run_in_lanes(run_ranks, loss: str) -> None:
    for warned, fallback, equal in run_ranks(_run, 2, loss):
        assert (warned, fallback) == ("", "")
        assert equal == [True] * 4


def test_constants_run_compiled(run_ranks) -> None:
    # Compiled kernels may round differently from operators, but the segments must run.
    for warned, fallback, equal in run_ranks(_run, 2, "constant", "inductor"):
        assert (warned, fallback) == ("", "")
        assert len(equal) == 4


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("graph break", "Unsupported: .*graph_break"),
        ("other collectives", r"RuntimeError: graph \d+: ranks \[1\] have other collectives"),
        ("no scalar", r"ValueError: the loss \(of shape \(4, 8\)\) must be a scalar"),
        ("two results", "ValueError: the graph has 2 outputs, but must have one"),
        ("buffer", "ValueError: the graph has 2 outputs, .* must not write to its .* buffers"),
        ("no gradient", "ValueError: the loss must depend on a parameter"),
    ],
)
def test_error_names_its_reason_on_all_ranks(run_ranks, loss: str, message: str) -> None:
    for text, _, _ in run_ranks(_run, 2, loss):
        assert re.match(message, text, re.DOTALL), text


def _leave_out_rank_1(rank: int, num_ranks: int) -> str:
    text = ""
    if rank == 0:
        with fresh_graphs():
            step = compile_step(SmallModel(), 2, inner="eager", timeout_s=1.0)
            try:
                step(torch.randn(4 * num_ranks, SIZE))
            except RuntimeError as error:
                text = str(error)
    dist.barrier()
    # Each rank counts its graphs, and the counts of both ranks must stay equal.
    if rank == 1:
        open_consensus(_world().group_name, timeout_s=1.0)
    return text


def test_missing_rank_is_named(run_ranks) -> None:
    text, _ = run_ranks(_leave_out_rank_1, 2)
    assert "ranks [1] compiled no graph with collectives in 1 s" in text


def test_batch_that_cannot_be_divided_is_refused() -> None:
    step = compile_step(SmallModel(), 4, inner="eager")
    for shape in ((6, SIZE), ()):
        message = f"argument 0 (shape {shape}) must be a multiple of num_microbatches (4)"
        with pytest.raises(ValueError, match=re.escape(message)):
            step(torch.zeros(shape))


def test_wrong_arguments_are_refused() -> None:
    model = SmallModel()
    with pytest.raises(ValueError, match=r"num_microbatches \(0\) must be at least 1"):
        compile_step(model, 0)
    with pytest.raises(ValueError, match=r"max_lanes \(-1\) must be at least 1"):
        compile_step(model, 2, max_lanes=-1)
    with pytest.raises(ValueError, match="inner"):
        compile_step(model, 2, inner="triton")  # type: ignore[arg-type]
