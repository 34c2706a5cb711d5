"""The operators of a fused layer's backward: promises, values by hand, and calls out of order."""

import re
import time
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from halley.core.timeline import Recorder
from halley.core.types import Save
from halley.fused.backward_ops import (
    RowGradients,
    dgrad_combine,
    dispatch_again,
    dispatch_dgrad,
)
from halley.fused.buffer_cache import Workspaces
from halley.fused.forward_ops import Dispatched, dispatch_gemm
from halley.fused.op import fused_experts
from halley.fused.weight_gradients import add_weight_gemm, weight_gemm
from halley.strategies.fused import FusedStrategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import LayerCase, run_forward


CPU = torch.device("cpu")
SAVES: tuple[Save, ...] = get_args(Save)
ROWS = torch.tensor([0, 16, 17])  # of the layer made by hand, tiles of 16 rows an expert
# A layer made by hand: two experts, of ones and of twos, two tokens alike. The first goes to both
# experts, the second to the second alone. Gelu changes nothing of what is as large as here.
X_TD = torch.ones(2, 16) * torch.tensor([[1.0], [2.0]])
IDS_TK = torch.tensor([[1, 0], [-1, 1]])
WEIGHTS_TK = torch.tensor([[0.5, 0.25], [9.0, 2.0]])
UP_LGD = torch.ones(2, 8, 16) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
DOWN_LDF = torch.ones(2, 16, 8) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
DY_TD = torch.ones(2, 16) * torch.tensor([[1.0], [3.0]])


def _column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def _dispatch(workspaces: Workspaces, *, save: Save = "all") -> Dispatched:
    return dispatch_gemm(
        X_TD,
        IDS_TK,
        WEIGHTS_TK,
        UP_LGD,
        gated=False,
        fused=True,
        save=save,
        workspaces=workspaces.handle,
    )


def _dgrad(workspaces: Workspaces, made: Dispatched) -> RowGradients:
    return dispatch_dgrad(
        DY_TD,
        made.plan,
        made.pre_RG,
        DOWN_LDF,
        top_k=2,
        gated=False,
        fused=True,
        workspaces=workspaces.handle,
    )


def _combine(
    workspaces: Workspaces, made: Dispatched, grads: RowGradients
) -> tuple[torch.Tensor, torch.Tensor]:
    return dgrad_combine(
        grads.dpre_RG,
        made.plan,
        grads.dweight_RC,
        UP_LGD,
        IDS_TK,
        fused=True,
        workspaces=workspaces.handle,
    )


def test_values_of_a_hand_made_layer() -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    assert torch.equal(made.pre_RG[ROWS], _column(16, 32, 64).expand(3, 8))
    grads = _dgrad(workspaces, made)
    # dH is 16, 2 * 16 and 3 * 2 * 16; times routing weights 0.25, 0.5 and 2.
    assert torch.equal(grads.dy_RD[ROWS], _column(1, 1, 3).expand(3, 16))
    assert torch.equal(grads.dpre_RG[ROWS], _column(4, 16, 192).expand(3, 8))
    assert torch.equal(grads.weighted_RF[ROWS], _column(4, 16, 128).expand(3, 8))
    assert torch.equal(grads.dweight_RC[ROWS], _column(8 * 16 * 16, 8 * 32 * 32, 8 * 96 * 64))
    dx_TD, dweights_TK = _combine(workspaces, made, grads)
    # The first token: 8 * 4 from one expert, 8 * 16 * 2 from the other; the second: 8 * 192 * 2.
    assert torch.equal(dx_TD, _column(288, 3072).expand(2, 16))
    assert torch.equal(dweights_TK, torch.tensor([[8192.0, 2048.0], [0.0, 49152.0]]))

    where = {"top_k": 2, "workspaces": workspaces.handle}
    dup_LGD = weight_gemm(grads.dpre_RG, made.rows, made.plan, num_experts=2, **where)
    ddown_LDF = weight_gemm(grads.dy_RD, grads.weighted_RF, made.plan, num_experts=2, **where)
    sums = torch.tensor([4.0, 16.0 + 2 * 192.0]).view(2, 1, 1)
    assert torch.equal(dup_LGD, sums.expand(2, 8, 16))
    assert torch.equal(ddown_LDF, sums.expand(2, 16, 8))  # 4, and 16 + 3 * 128
    add_weight_gemm(dup_LGD, grads.dpre_RG, made.rows, made.plan, **where)
    assert torch.equal(dup_LGD, 2 * sums.expand(2, 8, 16))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_routing_weights_get_gradients_of_their_dtype(dtype: torch.dtype, save: Save) -> None:
    workspaces, weights_TK = Workspaces(None, CPU), WEIGHTS_TK.to(dtype).requires_grad_()
    fused_experts(
        X_TD,
        IDS_TK,
        weights_TK,
        UP_LGD,
        DOWN_LDF,
        gated=False,
        fused=True,
        save=save,
        workspaces=workspaces.handle,
    ).backward(DY_TD)
    want = torch.tensor([[8192.0, 2048.0], [0.0, 49152.0]], dtype=dtype)
    assert weights_TK.grad is not None
    assert weights_TK.grad.dtype == dtype
    assert torch.equal(weights_TK.grad, want)


