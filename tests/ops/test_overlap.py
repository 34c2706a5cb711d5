"""The operators of a fused layer: schemas, fakes, gradients refused, and calls out of order."""

import pytest
import torch
from torch.library import opcheck

from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.ops.overlap import dispatch_gemm, gemm_combine
from halley.ops.workspace import ShapeClass
from halley.ops.workspaces import Workspaces, find_workspaces
from tests.strategies.layer_case import LayerCase, expected, local_experts_of, make_tokens


CPU = torch.device("cpu")
CASE = LayerCase(num_tokens_W=(8,))
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def _tensors() -> list[torch.Tensor]:
    """Return tokens, expert ids, weights, and both projections; none wants gradients."""
    x_TD, routing, _ = make_tokens(CASE, 0)
    experts = local_experts_of(CASE, 0)
    ids, weights = routing.topk_idx_TK, routing.topk_weights_TK
    return [t.detach() for t in (x_TD, ids, weights, experts.up_LGD, experts.down_LDF)]


def _dispatch(workspaces: Workspaces) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD, ids, weights, up, _ = _tensors()
    return dispatch_gemm(
        x_TD, ids, weights, up, gated=True, fused=True, workspaces=workspaces.handle
    )


def _combine(workspaces: Workspaces, h_RF: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    down = _tensors()[-1]
    return gemm_combine(h_RF, plan, down, num_tokens=8, fused=True, workspaces=workspaces.handle)


def _error(y_TD: torch.Tensor) -> float:
    return relative_error(y_TD, expected(CASE, 0)["y"])


def test_operators_keep_their_promises() -> None:
    workspaces, others = Workspaces(None, CPU), Workspaces(None, CPU)
    *routed, up, down = _tensors()
    opcheck(
        torch.ops.halley.dispatch_gemm.default,
        (*routed, up, True, True, others.handle),
        test_utils=CHECKS,  # what pads rows to tiles is undefined, so values differ
    )
    h_RF, plan = _dispatch(workspaces)
    checks = (*CHECKS, "test_aot_dispatch_dynamic")
    opcheck(
        torch.ops.halley.gemm_combine.default,
        (h_RF, plan, down, 8, True, workspaces.handle),
        test_utils=checks,
    )


def test_results_are_no_scratch() -> None:
    """A later call leaves the results of an earlier one as they were."""
    workspaces = Workspaces(None, CPU)
    h_RF, plan = _dispatch(workspaces)
    kept = h_RF.clone()
    y_TD = _combine(workspaces, h_RF, plan)
    again, _ = _dispatch(workspaces)
    (workspace,) = workspaces.all()
    workspace.rows_RD.fill_(torch.nan)
    torch.testing.assert_close(h_RF, kept, rtol=0.0, atol=0.0, equal_nan=True)
    assert again.data_ptr() != h_RF.data_ptr()
    assert _error(y_TD) <= RELATIVE_TOLERANCE[torch.float32]


def test_plan_combines_twice() -> None:
    workspaces = Workspaces(None, CPU)
    h_RF, plan = _dispatch(workspaces)
    assert torch.equal(_combine(workspaces, h_RF, plan), _combine(workspaces, h_RF, plan))


def test_activations_of_a_hand_made_layer() -> None:
    """One expert of ones, a token of ones: each activation is gelu of the hidden size."""
    x_TD, ids = torch.ones(1, 16), torch.zeros(1, 1, dtype=torch.int64)
    workspaces = Workspaces(None, CPU)
    h_RF, _ = dispatch_gemm(
        x_TD,
        ids,
        torch.ones(1, 1),
        torch.ones(1, 8, 16),
        gated=False,
        fused=True,
        workspaces=workspaces.handle,
    )
    assert h_RF.shape == (16, 8)  # one tile
    assert torch.equal(h_RF[0], torch.full((8,), 16.0))


def test_overtaken_plan_is_refused() -> None:
    workspaces = Workspaces(None, CPU)
    h_RF, plan = _dispatch(workspaces)
    late_h_RF, late = _dispatch(workspaces)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(workspaces, h_RF, plan)
    assert _error(_combine(workspaces, late_h_RF, late)) <= RELATIVE_TOLERANCE[torch.float32]
    _dispatch(workspaces)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(workspaces, late_h_RF, late)
    fresh = Workspaces(None, CPU)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(fresh, h_RF, plan)


def test_gradients_are_refused() -> None:
    workspaces = Workspaces(None, CPU)
    x_TD, ids, weights, up, _ = _tensors()
    h_RF, plan = dispatch_gemm(
        x_TD.requires_grad_(),
        ids,
        weights,
        up,
        gated=True,
        fused=True,
        workspaces=workspaces.handle,
    )
    assert not plan.requires_grad
    with pytest.raises(RuntimeError, match="no backward yet: train with strategy sequential"):
        _combine(workspaces, h_RF, plan).sum().backward()


def test_workspaces_that_are_gone() -> None:
    handle = Workspaces(None, CPU).handle
    with pytest.raises(RuntimeError, match=rf"workspaces \({handle}\) are gone"):
        find_workspaces(handle)


def test_inference_mode_and_training_share_workspaces() -> None:
    workspaces = Workspaces(None, CPU)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert torch.isfinite(_combine(workspaces, *_dispatch(workspaces))).all()
    shape = ShapeClass(hidden_size=24, num_experts=8, top_k=2, dtype=torch.float32)
    assert [workspace.shape for workspace in workspaces.all()] == [shape]
