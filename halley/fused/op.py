"""The fused MoE layer with gradients: an autograd function, and operators for torch.compile.

Eager code calls ``fused_experts``, which runs the pass directly and registers the backward with
autograd. Under ``torch.compile`` the graph has these operators of the library ``halley``:

- ``fused_experts``: the forward pass, with a gradient.
- ``fused_experts_backward``: the backward pass without weight gradients.
- ``weight_gemm``: the gradient of one projection; compiler passes can move it under a collective.
  If the projections are copies of other tensors (``core.types.Experts.sources``), the gradients
  of those tensors are computed instead, float32 ones in float32. So autograd need not split and
  cast the gradients of the copies.
- ``end_pass``: returns a new value of the ordering token that depends on the result of a pass.

All ranks must run their passes in the same order, but a compiler may reorder operators that share
no tensor. Therefore each pass reads the ordering token of its workspaces, and the result of
``end_pass`` is copied to the token.
"""

from functools import partial
from typing import Any, NamedTuple, final

import torch

from halley.fused.buffers import Workspace, Workspaces, find_workspaces
from halley.fused.kernels.launches import find_experts, launch_weight_gradient
from halley.fused.passes import (
    BackwardOptions,
    LayerCall,
    LayerResult,
    MainGrads,
    SaveOrNone,
    launch_backward,
    launch_token_gradients,
    run_backward,
    run_forward,
)
from halley.ops.kernels.launch import compile_only, is_aligned
from halley.ops.library import define


# Numbers of inputs of the operator ``fused_experts``; its last three are the sources.
_UP, _DOWN, _HANDLE, _SOURCES = 2, 3, 8, 10