@pytest.mark.parametrize("save", ["inputs", "recompute"])
def test_rows_come_again(save: Save) -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces, save=save)
    rows, pre_RG = dispatch_again(
        made.rows if save == "inputs" else X_TD,
        made.plan,
        made.pre_RG,
        UP_LGD,
        top_k=2,
        gated=False,
        kept=save == "inputs",
        fused=True,
        workspaces=workspaces.handle,
    )
    assert (rows.shape, pre_RG.shape) == ((32, 16), (32, 8))
    assert torch.equal(rows[ROWS], X_TD[[0, 0, 1]])
    assert torch.equal(pre_RG[ROWS], _column(16, 32, 64).expand(3, 8))


def test_operators_keep_their_promises() -> None:
    workspaces = Workspaces(None, CPU)
    ops, handle = torch.ops.halley, workspaces.handle
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    # What pads rows to tiles is undefined, so only the last two have the same values each time.
    exact = (*checks, "test_aot_dispatch_dynamic")
    for save in ("inputs", "recompute"):
        made = _dispatch(workspaces, save=save)
        kept = save == "inputs"
        source = made.rows if kept else X_TD
        args = (source, made.plan, made.pre_RG, UP_LGD, 2, False, kept, True, handle)
        opcheck(ops.dispatch_again.default, args, test_utils=checks)
    made = _dispatch(workspaces)
    args = (DY_TD, made.plan, made.pre_RG, DOWN_LDF, 2, False, True, handle)
    opcheck(ops.dispatch_dgrad.default, args, test_utils=checks)
    workspaces = Workspaces(None, CPU)  # copies of plans may stand where plans stood in the others
    made, handle = _dispatch(workspaces), workspaces.handle
    grads = _dgrad(workspaces, made)
    args = (grads.dpre_RG, made.plan, grads.dweight_RC, UP_LGD, IDS_TK, True, handle)
    opcheck(ops.dgrad_combine.default, args, test_utils=exact)
    args = (grads.dpre_RG, made.rows, made.plan, 2, 2, handle)
    opcheck(ops.weight_gemm.default, args, test_utils=exact)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, column by column in memory."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("strided", [False, True])
