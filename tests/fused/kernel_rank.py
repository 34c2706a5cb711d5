"""One rank's buffers and the fused kernels on them, called as a layer calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import pytest
import torch

from halley.core.types import Routing
from halley.fused.kernels.dispatch_plan import make_plan, publish_rows
from halley.fused.kernels.launches import (
    dispatch_dgrad,
    dispatch_gemm,
    gemm_combine,
    num_dweight_columns,
)
from halley.fused.kernels.layout import EPOCH, NUM_COUNTERS, KernelContext
from halley.fused.kernels.marks import ProgramRecords, make_status
from halley.fused.kernels.peer import HOST_STATUS_WORDS, check
from halley.interpreter.scheduler import Scheduler
from halley.ops.kernels.tiles import weight_gemm
from halley.symm_mem.heap import AbstractSymmHeap
from tests.fused.kernel_case import (
    GARBAGE,
    TIMEOUT_S,
    Gradients,
    KernelCase,
    make_experts,
    make_tokens,
    share_of,
)
from tests.symm_mem.thread_heap import ThreadWorld


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Row buffers that the forward kernels write on one rank; NaN where nothing was written."""

    x_RD: torch.Tensor
    h_RF: torch.Tensor
    pre_RG: torch.Tensor
    z_RD: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RowGradients:
    """Row buffers that the backward kernels write on one rank; NaN where nothing was written."""

    weight_R: torch.Tensor
    dy_RD: torch.Tensor
    dpre_RG: torch.Tensor
    weighted_RF: torch.Tensor
    dweight_RJ: torch.Tensor
    z_RD: torch.Tensor


@dataclass(kw_only=True)
class SavedCall:
    """Tensors of a forward call that its backward needs."""

    plan: torch.Tensor
    rows: Rows
    routing: Routing


