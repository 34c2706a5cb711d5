"""A fused layer with its gradients: which operators run, and what is kept between them."""

from functools import partial
from typing import Any

import torch

from halley.fused.backward_ops import dgrad_combine, dispatch_again, dispatch_dgrad
from halley.fused.buffer_cache import Workspaces, find_workspaces
from halley.fused.buffers import rows_in_steps
from halley.fused.forward_ops import fake_dispatch_gemm, forward_pass
from halley.fused.ordering import end_pass
from halley.fused.passes import Kept, run_pass
from halley.fused.weight_gradients import add_weight_gemm, weight_gemm
from halley.ops.kernels.launch import compile_only, is_aligned
from halley.ops.kernels.replay import Results, drop
from halley.ops.library import define


def fused_experts(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    up_LGD: torch.Tensor,
    down_LDF: torch.Tensor,
    *,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sums of this rank's tokens over their experts, ``(T, D)``.

    Forward and backward are collectives of the ranks, which run all of them in the same order.
    Differentiable once, in the tokens, the routing weights and both projections. A projection with
    an attribute ``main_grad`` gets its gradient added to that buffer, as Megatron has it: its
    ``grad`` stays None, and ``grad_added_to_main_grad`` becomes True. (Not under ``torch.compile``,
    where it gets a ``grad`` as any other.)

    Args:
        x_TD: tokens of this rank.
        topk_idx_TK: expert ids or ``DROPPED``.
        topk_weights_TK: weights of the combine.
        up_LGD, down_LDF: projections of this rank's experts, contiguous.
        gated: whether gate and up stand one below the other in the first.
        fused: False runs the same kernels one part after another.
        save: what is kept for backward, beside the plan. "all" keeps the rows and what the
            activation was made of; "inputs" keeps each row once, however many of its experts are
            here, and multiplies again; "recompute" keeps none and dispatches again; "none" has
            no backward.
        workspaces: handle of the buffers.
        turn: of the workspaces, see ``turns``.

    Raises:
        RuntimeError: a peer did not come in time, or came for another pass.
        ValueError: a ``main_grad`` is not a contiguous buffer of the projection's shape.
    """
    args = (
        x_TD, topk_weights_TK, up_LGD, down_LDF, topk_idx_TK, gated, fused, save, workspaces
    )  # fmt: skip
    if turn is None or not torch.compiler.is_compiling():
        if save == "none":
            return _forward(*args)[0]
        for weight in (up_LGD, down_LDF):
            _check_main_grad(weight)
        with torch.no_grad():  # before autograd, which takes longer than some kernels
            output = _forward(*args)
        return _FusedExperts.apply(*args, output)  # pyright: ignore[reportReturnType]
    y_TD = torch.ops.halley.fused_experts.default(*args, turn)[0]
    end_pass(turn, y_TD)
    return y_TD


def compile_fused_experts(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    up_LGD: torch.Tensor,
    down_LDF: torch.Tensor,
    *,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
) -> None:
    """Compile the kernels of such layers, forward and backward, many at a time; launch none.

    Otherwise each would be compiled when it is first launched, one after another. For the
    arguments see ``fused_experts``.
    """
    args = (
        x_TD, topk_weights_TK, up_LGD, down_LDF, topk_idx_TK, gated, fused, save, workspaces, None
    )  # fmt: skip
    with compile_only(find_workspaces(workspaces).num_ranks), torch.no_grad():
        output = _forward(*args)
        if save != "none":
            ctx = _Unrecorded([isinstance(a, torch.Tensor) and a.requires_grad for a in args])
            _setup_context(ctx, args, output)
            _launch_backward(ctx, torch.empty_like(output[0]), *ctx.saved_tensors)


class _Unrecorded:
    """What autograd would keep of a forward pass, without autograd."""

    def __init__(self, needs_input_grad: list[bool]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def _check_main_grad(weight: torch.Tensor) -> None:
    buffer: torch.Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None:
        return
    is_like = buffer.shape == weight.shape and buffer.device == weight.device
    if not (is_like and is_aligned(buffer) and buffer.dtype in (torch.float32, weight.dtype)):
        raise ValueError(
            f"main_grad ({buffer.dtype}, shape {tuple(buffer.shape)}, strides {buffer.stride()}, "
            f"{buffer.device}, at {buffer.data_ptr():#x}) must be contiguous, begin on a multiple "
            f"of 16 bytes, be of float32 or {weight.dtype}, of shape {tuple(weight.shape)}, on "
            f"{weight.device}"
        )


def _forward(
    x: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    idx: torch.Tensor,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the output, then the plan, rows and ``pre`` that backward needs."""
    return forward_pass(
        x, idx, weights, up, down, gated=gated, fused=fused, save=save, workspaces=workspaces
    )


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    idx: torch.Tensor,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    made = fake_dispatch_gemm(x, idx, weights, up, gated, fused, save, workspaces, turn)
    return x.new_empty(x.shape), *made[1:]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, up, down, idx, gated, fused, save, workspaces, turn = inputs
    _, plan, rows, pre_RG = output
    ctx.save_for_backward(x if save == "recompute" else rows, plan, pre_RG, up, down, idx)
    ctx.gated, ctx.save, ctx.weights_dtype = gated, save, weights.dtype
    ctx.common, ctx.turn = {"fused": fused, "workspaces": workspaces}, turn
    # What comes back of the saved weights may be another tensor, without its attributes.
    buffered = (
        weight if getattr(weight, "main_grad", None) is not None else None for weight in (up, down)
    )
    ctx.buffered_up, ctx.buffered_down = buffered


def _backward(ctx: Any, dy_TD: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    gradients = _launch_backward(ctx, dy_TD, *ctx.saved_tensors)
    if ctx.turn is not None:
        assert gradients[0] is not None
        end_pass(ctx.turn, gradients[0])
    return _finish(ctx, gradients)


def _backward_pass(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Go backward where no compiler looks, with what an earlier pass launched if that fits."""
    rows, plan, pre_RG, up, down, idx = ctx.saved_tensors
    owner: Workspaces = ctx.owner
    workspace = owner.of_plan(
        plan,
        num_experts=owner.num_experts(up.shape[0]),
        top_k=idx.shape[1],
        rows=(dy_TD.shape[1], dy_TD.dtype),
    )
    buffers = [
        weight.main_grad for weight in (ctx.buffered_up, ctx.buffered_down) if weight is not None
    ]
    is_own = (_memory_of(rows), _memory_of(pre_RG)) == ctx.memory  # not what a hook unpacked
    num_rows = rows_in_steps(pre_RG.shape[0], block_m=workspace.knobs.block_m)
    if ctx.save == "all":
        num_rows = pre_RG.shape[0]
        if is_own:
            num_rows = min(_rows_of_memory(rows), _rows_of_memory(pre_RG))
        rows, pre_RG = _with_room(rows, num_rows), _with_room(pre_RG, num_rows)
    else:
        pre_RG = pre_RG.new_empty(num_rows, 0)
        if ctx.save == "inputs" and is_own:
            rows = _with_room(rows, _rows_of_memory(rows))
    is_last = is_own and _is_last_backward()
    saved = (rows, plan, pre_RG, up, down, idx)
    key = None
    if all(is_aligned(tensor) for tensor in (dy_TD, *saved, *buffers)):
        key = (
            "backward", ctx.gated, ctx.common["fused"], ctx.save, *ctx.needs_input_grad[2:4],
            ctx.buffered_up is None, ctx.buffered_down is None, *(b.dtype for b in buffers),
            is_last, num_rows, rows.shape, plan.shape, dy_TD.shape, dy_TD.dtype, up.shape,
            down.shape, idx.dtype,
        )  # fmt: skip
    inputs = (dy_TD, *saved, *buffers)
    run = partial(_launch_backward, ctx, dy_TD, *saved, is_last=is_last)
    gradients = run_pass(workspace, key, inputs, run)
    owner.dispatched(workspace, plan)
    return _finish(ctx, gradients)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins, and the bytes of its memory: the same for no other tensor."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def _rows_of_memory(rows: torch.Tensor) -> int:
    """Return for how many rows forward made room, in memory that begins with them.

    Those that are kept are fewer, and change more from pass to pass.
    """
    return rows.untyped_storage().nbytes() // (rows.shape[1] * rows.itemsize)


def _with_room(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the rows and what lies behind them in their memory, as many as are asked for."""
    return rows.as_strided((num_rows, rows.shape[1]), rows.stride())


def _launch_backward(
    ctx: Any,
    dy_TD: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    pre_RG: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    idx: torch.Tensor,
    *,
    is_last: bool = False,
) -> Results:
    """Return the gradients of tokens, of weights in float32, and of both projections.

    None for a projection that wants none or whose buffer it was added to. If nobody goes backward
    once more, memory of kept rows goes when it was used last.
    """
    begin = {"top_k": idx.shape[1], "gated": ctx.gated, "turn": ctx.turn, **ctx.common}
    if ctx.save != "all":
        kept = ctx.save == "inputs"
        source = rows
        rows, pre_RG = dispatch_again(source, plan, pre_RG, up, kept=kept, **begin)
        if kept and is_last:
            drop(source)  # autograd holds it until all gradients are there
    made = dispatch_dgrad(dy_TD, plan, pre_RG, down, **begin)
    del pre_RG  # memory goes when it was used last, as where this is repeated
    dpre_RG, weighted_RF, dy_RD, dweight_RC = made
    dx_TD, dweights_TK = dgrad_combine(dpre_RG, plan, dweight_RC, up, idx, **ctx.common)
    del made, dweight_RC
    up_wanted, down_wanted = ctx.needs_input_grad[2:4]
    dup = ddown = None
    place = {
        "num_experts": up.shape[0],
        "top_k": idx.shape[1],
        "workspaces": ctx.common["workspaces"],
    }
    if down_wanted:
        ddown = _weight_gradient(ctx.buffered_down, dy_RD, weighted_RF, plan, **place)
    del dy_RD, weighted_RF
    if up_wanted:
        dup = _weight_gradient(ctx.buffered_up, dpre_RG, rows, plan, **place)
    return dx_TD, dweights_TK, dup, ddown


def _is_last_backward() -> bool:
    """Return whether autograd keeps nothing for going backward once more.

    What it saved is then used by nobody else: torch's own compiler relies on it, too.
    """
    return not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore


def _finish(ctx: Any, gradients: Results) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of all inputs, once they are launched."""
    dx_TD, dweights_TK, dup, ddown = gradients
    assert dweights_TK is not None
    wanted = zip((ctx.buffered_up, ctx.buffered_down), ctx.needs_input_grad[2:4], strict=True)
    for weight, is_wanted in wanted:
        if weight is not None and is_wanted:
            weight.grad_added_to_main_grad = True
    return dx_TD, dweights_TK.to(ctx.weights_dtype), dup, ddown, *[None] * 6


class _FusedExperts(torch.autograd.Function):
    """The same as the operator, by a shorter way: its forward has run by then."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *inputs, output = args
        _setup_context(ctx, (*inputs, None), output)
        kept = inputs[0] if ctx.save == "recompute" else output[2]
        ctx.memory = _memory_of(kept), _memory_of(output[3])
        ctx.owner = find_workspaces(ctx.common["workspaces"])  # backward may outlive the layer
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # else it would silently lack what went through the layer
            raise RuntimeError("gradients of fused layers have no gradients: create_graph is True")
        return _backward_pass(ctx, gradients[0])


def _weight_gradient(
    buffered: torch.Tensor | None,
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    plan: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    workspaces: int,
) -> torch.Tensor | None:
    """Return the gradient of a projection, or add it to the projection's buffer if it has one."""
    place = {"top_k": top_k, "workspaces": workspaces}
    if buffered is None:
        return weight_gemm(grad_RM, rows_RN, plan, num_experts=num_experts, **place)
    weight: Any = buffered
    add_weight_gemm(weight.main_grad, grad_RM, rows_RN, plan, **place)
    return None


define(
    "fused_experts(Tensor x, Tensor weights, Tensor up, Tensor down, Tensor topk_idx, bool gated, "
    "bool fused, str save, int workspaces, Tensor? turn=None) "
    "-> (Tensor y, Tensor plan, Tensor rows, Tensor pre)",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