def test_layer_as_one_operator_keeps_its_promises(save: Save, strided: bool) -> None:
    workspaces = Workspaces(None, CPU)
    x_TD = _strided(X_TD) if strided else X_TD
    floats = (x_TD, WEIGHTS_TK, UP_LGD, DOWN_LDF)
    leaves = [tensor.clone().requires_grad_() for tensor in floats]
    opcheck(
        torch.ops.halley.fused_experts.default,
        (*leaves, IDS_TK, False, True, save, workspaces.handle),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_overtaken_gradients_are_refused() -> None:
    workspaces = Workspaces(None, CPU)
    first, second = _dispatch(workspaces), _dispatch(workspaces)
    grads, late = _dgrad(workspaces, first), _dgrad(workspaces, second)
    with pytest.raises(RuntimeError, match="must follow the dispatch"):
        _combine(workspaces, first, grads)
    dx_TD, _ = _combine(workspaces, second, late)
    assert torch.equal(dx_TD, _column(288, 3072).expand(2, 16))
    grads = _dgrad(workspaces, first)  # an older plan is as good as the last, in its turn
    dx_TD, _ = _combine(workspaces, first, grads)
    assert torch.equal(dx_TD, _column(288, 3072).expand(2, 16))


def test_plan_of_workspaces_that_were_closed() -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    grads = _dgrad(workspaces, made)
    workspaces.close()
    with pytest.raises(RuntimeError, match="must follow the dispatch"):
        _combine(workspaces, made, grads)
    with pytest.raises(RuntimeError, match="were closed before its backward"):
        weight_gemm(
            grads.dpre_RG,
            made.rows,
            made.plan,
            num_experts=2,
            top_k=2,
            workspaces=workspaces.handle,
        )


def test_parts_of_a_backward_have_no_gradients() -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    dy_TD = DY_TD.clone().requires_grad_()
    grads = dispatch_dgrad(
        dy_TD,
        made.plan,
        made.pre_RG,
        DOWN_LDF,
        top_k=2,
        gated=False,
        fused=True,
        workspaces=workspaces.handle,
    )
    with pytest.raises(RuntimeError, match="have gradients together"):
        grads.dpre_RG.sum().backward()


SMALL = LayerCase(num_tokens_W=(8, 5), num_experts=2)
SMALLER = LayerCase(num_tokens_W=(3, 4), num_experts=2)
LARGE = LayerCase(num_tokens_W=(3, 70), num_experts=2)


def _build(save: Save) -> FusedStrategy:
    return FusedStrategy(Workspaces(dist.group.WORLD, CPU), recorder=Recorder(CPU), save=save)


def _differ(
    rank: int, num_ranks: int, save: Save, cases: list[LayerCase], backward: tuple[bool, bool]
) -> str:
    """Run layers forward, then another pass on each rank, backward or not: return the error."""
    layer = _build(save)
    calls = [run_forward(layer.forward, case, rank) for case in cases]

    def run() -> None:
        if backward[rank]:
            calls[rank].y_TD.backward(calls[rank].grad_TD)
        else:
            run_forward(layer.forward, cases[0], rank)

    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        run()
    assert time.monotonic() - begin < 10.0  # not the 30 s after which it is late
    with pytest.raises(RuntimeError, match=re.escape(str(raised.value))):
        run_forward(layer.forward, cases[0], rank)  # it stays broken
    layer.workspaces.close()
    return str(raised.value)


@pytest.mark.parametrize("save", SAVES)
def test_ranks_that_go_backward_in_different_orders(run_ranks: RunRanks, save: Save) -> None:
    told = run_ranks(_differ, 2, save, [SMALL, SMALLER], (True, True))
    for rank, text in enumerate(told):
        came = f"rank {rank}: rank {1 - rank} came for another pass of call {2 - rank}, not for"
        assert text.startswith(came)
        assert text.endswith("must run their layers, forward and backward, in the same order")


def test_calls_on_both_sides_of_a_growth_are_told_apart(run_ranks: RunRanks) -> None:
    """Epochs begin again when buffers grow: the first call before is not the first one after."""
    for rank, text in enumerate(run_ranks(_differ, 2, "all", [SMALL, LARGE], (True, True))):
        assert text.startswith(f"rank {rank}: rank {1 - rank} came ")


def test_rank_that_goes_forward_instead(run_ranks: RunRanks) -> None:
    first, second = run_ranks(_differ, 2, "all", [SMALL], (True, False))
    assert first.startswith("rank 0: rank 1 came with a new call, not for what this rank runs")
    assert second.startswith("rank 1: rank 0 came for another pass of call 1, not for what this")


def _stay_away(rank: int, num_ranks: int, save: Save) -> None:
    layer = _build(save)
    call = run_forward(layer.forward, SMALL, rank)
    (workspace,) = layer.workspaces.all()
    workspace.timeout_s = 0.5
    if rank == 0:
        text = r"rank 0: rank 1 did not bring its rows for another pass of call 1 .* within 0.5 s"
        with pytest.raises(RuntimeError, match=text):
            call.y_TD.backward(call.grad_TD)
        with pytest.raises(RuntimeError, match=text):  # it stays broken
            run_forward(layer.forward, SMALL, rank)
    dist.barrier()
    layer.workspaces.close()


@pytest.mark.parametrize("save", SAVES)
def test_rank_that_never_comes_to_backward(run_ranks: RunRanks, save: Save) -> None:
    run_ranks(_stay_away, 2, save)
