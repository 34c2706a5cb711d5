"""The operators of a fused layer: registration, values by hand, and ranks out of order."""

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef

from halley.core.types import Save
from halley.fused import passes
from halley.fused.buffers import BufferShape, Workspaces, find_workspaces
from halley.fused.op import fused_experts
from halley.fused.passes import LayerCall, LayerResult, run_forward
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import CPU, SAVES, LayerCase, build
from tests.strategies.layer_case import run_forward as run_layer
from tests.strategies.layer_case import strided as column_major


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
ROWS = torch.tensor([0, 16, 17])  # rows in use of the layer below; a tile of 16 for each expert
# Two experts, of ones and of twos, and two tokens. The first token goes to both experts, the second
# token to the second expert. GELU does not change values as large as these.
X_TD = torch.ones(2, 16) * torch.tensor([[1.0], [2.0]])
IDS_TK = torch.tensor([[1, 0], [-1, 1]])
WEIGHTS_TK = torch.tensor([[0.5, 0.25], [9.0, 2.0]])
UP_LGD = torch.ones(2, 8, 16) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
DOWN_LDF = torch.ones(2, 16, 8) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
DY_TD = torch.ones(2, 16) * torch.tensor([[1.0], [3.0]])


def _column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def _forward(workspaces: Workspaces, save: Save = "all") -> LayerResult:
    call = LayerCall(X_TD, WEIGHTS_TK, UP_LGD, DOWN_LDF, IDS_TK, False, True, save)
    return run_forward(workspaces, call)


@pytest.mark.parametrize("save", SAVES)
def test_saved_activations_of_a_layer_computed_by_hand(save: Save) -> None:
    made = _forward(Workspaces(None, CPU), save)
    # 1/4 of 16 * 8, and 1/2 of 2 * 32 * 8; 2 times 2 * 64 * 8.
    assert torch.equal(made.y_TD, _column(0.25 * 128 + 0.5 * 512, 2 * 1024).expand(2, 16))
    pre = _column(16, 32, 64).expand(3, 8)
    if save == "all":
        assert torch.equal(made.rows[ROWS], X_TD[[0, 0, 1]])
        assert torch.equal(made.pre_RG[ROWS], pre)
    elif save == "inputs":
        assert (made.rows.shape, made.pre_RG.shape) == ((64, 16), (32, 0))  # one task of copies
        assert torch.equal(made.rows[:2], X_TD)
    else:
        assert (made.rows.shape, made.pre_RG.shape) == ((32, 0), (32, 0))