@final
class LayerParts:
    """Keeps weight-gradient operands of all parts of a layer; computes the weight gradients once.

    A layer part is one call of the fused kernels for some of a layer's tokens; ``hierarchical``
    runs layers in parts. Separate weight-gradient GEMMs for each part would read and write all
    weight gradients once per part. Instead, the backward of each part keeps the operands. After the
    last part, one GEMM for each projection multiplies the rows of all parts.
    """

    def __init__(
        self, workspaces: Workspaces, up_LGD: torch.Tensor, down_LDF: torch.Tensor
    ) -> None:
        self._workspaces = workspaces
        # Numbers of columns of dpre_RG, weighted_RF, dy_RD and rows_RD of ``TokenGradients``.
        self._widths = (up_LGD.shape[1], down_LDF.shape[2], down_LDF.shape[1], up_LGD.shape[2])
        self.num_rows: list[int] = []
        self._operands: list[torch.Tensor] = []
        self._experts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._workspace: Workspace | None = None

    def begin_backward(
        self, index: int, plan: torch.Tensor, plan_id: int, *, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the buffer slices to which part ``index`` writes its weight-gradient operands."""
        if not self._operands:
            total = sum(self.num_rows)
            self._operands = [
                torch.empty(total, width, dtype=dtype, device=plan.device) for width in self._widths
            ]
        first = sum(self.num_rows[:index])
        self._workspace, layout = self._workspaces.find_plan(plan_id)
        begin, num_rows = find_experts(layout, plan)
        self._experts[index] = (begin + first, num_rows)
        return [each[first : first + self.num_rows[index]] for each in self._operands]

    def weight_gradients(
        self, needed: tuple[bool, bool], main_grads: MainGrads
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of both projections (or None) for all parts; free the operands."""
        (dpre_RG, weighted_RF, dy_RD, rows_RD), self._operands = self._operands, []
        parts, self._experts = [self._experts[i] for i in range(len(self.num_rows))], {}
        begins, num_rows = zip(*parts, strict=True)
        experts = (torch.stack(begins), torch.stack(num_rows))
        assert self._workspace is not None, "no part has run its backward"
        gradient = partial(launch_weight_gradient, self._workspace.context(), experts=experts)
        up_buffer, down_buffer = main_grads.buffers()
        dup = gradient(dpre_RG, rows_RD, up_buffer) if needed[0] else None
        ddown = gradient(dy_RD, weighted_RF, down_buffer) if needed[1] else None
        main_grads.mark_added(needed)
        return dup, ddown


class LayerPart(NamedTuple):
    """Number of a layer part, and the objects that it shares with the layer's other parts."""

    index: int  # number of the part; 0 for a whole layer
    parts: LayerParts | None = None  # None if the layer runs as one part or weights are frozen
    anchor: torch.Tensor | None = None  # scalar from ``JoinParts``, input of each part; else None


WHOLE_LAYER = LayerPart(0)


class JoinParts(torch.autograd.Function):
    """Autograd function that computes a layer's weight gradients once, for the rows of all parts.

    Forward returns a scalar whose value nothing reads. Each part takes this scalar as an input. So
    autograd runs this backward after the backward of all parts.
    """

    @staticmethod
    def forward(ctx: Any, up_LGD: torch.Tensor, down_LDF: torch.Tensor, parts: LayerParts) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.main_grads = parts, MainGrads(up_LGD, down_LDF)
        return up_LGD.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        return *ctx.parts.weight_gradients(ctx.needs_input_grad[:2], ctx.main_grads), None


def fused_experts(
    call: LayerCall,
    workspaces_handle: int,
    ordering_token: torch.Tensor | None = None,
    part: LayerPart = WHOLE_LAYER,
) -> torch.Tensor:
    """Return the output of a fused MoE layer, ``(T, D)``; a collective of the ranks.

    Differentiable once, in the tokens, the routing weights and both projections. If a projection
    has an attribute ``main_grad``, its gradient is added to that buffer as in Megatron: its
    ``grad`` stays None, and ``grad_added_to_main_grad`` becomes True. Under ``torch.compile`` it
    gets a ``grad`` like any other tensor.

    ``workspaces_handle`` and ``ordering_token`` are attributes of the ``Workspaces``; the latter is
    required under ``torch.compile``. ``part`` is for a layer that runs in parts, not compiled. A
    peer that does not begin the same pass in time is a ``RuntimeError``, and a ``main_grad`` that
    is no contiguous buffer of the projection's shape a ``ValueError``.
    """
    if ordering_token is not None and torch.compiler.is_compiling():
        operator = torch.ops.halley.fused_experts.default
        results = operator(*call, workspaces_handle, ordering_token)
        _end_pass(ordering_token, results[0])
        return results[0]
    workspaces = find_workspaces(workspaces_handle)
    if call.save == "none":
        return run_forward(workspaces, call, part=part.index).y_TD
    for weight in (call.up_LGD, call.down_LDF):
        _check_main_grad(weight)
    # Autograd takes longer on the host than small kernels run, so the kernels are launched first.
    with torch.no_grad():
        result = run_forward(workspaces, call, part=part.index)
    # A layer part has no weight gradients of its own: ``JoinParts`` computes those of all parts.
    weights = call[2:4] if part.parts is None else (part.anchor, None)
    return _FusedExperts.apply(  # pyright: ignore[reportReturnType]
        *call[:2], *weights, call, workspaces, result, part
    )


def compile_fused_experts(call: LayerCall, workspaces_handle: int) -> None:
    """Compile the kernels of a layer's passes in parallel, without launching them."""
    workspaces, weights = find_workspaces(workspaces_handle), (call.up_LGD, call.down_LDF)
    with compile_only(workspaces.num_ranks), torch.no_grad():
        result = run_forward(workspaces, call)
        if call.save == "none":
            return
        needs = (weight.requires_grad for weight in weights)
        options = BackwardOptions(call.gated, call.fused, call.save, *needs)
        inputs = [
            torch.empty_like(result.y_TD), _saved_input(call, result), result.plan, result.pre_RG,
            *weights, call.topk_idx_TK,
        ]  # fmt: skip
        workspace, layout = workspaces.find_plan(int(result.plan_id))
        launch_backward(workspace, layout, inputs, options, MainGrads(*weights).buffers())


class _FusedExperts(torch.autograd.Function):
    """Autograd node of an eager call; ``fused_experts`` has run the forward pass before."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *_, call, workspaces, result, part = args
        _save_for_backward(ctx, call, result)
        ctx.index, ctx.parts = part.index, part.parts
        if part.parts is not None:
            part.parts.num_rows.append(result.pre_RG.shape[0])
        ctx.workspaces = workspaces  # keeps the buffers if the layer is deleted before its backward
        ctx.main_grads = MainGrads(call.up_LGD, call.down_LDF)
        return result.y_TD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative would silently omit this layer
            raise RuntimeError("gradients of fused layers have no gradients: create_graph is True")
        plan_id, *saved = ctx.saved_tensors
        inputs = [gradients[0], *saved]
        # After the next two lines, only ``inputs`` refers to the saved rows, unless the graph is
        # retained. So ``run_backward`` can free them after their last use.
        ctx.maybe_clear_saved_tensors()
        del saved
        if ctx.parts is not None:
            dx_TD, dweights_TK = _run_part_backward(ctx, int(plan_id), inputs)
            return dx_TD, dweights_TK.to(ctx.weights_dtype), *[None] * 6
        needed = ctx.needs_input_grad[2:4]
        options = BackwardOptions(ctx.gated, ctx.fused, ctx.save, *needed)
        dx_TD, dweights_TK, dup, ddown = run_backward(
            ctx.workspaces, int(plan_id), inputs, options, ctx.main_grads.buffers()
        )
        assert dweights_TK is not None
        ctx.main_grads.mark_added(needed)
        return dx_TD, dweights_TK.to(ctx.weights_dtype), dup, ddown, *[None] * 4


def _run_part_backward(ctx: Any, plan_id: int, inputs: list[Any]) -> Any:
    _, saved, plan = inputs[:3]
    operands = ctx.parts.begin_backward(ctx.index, plan, plan_id, dtype=saved.dtype)
    if ctx.save == "all":
        operands[3].copy_(saved)
    del saved  # so that ``run_backward`` can free it if ``save`` is "inputs"
    inputs += operands
    options = BackwardOptions(ctx.gated, ctx.fused, ctx.save, False, False, keeps_operands=True)
    return run_backward(ctx.workspaces, plan_id, inputs, options, (None, None))


def _save_for_backward(ctx: Any, call: LayerCall, result: LayerResult) -> None:
    ctx.save_for_backward(
        result.plan_id, _saved_input(call, result), result.plan, result.pre_RG,
        call.up_LGD, call.down_LDF, call.topk_idx_TK,
    )  # fmt: skip
    ctx.gated, ctx.fused, ctx.save = call.gated, call.fused, call.save
    ctx.weights_dtype = call.topk_weights_TK.dtype


def _saved_input(call: LayerCall, result: LayerResult) -> torch.Tensor:
    return call.x_TD if call.save == "recompute" else result.rows


def _check_main_grad(weight: torch.Tensor) -> None:
    buffer = getattr(weight, "main_grad", None)
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


def _end_pass(ordering_token: torch.Tensor, result: torch.Tensor) -> None:
    """Make all later readers of the ordering token depend on the pass that computed ``result``."""
    ordering_token.copy_(torch.ops.halley.end_pass.default(result.detach()))


# Implementations of the operators; the schemas at the end of the file name the arguments.


def _forward_op(*args: Any) -> tuple[torch.Tensor, ...]:
    *call, workspaces_handle = args[:9]
    result = run_forward(find_workspaces(workspaces_handle), LayerCall(*call))
    # Clone the plan's id, as a compiled graph may overwrite tensors that an operator returns.
    return result._replace(plan_id=result.plan_id.clone())


def _fake_forward(
    x: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    save: SaveOrNone = others[4]
    ctx = torch.library.get_ctx()
    # The length of a plan is a dynamic size: it depends on the tokens of other ranks.
    plan = x.new_empty(ctx.new_dynamic_size(), dtype=torch.int32)
    num_rows = ctx.new_dynamic_size()
    if save == "inputs":
        rows = x.new_empty(ctx.new_dynamic_size(), x.shape[1])
    else:
        rows = x.new_empty(num_rows, x.shape[1] if save == "all" else 0)
    pre_RG = x.new_empty(num_rows, up.shape[1] if save == "all" else 0)
    plan_id = torch.empty(1, dtype=torch.int64, device="cpu")
    return x.new_empty(x.shape), plan, plan_id, rows, pre_RG


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.workspaces_handle, ctx.ordering_token, *sources = inputs[_HANDLE:]
    ctx.source_dtypes = {  # keys: numbers of the inputs
        _SOURCES + i: source.dtype for i, source in enumerate(sources) if source is not None
    }
    _save_for_backward(ctx, LayerCall(*inputs[:_HANDLE]), LayerResult(*output))


def _backward_of_op(ctx: Any, dy_TD: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    plan_id, saved, plan, pre_RG, up_LGD, down_LDF, topk_idx_TK = ctx.saved_tensors
    dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD = (
        torch.ops.halley.fused_experts_backward.default(
            dy_TD, saved, plan, pre_RG, up_LGD, down_LDF, topk_idx_TK, plan_id,
            ctx.gated, ctx.fused, ctx.save, ctx.workspaces_handle, ctx.ordering_token,
        )
    )  # fmt: skip
    if ctx.ordering_token is not None:
        _end_pass(ctx.ordering_token, dx_TD)
    rows_RD = saved if ctx.save == "all" else rows_RD
    # Operands of the weight-gradient GEMMs, by number of the input that gets the gradient.
    operands = {_DOWN: (dy_RD, weighted_RF), _UP: (dpre_RG, rows_RD)}
    if ctx.source_dtypes:
        dgate_RF, dup_RF = dpre_RG.chunk(2, dim=1)
        gate, up, down = range(_SOURCES, _SOURCES + 3)
        operands = {down: operands[_DOWN], gate: (dgate_RF, rows_RD), up: (dup_RF, rows_RD)}
    gradients: list[torch.Tensor | None] = [dx_TD, dweights_TK.to(ctx.weights_dtype), *[None] * 11]
    where = (plan, plan_id, up_LGD.shape[0], ctx.workspaces_handle)
    for index, (grad_RM, rows_RN) in operands.items():
        if ctx.needs_input_grad[index]:
            is_wide = ctx.source_dtypes.get(index) == torch.float32
            dtype = torch.float32 if is_wide else None
            gradients[index] = torch.ops.halley.weight_gemm.default(grad_RM, rows_RN, *where, dtype)
    return tuple(gradients)


def _backward_op(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *tensors, plan_id, gated, fused, save, workspaces_handle = args[:11]
    workspace, layout = find_workspaces(workspaces_handle).find_plan(int(plan_id))
    workspace.begin_pass()
    options = BackwardOptions(gated, fused, save, False, False)
    gradients = launch_token_gradients(workspace, layout, [dy, *tensors], options)
    if save != "all":
        return gradients
    # With save "all", rows are an input. Operators must not return inputs: return no rows.
    return gradients._replace(rows_RD=dy.new_empty(0, dy.shape[1]))


def _fake_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    _, _, pre, up, down, topk_idx, _, _, _, save = args[:10]
    hidden_size = dy.shape[1]
    # With other values of ``save``, ``pre`` is empty. Inductor of torch 2.15 takes no dynamic size
    # from an empty input.
    num_rows = pre.shape[0] if save == "all" else torch.library.get_ctx().new_dynamic_size()
    return (
        dy.new_empty(topk_idx.shape[0], hidden_size),
        dy.new_empty(topk_idx.shape, dtype=torch.float32),
        dy.new_empty(num_rows, up.shape[1]),
        dy.new_empty(num_rows, down.shape[2]),
        dy.new_empty(num_rows, hidden_size),
        dy.new_empty(0 if save == "all" else num_rows, hidden_size),
    )


def _weight_gemm_op(grad: torch.Tensor, rows: torch.Tensor, *args: Any) -> torch.Tensor | None:
    plan, plan_id, _, workspaces_handle, *dtypes = args
    workspace, layout = find_workspaces(workspaces_handle).find_plan(int(plan_id))
    launch = partial(launch_weight_gradient, workspace.context(), grad, rows)
    return launch(experts=find_experts(layout, plan), dtype=next(iter(dtypes), None))


def _fake_weight_gemm(grad: torch.Tensor, rows: torch.Tensor, *args: Any) -> torch.Tensor:
    _, _, num_experts, _, *dtypes = args
    shape = (num_experts, grad.shape[1], rows.shape[1])
    return rows.new_empty(shape, dtype=next(iter(dtypes), None))


def _new_token(after: torch.Tensor) -> torch.Tensor:
    return after.new_empty(1, dtype=torch.int32)


define(
    "fused_experts(Tensor x, Tensor weights, Tensor up, Tensor down, Tensor topk_idx, bool gated, "
    "bool fused, str save, int workspaces_handle, Tensor? ordering_token=None, "
    "Tensor? gate_source=None, Tensor? up_source=None, Tensor? down_source=None) "
    "-> (Tensor y, Tensor plan, Tensor plan_id, Tensor rows, Tensor pre)",
    _forward_op,
    _fake_forward,
    setup_context=_setup_context,
    backward=_backward_of_op,
    host_reads=True,
)
define(
    "fused_experts_backward(Tensor dy, Tensor saved, Tensor plan, Tensor pre, Tensor up, "
    "Tensor down, Tensor topk_idx, Tensor plan_id, bool gated, bool fused, str save, "
    "int workspaces_handle, Tensor? ordering_token=None) "
    "-> (Tensor dx, Tensor dweights, Tensor dpre, Tensor weighted, Tensor dy_rows, Tensor rows)",
    _backward_op,
    _fake_backward,
    host_reads=True,
)
# ``dtype`` has a default value because code in Inductor's cache may be older than this argument.
define(
    "weight_gemm(Tensor grad, Tensor rows, Tensor plan, Tensor plan_id, int num_experts, "
    "int workspaces_handle, ScalarType? dtype=None) -> Tensor",
    _weight_gemm_op,
    _fake_weight_gemm,
    host_reads=True,
)
define("end_pass(Tensor after) -> Tensor", _new_token, _new_token)
