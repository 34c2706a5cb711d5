"""The operators of a fused layer: schemas, fakes, what is kept, and calls out of order."""

import pytest
import torch
from torch.library import opcheck

from halley.core.types import Save
from halley.fused.buffer_cache import Workspaces, find_workspaces
from halley.fused.buffers import ShapeClass
from halley.fused.forward_ops import Dispatched, dispatch_gemm, gemm_combine
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error
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


def _dispatch(workspaces: Workspaces) -> Dispatched:
    x_TD, ids, weights, up, _ = _tensors()
    return dispatch_gemm(
        x_TD, ids, weights, up, gated=True, fused=True, workspaces=workspaces.handle
    )


def _combine(workspaces: Workspaces, made: Dispatched) -> torch.Tensor:
    down, handle = _tensors()[-1], workspaces.handle
    return gemm_combine(made.h_RF, made.plan, down, num_tokens=8, fused=True, workspaces=handle)


def _error(y_TD: torch.Tensor) -> float:
    return relative_error(y_TD, expected(CASE, 0)["y"])


def test_operators_keep_their_promises() -> None:
    workspaces, others = Workspaces(None, CPU), Workspaces(None, CPU)
    *routed, up, down = _tensors()
    for save in ("none", "all", "inputs", "recompute"):
        opcheck(
            torch.ops.halley.dispatch_gemm.default,
            (*routed, up, True, True, save, others.handle),
            test_utils=CHECKS,  # what pads rows to tiles is undefined, so values differ
        )
    made = _dispatch(workspaces)
    checks = (*CHECKS, "test_aot_dispatch_dynamic")
    opcheck(
        torch.ops.halley.gemm_combine.default,
        (made.h_RF, made.plan, down, 8, True, workspaces.handle),
        test_utils=checks,
    )


def test_results_are_no_scratch() -> None:
    """A later call leaves the results of an earlier one as they were."""
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    kept = made.h_RF.clone()
    y_TD = _combine(workspaces, made)
    again = _dispatch(workspaces)
    (workspace,) = workspaces.all()
    workspace.rows_RD.fill_(torch.nan)
    torch.testing.assert_close(made.h_RF, kept, rtol=0.0, atol=0.0, equal_nan=True)
    assert again.h_RF.data_ptr() != made.h_RF.data_ptr()
    assert _error(y_TD) <= RELATIVE_TOLERANCE[torch.float32]


def test_plan_combines_twice() -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    assert torch.equal(_combine(workspaces, made), _combine(workspaces, made))


@pytest.mark.parametrize("save", ["none", "all", "inputs", "recompute"])
def test_what_is_kept_of_a_hand_made_layer(save: Save) -> None:
    """Two experts of ones and of twos; the second token is of twos and goes to the second alone."""
    x_TD, ids = torch.ones(2, 16), torch.tensor([[1, 0], [-1, 1]])
    x_TD[1] *= 2.0
    up_LGD = torch.ones(2, 8, 16)
    up_LGD[1] *= 2.0
    workspaces = Workspaces(None, CPU)
    made = dispatch_gemm(
        x_TD,
        ids,
        torch.ones(2, 2),
        up_LGD,
        gated=False,
        fused=True,
        save=save,
        workspaces=workspaces.handle,
    )
    assert made.h_RF.shape == (32, 8)  # a tile each
    where = torch.tensor([0, 16, 17])  # token 0 to expert 0 and 1, token 1 to expert 1
    pre = torch.tensor([16.0, 32.0, 64.0])[:, None]  # of which gelu changes nothing
    assert torch.equal(made.h_RF[where], pre.expand(3, 8))
    if save == "all":
        assert (made.rows.shape, made.pre_RG.shape) == ((32, 16), (32, 8))
        assert torch.equal(made.rows[where], x_TD[[0, 0, 1]])
        assert torch.equal(made.pre_RG[where], pre.expand(3, 8))
    elif save == "inputs":
        assert (made.rows.shape, made.pre_RG.shape) == ((64, 16), (32, 0))  # one task of sends
        assert torch.equal(made.rows[:2], x_TD)
    else:
        assert (made.rows.shape, made.pre_RG.shape) == ((32, 0), (32, 0))


def test_overtaken_plan_is_refused() -> None:
    workspaces = Workspaces(None, CPU)
    made = _dispatch(workspaces)
    late = _dispatch(workspaces)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(workspaces, made)
    assert _error(_combine(workspaces, late)) <= RELATIVE_TOLERANCE[torch.float32]
    _dispatch(workspaces)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(workspaces, late)
    fresh = Workspaces(None, CPU)
    with pytest.raises(RuntimeError, match="gemm_combine must follow the dispatch_gemm"):
        _combine(fresh, made)


def test_half_of_a_layer_has_no_gradients() -> None:
    workspaces = Workspaces(None, CPU)
    x_TD, ids, weights, up, _ = _tensors()
    made = dispatch_gemm(
        x_TD.requires_grad_(),
        ids,
        weights,
        up,
        gated=True,
        fused=True,
        workspaces=workspaces.handle,
    )
    assert not made.plan.requires_grad
    with pytest.raises(RuntimeError, match="have gradients together: call fused_experts"):
        _combine(workspaces, made).sum().backward()


def test_workspaces_that_are_gone() -> None:
    handle = Workspaces(None, CPU).handle
    with pytest.raises(RuntimeError, match=rf"workspaces \({handle}\) are gone"):
        find_workspaces(handle)


def test_inference_mode_and_training_share_workspaces() -> None:
    workspaces = Workspaces(None, CPU)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert torch.isfinite(_combine(workspaces, _dispatch(workspaces))).all()
    shape = ShapeClass(hidden_size=24, num_experts=8, top_k=2, dtype=torch.float32)
    assert [workspace.shape for workspace in workspaces.all()] == [shape]
