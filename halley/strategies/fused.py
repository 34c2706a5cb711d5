"""Strategy "fused" overlaps communication with GEMMs; "unfused" runs the same kernels one by one.

The process group is only used in the first call of a buffer shape and when buffers grow; the
kernels of ``fused/op.py`` communicate through symmetric memory.

Source: COMET (arXiv:2502.19811).
"""

import itertools
from typing import final, get_args

import torch

from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Save, Task, check_routing, local_experts
from halley.cost.hardware import Predictor
from halley.fused.buffers import Workspace, Workspaces, find_workspaces
from halley.fused.kernels.layout import MAX_CHUNKS
from halley.fused.op import (
    WHOLE_LAYER,
    JoinParts,
    LayerPart,
    LayerParts,
    compile_fused_experts,
    fused_experts,
)
from halley.fused.passes import LayerCall
from halley.interpreter import INTERPRETED
from halley.ops.kernels.launch import is_aligned
from halley.strategies.base import (
    BESIDE,
    FUSED_CAPABILITY,
    AbstractStrategy,
    PartRunner,
    check_inputs,
    comm_task,
    compute_task,
    gemms_us,
    share_of_tokens,
    wants_gradients,
)


_MAX_RANKS = 31  # kernels keep sets of ranks as bits of an int32
_MAX_EXPERTS = 2**15 - 1  # kernels pack an expert id with 16 other bits into an int32
_MAX_TOP_K = 64
# For predictions (docs/predictions.md): time of send-buffer copy / plain copy, rate of stores to
# peers / NCCL; number of host operations in forward, in backward.
_PUBLISH, _PUSH, _NUM_OPS, _NUM_BACKWARD_OPS = 3.0, 1.1, 3, 9
_ROW_ALIGNMENT = 16  # bytes, required by TMA for each row
_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}