@final
class KernelRank:
    """One rank's buffers and the kernels on them; ``timeout_s`` is the time limit of waits."""

    def __init__(
        self, heap: AbstractSymmHeap, case: KernelCase, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.heap, self.rank = heap, heap.rank
        self.case, self.layout = case, case.layout()
        self.timeout_s = timeout_s
        tokens = (self.layout.max_tokens, case.hidden_size)
        self.routing_buffer = heap.zeros((self.layout.routing_words,), torch.int32)
        self.send_buffer = heap.zeros((2, *tokens), case.dtype)
        self.combine_buffer = heap.zeros((case.num_ranks, *tokens), case.dtype)
        slots = (case.num_ranks, self.layout.max_tokens, case.top_k)
        self.dweight_buffer = heap.zeros(slots, torch.float32)
        self.experts = share_of(make_experts(case), self.rank, num_ranks=case.num_ranks)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
        cpu = torch.device("cpu")
        self.records = None
        if case.max_marks:
            self.records = ProgramRecords(cpu, num_records=128, max_marks=case.max_marks)
        self.status = make_status(self.records, cpu)
        self.host_status = torch.zeros(HOST_STATUS_WORDS, dtype=torch.int64)
        self.plan = torch.empty(0, dtype=torch.int32)
        self.num_tokens = 0  # of the last call
        self.rows = self.make_rows(0)  # of the last pass

    @property
    def epoch(self) -> int:
        """Epoch of the last pass."""
        return int(self.counters[EPOCH.value])

    @property
    def sent_rows(self) -> torch.Tensor:
        """The half of the send buffer that belongs to the last pass."""
        return self.send_buffer.local[self.epoch % 2]

    @property
    def context(self) -> KernelContext:
        """Buffers and settings that all launches share."""
        return KernelContext(
            layout=self.layout, config=self.case.config, rank=self.rank,
            num_sms=self.case.config.num_programs, routing_buffer=self.routing_buffer,
            send_buffer=self.send_buffer, combine_buffer=self.combine_buffer,
            dweight_buffer=self.dweight_buffer, counters=self.counters, status=self.status,
            host_status=self.host_status, timeout_ns=int(self.timeout_s * 1e9),
        )  # fmt: skip

    def clear_buffers(self) -> None:
        """Fill the buffers that the next pass writes with NaN."""
        self.send_buffer.local[(self.epoch + 1) % 2].fill_(torch.nan)
        self.combine_buffer.local.fill_(torch.nan)
        self.dweight_buffer.local.fill_(torch.nan)

    def make_plan(self, x_TD: torch.Tensor, routing: Routing, *, max_rows: int = 0) -> int:
        """Begin the next call; return the rows of its plan."""
        self.clear_buffers()
        self.num_tokens = len(x_TD)
        self.plan = torch.full((self.layout.plan_words,), GARBAGE, dtype=torch.int32)
        make_plan(
            self.context, self.plan, x_TD=x_TD, topk_idx_TK=routing.topk_idx_TK,
            topk_weights_TK=routing.topk_weights_TK, max_rows=max_rows,
        )  # fmt: skip
        return int(self.host_status[1])

    def begin(self, *, call: int = 0) -> Rows:
        """Begin a call of the case; return buffers for the rows of its plan."""
        return self.make_rows(self.make_plan(*make_tokens(self.case, self.rank, call=call)))

    def nan(self, *shape: int) -> torch.Tensor:
        """Return a buffer of the case's dtype, filled with NaN."""
        return torch.full(shape, torch.nan, dtype=self.case.dtype)

    def make_rows(self, num_rows: int) -> Rows:
        """Return buffers of ``num_rows`` rows, at least one tile, filled with NaN."""
        num_rows = max(num_rows, self.layout.block_m)
        hidden, inner = self.case.hidden_size, self.case.intermediate_size
        self.rows = Rows(
            x_RD=self.nan(num_rows, hidden),
            h_RF=self.nan(num_rows, inner),
            pre_RG=self.nan(num_rows, self.case.num_projections * inner),
            z_RD=self.nan(num_rows, hidden),
        )
        return self.rows

    def dispatch_gemm(
        self,
        rows: Rows,
        *,
        fused: bool = True,
        save_pre: bool = True,
        copies_PD: torch.Tensor | None = None,
        copies_saved: bool = False,
    ) -> None:
        """Write ``x_RD`` and ``h_RF``, and ``pre_RG`` if it is to be saved."""
        dispatch_gemm(
            self.context, self.plan, x_RD=rows.x_RD, h_RF=rows.h_RF,
            pre_RG=rows.pre_RG if save_pre else None, up_LGD=self.experts.up_LGD,
            gated=self.case.num_projections == 2, fused=fused, copies_PD=copies_PD,
            copies_saved=copies_saved,
        )  # fmt: skip

    def gemm_combine(self, rows: Rows, *, fused: bool = True) -> torch.Tensor:
        """Return the output for this rank's tokens of the last plan."""
        y_TD = self.nan(self.num_tokens, self.case.hidden_size)
        gemm_combine(
            self.context, self.plan, y_TD=y_TD, z_RD=rows.z_RD, rows=rows.h_RF,
            weights=self.experts.down_LDF, fused=fused,
        )  # fmt: skip
        return y_TD

    def forward(self, *, call: int = 0, fused: bool = True) -> tuple[torch.Tensor, SavedCall]:
        """Run a call of the case; return its output and the tensors that its backward needs.

        A failed wait is a RuntimeError.
        """
        saved = self.dispatch(call=call, fused=fused)
        y_TD = self.gemm_combine(saved.rows, fused=fused)
        self.check()
        return y_TD, saved

    def dispatch(self, *, call: int = 0, fused: bool = True) -> SavedCall:
        """Run the part of a call that its backward needs."""
        rows = self.begin(call=call)
        self.dispatch_gemm(rows, fused=fused)
        routing = make_tokens(self.case, self.rank, call=call)[1]
        return SavedCall(plan=self.plan, rows=rows, routing=routing)

    def publish_rows(self, x_TD: torch.Tensor, weight_R: torch.Tensor | None) -> None:
        """Begin another pass with the current plan."""
        self.clear_buffers()
        publish_rows(self.context, self.plan, x_TD=x_TD, weight_R=weight_R)

    def dispatch_dgrad(
        self, dy_TD: torch.Tensor, saved: SavedCall, *, fused: bool = True
    ) -> RowGradients:
        """Begin the backward of a call: publish gradients and go back through the activation."""
        case, pre_RG = self.case, saved.rows.pre_RG
        self.plan = saved.plan
        rows = self.make_rows(len(pre_RG))
        columns = num_dweight_columns(case.intermediate_size, case.config)
        made = RowGradients(
            weight_R=torch.full((len(pre_RG),), torch.nan), dy_RD=rows.x_RD, dpre_RG=rows.pre_RG,
            weighted_RF=rows.h_RF, dweight_RJ=torch.full((len(pre_RG), columns), torch.nan),
            z_RD=rows.z_RD,
        )  # fmt: skip
        self.publish_rows(dy_TD, made.weight_R)
        dispatch_dgrad(
            self.context, self.plan, dy_RD=made.dy_RD, dpre_RG=made.dpre_RG,
            weighted_RF=made.weighted_RF, dweight_RJ=made.dweight_RJ, pre_RG=pre_RG,
            weight_R=made.weight_R, down_LDF=self.experts.down_LDF, gated=case.num_projections == 2,
            fused=fused,
        )  # fmt: skip
        return made

    def dgrad_combine(
        self, made: RowGradients, saved: SavedCall, *, fused: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's tokens and of their routing weights."""
        idx_TK = saved.routing.topk_idx_TK
        dx_TD = self.nan(len(idx_TK), self.case.hidden_size)
        dweights_TK = torch.full(idx_TK.shape, torch.nan)
        gemm_combine(
            self.context, self.plan, y_TD=dx_TD, z_RD=made.z_RD, rows=made.dpre_RG,
            weights=self.experts.up_LGD, fused=fused,
            weight_gradients=(made.dweight_RJ, idx_TK, dweights_TK),
        )  # fmt: skip
        return dx_TD, dweights_TK

    def backward(self, dy_TD: torch.Tensor, saved: SavedCall, *, fused: bool = True) -> Gradients:
        """Run the backward of a call; a failed wait is a RuntimeError."""
        made = self.dispatch_dgrad(dy_TD, saved, fused=fused)
        dx_TD, dweights_TK = self.dgrad_combine(made, saved, fused=fused)
        self.check()
        experts = self.experts
        return Gradients(
            x_TD=dx_TD,
            weights_TK=dweights_TK,
            up_LGD=self.weight_gemm(made.dpre_RG, saved.rows.x_RD, like=experts.up_LGD),
            down_LDF=self.weight_gemm(made.dy_RD, made.weighted_RF, like=experts.down_LDF),
        )

    def weight_gemm(
        self, grad_RM: torch.Tensor, rows_RN: torch.Tensor, *, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of stacked weights from both operands of its GEMM."""
        out_LMN = torch.full_like(like, torch.nan)
        weight_gemm(
            out_LMN, grad_RM, rows_RN, expert_begin=self.section("expert_begin", len(like)),
            expert_rows=self.section("expert_rows", len(like)), tile=self.case.config.weight,
            block_m=32, num_programs=self.case.config.num_programs,
        )  # fmt: skip
        return out_LMN

    def check(self) -> None:
        """Raise the failure that a kernel of this rank has reported."""
        check(self.host_status, rank=self.rank, timeout_s=self.timeout_s)

    def failure(self) -> str:
        """Return the message of the failure that a kernel of this rank has reported."""
        with pytest.raises(RuntimeError) as caught:
            self.check()
        return str(caught.value)

    def section(self, name: str, *shape: int) -> torch.Tensor:
        """Return a view of the plan's section ``name``."""
        start = getattr(self.layout, name)
        return self.plan[start : start + torch.Size(shape).numel()].view(shape)


def run_world(
    case: KernelCase,
    fn: Callable[[KernelRank], T],
    *,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    timeout_s: float = TIMEOUT_S,
) -> list[T]:
    """Call ``fn`` on every rank of a new group and return the results by rank."""
    scheduler = Scheduler(seed, resident=resident, starve=starve, max_switches=200_000)
    world = ThreadWorld(case.num_ranks, scheduler.barrier)

    def run(rank: int) -> T:
        return fn(KernelRank(world.heap(rank), case, timeout_s=timeout_s))

    return scheduler.run_ranks(case.num_ranks, run)