@pytest.mark.parametrize("save", SAVES)
def test_backward_operators_of_a_layer_computed_by_hand(save: Save) -> None:
    workspaces, ops = Workspaces(None, CPU), torch.ops.halley
    made = _forward(workspaces, save)
    saved = X_TD if save == "recompute" else made.rows
    args = (DY_TD, saved, made.plan, made.pre_RG, UP_LGD, DOWN_LDF, IDS_TK, made.plan_id)
    options = (False, True, save, workspaces.handle)
    found = ops.fused_experts_backward.default(*args, *options)
    dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD = found
    # dH is 16, 2 * 16 and 3 * 2 * 16; times routing weights 0.25, 0.5 and 2.
    assert torch.equal(dy_RD[ROWS], _column(1, 1, 3).expand(3, 16))
    assert torch.equal(dpre_RG[ROWS], _column(4, 16, 192).expand(3, 8))
    assert torch.equal(weighted_RF[ROWS], _column(4, 16, 128).expand(3, 8))
    # The first token: 8 * 4 from one expert, 8 * 16 * 2 from the other; the second: 8 * 192 * 2.
    assert torch.equal(dx_TD, _column(288, 3072).expand(2, 16))
    assert torch.equal(dweights_TK, torch.tensor([[8192.0, 2048.0], [0.0, 49152.0]]))
    rows_RD = made.rows if save == "all" else rows_RD
    where = (made.plan, made.plan_id, 2, workspaces.handle)
    dup_LGD = ops.weight_gemm.default(dpre_RG, rows_RD, *where)
    ddown_LDF = ops.weight_gemm.default(dy_RD, weighted_RF, *where)
    sums = torch.tensor([4.0, 16.0 + 2 * 192.0]).view(2, 1, 1)
    assert torch.equal(dup_LGD, sums.expand(2, 8, 16))
    assert torch.equal(ddown_LDF, sums.expand(2, 16, 8))  # 4, and 16 + 3 * 128
    # Without test_schema: a pass writes its number into the plan, which nothing else reads.
    opcheck(ops.fused_experts_backward.default, (*args, *options), test_utils=CHECKS[1:])
    opcheck(ops.weight_gemm.default, (dpre_RG, rows_RD, *where), test_utils=CHECKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_routing_weights_get_gradients_of_their_dtype(dtype: torch.dtype) -> None:
    workspaces, weights_TK = Workspaces(None, CPU), WEIGHTS_TK.to(dtype).requires_grad_()
    call = LayerCall(X_TD, weights_TK, UP_LGD, DOWN_LDF, IDS_TK, False, True, "all")
    fused_experts(call, workspaces.handle).backward(DY_TD)
    want = torch.tensor([[8192.0, 2048.0], [0.0, 49152.0]], dtype=dtype)
    assert weights_TK.grad is not None
    assert torch.equal(weights_TK.grad, want)


@pytest.mark.parametrize(
    ("save", "strided"), [("all", True), ("inputs", False), ("recompute", False)]
)
def test_forward_operator_passes_opcheck(save: Save, strided: bool) -> None:
    workspaces = Workspaces(None, CPU)
    x_TD = column_major(X_TD) if strided else X_TD
    leaves = [t.clone().requires_grad_() for t in (x_TD, WEIGHTS_TK, UP_LGD, DOWN_LDF)]
    args = (*leaves, IDS_TK, False, True, save, workspaces.handle)
    opcheck(torch.ops.halley.fused_experts.default, args, test_utils=CHECKS)


def test_pre_activations_are_free_before_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both would else be in memory at the peak of backward."""
    workspaces, seen, launch = Workspaces(None, CPU), list[bool](), passes.launch_weight_gradient
    up_LGD, down_LDF = (weight.clone().requires_grad_() for weight in (UP_LGD, DOWN_LDF))
    call = LayerCall(X_TD, WEIGHTS_TK, up_LGD, down_LDF, IDS_TK, False, True, "all")
    y_TD = fused_experts(call, workspaces.handle)
    assert y_TD.grad_fn is not None
    pre_RG = y_TD.grad_fn.saved_tensors[3]  # pyright: ignore[reportAttributeAccessIssue]
    memory = StorageWeakRef(pre_RG.untyped_storage())
    del pre_RG

    def note(*args: Any, **options: Any) -> torch.Tensor | None:
        seen.append(memory.expired())
        return launch(*args, **options)

    monkeypatch.setattr(passes, "launch_weight_gradient", note)
    y_TD.backward(DY_TD)
    assert seen == [True, True]


def test_later_calls_leave_earlier_results() -> None:
    workspaces = Workspaces(None, CPU)
    made = _forward(workspaces)
    before = made.rows.clone()
    _forward(workspaces)
    torch.testing.assert_close(made.rows, before, rtol=0.0, atol=0.0, equal_nan=True)


def test_handle_of_deleted_workspaces_is_an_error() -> None:
    handle = Workspaces(None, CPU).handle
    with pytest.raises(RuntimeError, match=rf"workspaces \({handle}\) no longer exist"):
        find_workspaces(handle)


def test_inference_mode_and_training_share_workspaces() -> None:
    workspaces = Workspaces(None, CPU)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert torch.isfinite(_forward(workspaces).y_TD).all()
    shape = BufferShape(hidden_size=16, num_experts=2, top_k=2, dtype=torch.float32)
    assert [workspace.shape for workspace in workspaces.all()] == [shape]


SMALL = LayerCase(num_tokens_W=(8, 5), num_experts=2)
LARGE = LayerCase(num_tokens_W=(3, 70), num_experts=2)


def _differ(rank: int, num_ranks: int) -> str:
    """Run two layers forward, the second with larger buffers, then backward in different orders."""
    layer = build(Workspaces(dist.group.WORLD, CPU))
    calls = [run_layer(layer.forward, case, rank) for case in (SMALL, LARGE)]
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        calls[rank].y_TD.backward(calls[rank].grad_TD)
    assert time.monotonic() - begin < 10.0  # not the 30 s after which it is late
    with pytest.raises(RuntimeError, match=re.escape(str(raised.value))):
        run_layer(layer.forward, SMALL, rank)  # the failure stays
    layer.workspaces.close()
    return str(raised.value)


def test_calls_before_and_after_a_growth_have_different_numbers(run_ranks: RunRanks) -> None:
    """Epochs begin again when buffers grow: the first call before is not the first one after."""
    for rank, text in enumerate(run_ranks(_differ, 2)):
        assert text.startswith(f"rank {rank}: rank {1 - rank} runs ")