@final
class FusedStrategy(AbstractStrategy):
    """Run a layer by Halley's kernels, which overlap dispatch and combine with GEMMs if ``fused``.

    Args:
        workspaces: buffers of the group. Strategies with the same object share memory, and their
            calls run one after the other.
        recorder: records one span for the layer, which includes the waits for other ranks.
        fused: False runs the same kernels one after the other, with the same bits.
        save: activations that are saved for backward, see ``fused.passes.LayerCall``.
    """

    def __init__(
        self, workspaces: Workspaces, *, recorder: Recorder, fused: bool = True, save: Save = "all"
    ) -> None:
        if save not in get_args(Save):
            raise ValueError(f"save ({save}) must be one of {', '.join(get_args(Save))}")
        self.workspaces, self.tp_size = workspaces, workspaces.tp_size
        self.recorder, self.fused = recorder, fused
        self.save: Save = save
        self._checked: set[tuple[object, ...]] = set()

    @property
    def gemm(self) -> str:
        return "halley"

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        return self._run(x_TD, routing, experts, part=WHOLE_LAYER)

    def open_parts(self, experts: Experts) -> PartRunner:
        up, down = experts.up_LGD, experts.down_LDF
        parts = anchor = None
        if torch.is_grad_enabled() and (up.requires_grad or down.requires_grad):
            parts = LayerParts(self.workspaces, up, down)
            anchor = JoinParts.apply(up, down, parts)
        indices = itertools.count()

        def run(x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
            part = LayerPart(next(indices), parts, anchor)
            return self._run(x_TD, routing, experts, part=part)

        return run

    def _run(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts, *, part: LayerPart
    ) -> torch.Tensor:
        backward = wants_gradients(x_TD, routing, experts)
        self._check(x_TD, routing, experts, backward=backward)
        with self.recorder.span("fused_experts"):
            call = self._call(x_TD, routing, experts, backward=backward)
            return fused_experts(call, self.workspaces.handle, self.workspaces.ordering_token, part)

    def forward_in_graph(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts
    ) -> torch.Tensor:
        """Run the layer by one operator, for graphs of ``torch.compile``; return its output.

        A model whose blocks are compiled one by one needs this: ``forward`` saves the ordering
        token for the backward of each graph, and later graphs overwrite the token. Here only data
        dependencies order the passes, so each layer must depend on the layers before it.
        """
        self._check_all(x_TD, routing, experts)
        backward = wants_gradients(x_TD, routing, experts)
        call = self._call(x_TD, routing, experts, backward=backward)
        operator = torch.ops.halley.fused_experts.default
        return operator(*call, self.workspaces.handle, None, *experts.sources)[0]

    def prepare(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> Workspace:
        """Check inputs; return the layer's buffers. If missing, allocate them: a collective."""
        self._check_all(x_TD, routing, experts)
        workspaces = find_workspaces(self.workspaces.handle)
        return workspaces.find(x_TD, routing.topk_idx_TK, experts.up_LGD)

    def compile(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts, *, backward: bool
    ) -> None:
        """Compile the kernels of a prepared layer in parallel, on this rank only.

        Only sizes and dtypes of the inputs matter. ``backward`` adds the kernels of backward.
        """
        call = self._call(x_TD, routing, experts, backward=backward)
        compile_fused_experts(call, self.workspaces.handle)

    def _call(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts, *, backward: bool
    ) -> LayerCall:
        return LayerCall(
            x_TD,
            routing.topk_weights_TK,
            experts.up_LGD,
            experts.down_LDF,
            routing.topk_idx_TK,
            gated=experts.activation == "swiglu",
            fused=self.fused,
            save=self.save if backward else "none",
        )

    def _check(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts, *, backward: bool
    ) -> None:
        """Check inputs; eager calls on a GPU check, and compile for, only new kinds of inputs."""
        # Dynamo guards on state that it reads: it would retrace when the set ``_checked`` grows.
        if torch.compiler.is_compiling() or not x_TD.is_cuda:
            self._check_all(x_TD, routing, experts)
            return
        tensors = (x_TD, routing.topk_idx_TK, routing.topk_weights_TK, *experts.tensors().values())
        kind: tuple[object, ...] = tuple(
            (t.shape, t.dtype, t.device, t.stride(), t.data_ptr() % _ROW_ALIGNMENT) for t in tensors
        )
        kind += (backward, experts.activation, Workspaces.in_bounded_step)
        if kind in self._checked:
            return
        workspace = self.prepare(x_TD, routing, experts)
        compiled = (
            self.fused, self.save, backward, experts.activation, workspace.layout,
            routing.topk_idx_TK.dtype, routing.topk_weights_TK.dtype,
            *((each.shape, each.requires_grad) for each in (experts.up_LGD, experts.down_LDF)),
        )  # fmt: skip
        if compiled not in workspace.compiled:
            workspace.compiled.add(compiled)
            self.compile(x_TD, routing, experts, backward=backward)
        self._checked.add(kind)

    def _check_all(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> None:
        num_experts = self.workspaces.num_experts(experts.num_local_experts)
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
        if problem := self.find_problem(experts, top_k=routing.topk_idx_TK.shape[1]):
            raise ValueError(problem)

    def release(self) -> None:
        self.workspaces.close()

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        weight, num_ranks = experts.down_LDF, self.workspaces.num_ranks
        hidden_size, intermediate_size = weight.shape[1], weight.shape[2]
        num_experts = self.workspaces.num_experts(experts.num_local_experts)
        if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
            return (
                "expert_bias (true) must be false for strategy fused: its kernels add no bias yet"
            )
        allowed = _DTYPES.get(weight.device.type, ())
        if weight.dtype not in allowed:
            names = ", ".join(str(dtype) for dtype in allowed)
            return f"dtype ({weight.dtype}) must be one of {names} for strategy fused"
        if not weight.is_cuda and not INTERPRETED:
            return (
                "device (cpu) must be cuda for strategy fused in a process whose Triton compiles: "
                "set TRITON_INTERPRET=1 before it starts"
            )
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FUSED_CAPABILITY:
            found = ".".join(map(str, torch.cuda.get_device_capability(weight.device)))
            return (
                f"compute capability ({found}) must be at least 9.0 for strategy fused: its "
                "kernels use the Tensor Memory Accelerator"
            )
        if not (experts.up_LGD.is_contiguous() and weight.is_contiguous()):
            return "the experts' weights (strided) must be contiguous for strategy fused"
        if not torch.compiler.is_compiling():  # traced tensors have no addresses
            for name, tensor in experts.tensors().items():
                if not is_aligned(tensor):
                    return (
                        f"{name} (at {tensor.data_ptr():#x}) must begin on a multiple of "
                        f"{_ROW_ALIGNMENT} bytes for strategy fused"
                    )
        multiple = _ROW_ALIGNMENT // weight.itemsize
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size % multiple:
                return (
                    f"{name} ({size}) must be a multiple of {multiple} for {weight.dtype} and "
                    f"strategy fused: its kernels read rows of {_ROW_ALIGNMENT} bytes"
                )
        limits = (
            ("ep_size", num_ranks, _MAX_RANKS),
            ("num_experts", num_experts, _MAX_EXPERTS),
            ("top_k", top_k, _MAX_TOP_K),
            ("hidden_size", hidden_size, MAX_CHUNKS * self.workspaces.config.chunk_columns),
        )
        for name, size, most in limits:
            if size > most:
                return f"{name} ({size}) must be at most {most} for strategy fused"
        return ""

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        columns = self.workspaces.config.chunk_columns
        return fused_tasks(shape, predictor, chunk_columns=columns, fused=self.fused)


def fused_tasks(
    shape: LayerShape, predictor: Predictor, *, chunk_columns: int, fused: bool
) -> list[Task]:
    """Return simulator tasks of the fused kernels, or of the same kernels one by one if not fused.

    The tasks approximate the overlap inside the kernels: the first GEMM has a task for the rows of
    each source rank, and the second GEMM one for each chunk of ``chunk_columns`` columns. A token
    crosses the link once to each rank that holds one of its experts, and one partial sum returns.
    Communication occupies SMs, so it slows the GEMM beside it.
    """
    rows, ranks, hardware = shape.num_tokens * shape.top_k, shape.ep_size, predictor.hardware
    row_bytes = shape.hidden_size * shape.itemsize
    num_local = local_experts(shape.num_experts, ep_size=ranks)
    crossings = shape.num_tokens * (ranks - 1) * share_of_tokens(shape, num_experts=num_local)
    up_us, down_us = gemms_us(shape, predictor, num_rows=rows, num_groups=num_local)
    up, down = ("up", up_us), ("down", down_us)
    publish_us = _PUBLISH * predictor.memory_us(2.0 * shape.num_tokens * row_bytes)
    plan_us = hardware.link_latency_us + _NUM_OPS * hardware.eager_us
    link_us = crossings * row_bytes / (_PUSH * hardware.link_bytes_per_s) * 1e6
    beside_us = BESIDE * link_us if fused else 0.0
    expand_us = predictor.memory_us(2.0 * rows * row_bytes) / ranks  # copy own tokens to rows
    sum_us = predictor.memory_us((rows + 2.0 * crossings + shape.num_tokens) * row_bytes)
    # Task 0 of the fused first GEMM has the rows of this rank, which do not cross the link.
    num_sources, num_own = (ranks, 1) if fused else (1, 0)
    num_chunks = -(-shape.hidden_size // chunk_columns) if fused else 1

    def run_pass(
        suffix: str, first: tuple[str, float], second: tuple[str, float], *, needs: str
    ) -> list[Task]:
        fetch = f"dispatch{suffix}"
        share_us = link_us / (num_sources - num_own or 1)
        tasks = [
            comm_task(f"{fetch}.{s}", share_us, needs=needs) for s in range(num_own, num_sources)
        ]
        for source in range(num_sources):
            rows_from = needs if source < num_own else f"{fetch}.{source}"
            duration_us = (expand_us + beside_us + first[1]) / num_sources
            name = f"{first[0]}{suffix}.{source}"
            tasks.append(compute_task(name, duration_us, needs=(rows_from,)))
        last = tasks[-1].name
        for chunk in range(num_chunks):
            name = f"{second[0]}{suffix}.{chunk}"
            tasks.append(compute_task(name, (second[1] + beside_us) / num_chunks, needs=(last,)))
            tasks.append(comm_task(f"combine{suffix}.{chunk}", link_us / num_chunks, needs=name))
        for chunk in range(num_chunks):
            sums = (f"combine{suffix}.{chunk}",)
            tasks.append(compute_task(f"sum{suffix}.{chunk}", sum_us / num_chunks, needs=sums))
        return tasks

    tasks = [compute_task("publish", publish_us, needs=())]
    tasks.append(compute_task("plan", plan_us, needs=("publish",)))
    tasks += run_pass("", up, down, needs="plan")
    publish_us += _NUM_BACKWARD_OPS * hardware.eager_us
    tasks.append(compute_task("publish.backward", publish_us, needs=(tasks[-1].name,)))
    tasks += run_pass(".backward", down, up, needs="publish.backward")
    last = (f"down.backward.{num_sources - 1}",)
    return tasks + [compute_task(f"{name}.weights", us, needs=last) for name, us in (down, up)]
