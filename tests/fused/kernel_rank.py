"""One rank's memory and the kernels of one layer on it, as a layer would call them."""

from dataclasses import dataclass
from typing import final

import torch

from halley.core.types import Routing
from halley.fused.buffers import Common
from halley.fused.kernels.dispatch_gemm import dgrad_columns, dispatch_dgrad, dispatch_gemm
from halley.fused.kernels.dispatch_plan import make_plan
from halley.fused.kernels.gemm_combine import dgrad_combine, gemm_combine
from halley.fused.kernels.plan_words import EPOCH, NUM_MARKS
from halley.fused.kernels.stage import stage_again
from halley.fused.kernels.status import STATUS_WORDS, check
from halley.ops.kernels.weight_gemm import weight_gemm
from halley.symm_mem.heap import AbstractSymmHeap, SymmTensor
from tests.fused.kernel_case import (
    GARBAGE,
    TIMEOUT_S,
    Gradients,
    KernelCase,
    make_experts,
    share_of,
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the kernels of one call write on one rank besides the output; NaN before they do."""

    x_RD: torch.Tensor
    h_RF: torch.Tensor
    pre_RG: torch.Tensor
    z_RD: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RowGradients:
    """What the kernels of one backward write on one rank on the way; NaN before they do."""

    weight_R: torch.Tensor
    dy_RD: torch.Tensor
    dpre_RG: torch.Tensor
    weighted_RF: torch.Tensor
    dweight_RC: torch.Tensor
    z_RD: torch.Tensor


@dataclass(kw_only=True)
class Tape:
    """What a rank keeps of a call for its backward."""

    plan: torch.Tensor
    rows: Rows
    routing: Routing


@final
class KernelRank:
    """One rank's memory and the kernels on it, as a layer would call them.

    Args:
        heap: of this rank.
        case: the sizes.
        timeout_s: how long kernels wait.
    """

    def __init__(
        self, heap: AbstractSymmHeap, case: KernelCase, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.heap, self.rank = heap, heap.rank
        self.case, self.layout = case, case.layout()
        self.timeout_s = timeout_s
        tokens = (self.layout.max_tokens, case.hidden_size)
        self.words = heap.zeros((self.layout.mailbox_words,), torch.int32)
        self.stages = heap.zeros((2, *tokens), case.dtype)
        self.home = heap.zeros((case.num_ranks, *tokens), case.dtype)
        slots = (case.num_ranks, self.layout.max_tokens, case.top_k)
        self.weights_home = heap.zeros(slots, torch.float32)
        self.experts = share_of(make_experts(case), self.rank, num_ranks=case.num_ranks)
        self.marks = torch.zeros(NUM_MARKS, dtype=torch.int32)
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64)
        self.host_words = torch.zeros(4, dtype=torch.int64)
        self.plan = torch.empty(0, dtype=torch.int32)

    @property
    def epoch(self) -> int:
        """Number of the pass that was begun last."""
        return int(self.marks[EPOCH.value])

    @property
    def stage(self) -> torch.Tensor:
        """This rank's rows of the pass that was begun last; those before may still be fetched."""
        return self.stages.local[self.epoch % 2]

    @property
    def _common(self) -> Common:
        """What the kernels of a call have in common."""
        return {
            "layout": self.layout,
            "marks": self.marks,
            "num_programs": self.case.knobs.num_programs,
            "status": self.status,
            "host_words": self.host_words,
            "timeout_ns": int(self.timeout_s * 1e9),
        }

    def begin(self) -> None:
        """Leave nothing of the passes before where the next one writes."""
        self.stages.local[(self.epoch + 1) % 2].fill_(torch.nan)
        self.home.local.fill_(torch.nan)
        self.weights_home.local.fill_(torch.nan)

    def make_plan(self, x_TD: torch.Tensor, routing: Routing, *, max_rows: int = 0) -> int:
        """Begin the next call; return the rows of its plan."""
        self.begin()
        self.plan = torch.full((self.layout.plan_words,), GARBAGE, dtype=torch.int32)
        make_plan(
            self.plan,
            x_TD,
            routing.topk_idx_TK,
            routing.topk_weights_TK,
            rank=self.rank,
            stage_HTD=self.stages.local,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            **self._common,
            max_rows=max_rows,
        )
        return int(self.host_words[1])

    def make_rows(self, num_rows: int) -> Rows:
        """Return buffers of that many rows, at least one tile, without a number in them."""
        hidden, inner = self.case.hidden_size, self.case.intermediate_size

        def nan(columns: int) -> torch.Tensor:
            shape = (max(num_rows, self.layout.block_m), columns)
            return torch.full(shape, torch.nan, dtype=self.case.dtype)

        return Rows(
            x_RD=nan(hidden),
            h_RF=nan(inner),
            pre_RG=nan(self.case.num_parts * inner),
            z_RD=nan(hidden),
        )

    def make_sends(self) -> torch.Tensor:
        """Return a buffer for what the plan last made fetches, without a number in it."""
        shape = (int(self.host_words[3]), self.case.hidden_size)
        return torch.full(shape, torch.nan, dtype=self.case.dtype)

    def dispatch_gemm(
        self,
        rows: Rows,
        *,
        fused: bool = True,
        keep: bool = True,
        sends_SD: torch.Tensor | None = None,
        sends_kept: bool = False,
    ) -> None:
        """Fill ``x_RD`` and ``h_RF``, and ``pre_RG`` if it is to be kept."""
        dispatch_gemm(
            rows.x_RD,
            rows.h_RF,
            rows.pre_RG if keep else None,
            stage_ptrs_W=self.stages.ptrs_W,
            stage_tokens=self.stages.local.shape[1],
            plan=self.plan,
            up_LGD=self.experts.up_LGD,
            gated=self.case.num_parts == 2,
            knobs=self.case.knobs,
            **self._common,
            fused=fused,
            sends_SD=sends_SD,
            sends_kept=sends_kept,
        )

    def gemm_combine(self, rows: Rows, num_tokens: int, *, fused: bool = True) -> torch.Tensor:
        """Return the output for this rank's tokens."""
        shape = (num_tokens, self.case.hidden_size)
        y_TD = torch.full(shape, torch.nan, dtype=self.case.dtype)
        gemm_combine(
            y_TD,
            rows.z_RD,
            rows.h_RF,
            plan=self.plan,
            down_LDF=self.experts.down_LDF,
            home_WTD=self.home.local,
            home_ptrs_W=self.home.ptrs_W,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            rank=self.rank,
            knobs=self.case.knobs,
            **self._common,
            fused=fused,
        )
        return y_TD

    def forward(self, x_TD: torch.Tensor, routing: Routing, *, fused: bool = True) -> torch.Tensor:
        """Run one whole call and return its output; a failed wait is a RuntimeError."""
        rows = self.make_rows(self.make_plan(x_TD, routing))
        self.dispatch_gemm(rows, fused=fused)
        y_TD = self.gemm_combine(rows, len(x_TD), fused=fused)
        self.check()
        return y_TD

    def forward_to_train(
        self, x_TD: torch.Tensor, routing: Routing, *, fused: bool = True
    ) -> tuple[torch.Tensor, Tape]:
        """Run one whole call and return its output and what its backward needs."""
        rows = self.make_rows(self.make_plan(x_TD, routing))
        self.dispatch_gemm(rows, fused=fused)
        y_TD = self.gemm_combine(rows, len(x_TD), fused=fused)
        self.check()
        return y_TD, Tape(plan=self.plan, rows=rows, routing=routing)

    def stage_again(self, x_TD: torch.Tensor, weight_R: torch.Tensor | None) -> None:
        """Begin another pass with the plan that there is."""
        self.begin()
        stage_again(
            x_TD,
            weight_R,
            plan=self.plan,
            rank=self.rank,
            stage_HTD=self.stages.local,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            **self._common,
        )

    def dispatch_dgrad(
        self, dy_TD: torch.Tensor, tape: Tape, *, fused: bool = True
    ) -> RowGradients:
        """Begin the backward of a call: stage gradients and bring them back through ``h``."""
        case, knobs, pre_RG = self.case, self.case.knobs, tape.rows.pre_RG
        self.plan = tape.plan
        rows = self.make_rows(len(pre_RG))
        columns = dgrad_columns(case.intermediate_size, knobs)
        made = RowGradients(
            weight_R=torch.full((len(pre_RG),), torch.nan),
            dy_RD=rows.x_RD,
            dpre_RG=rows.pre_RG,
            weighted_RF=rows.h_RF,
            dweight_RC=torch.full((len(pre_RG), columns), torch.nan),
            z_RD=rows.z_RD,
        )
        self.stage_again(dy_TD, made.weight_R)
        dispatch_dgrad(
            made.dy_RD,
            made.dpre_RG,
            made.weighted_RF,
            made.dweight_RC,
            pre_RG=pre_RG,
            weight_R=made.weight_R,
            stage_ptrs_W=self.stages.ptrs_W,
            stage_tokens=self.stages.local.shape[1],
            plan=self.plan,
            down_LDF=self.experts.down_LDF,
            gated=case.num_parts == 2,
            knobs=knobs,
            **self._common,
            fused=fused,
        )
        return made

    def dgrad_combine(
        self, made: RowGradients, tape: Tape, *, fused: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's tokens and of their routing weights."""
        idx_TK = tape.routing.topk_idx_TK
        shape = (len(idx_TK), self.case.hidden_size)
        dx_TD = torch.full(shape, torch.nan, dtype=self.case.dtype)
        dweights_TK = torch.full(idx_TK.shape, torch.nan)
        dgrad_combine(
            dx_TD,
            dweights_TK,
            made.z_RD,
            made.dpre_RG,
            made.dweight_RC,
            plan=self.plan,
            up_LGD=self.experts.up_LGD,
            topk_idx_TK=idx_TK,
            home_WTD=self.home.local,
            home_ptrs_W=self.home.ptrs_W,
            weights_home_WTK=self.weights_home.local,
            weights_home_ptrs_W=self.weights_home.ptrs_W,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            rank=self.rank,
            knobs=self.case.knobs,
            **self._common,
            fused=fused,
        )
        return dx_TD, dweights_TK

    def backward(self, dy_TD: torch.Tensor, tape: Tape, *, fused: bool = True) -> Gradients:
        """Run the backward of a call; a failed wait is a RuntimeError."""
        made = self.dispatch_dgrad(dy_TD, tape, fused=fused)
        dx_TD, dweights_TK = self.dgrad_combine(made, tape, fused=fused)
        self.check()
        experts = self.experts
        return Gradients(
            x_TD=dx_TD,
            weights_TK=dweights_TK,
            up_LGD=self.weight_gemm(made.dpre_RG, tape.rows.x_RD, like=experts.up_LGD),
            down_LDF=self.weight_gemm(made.dy_RD, made.weighted_RF, like=experts.down_LDF),
        )

    def weight_gemm(
        self, grad_RM: torch.Tensor, rows_RN: torch.Tensor, *, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of stacked weights from both sides of their product."""
        out_LMN = torch.full_like(like, torch.nan)
        weight_gemm(
            out_LMN,
            grad_RM,
            rows_RN,
            expert_begin=self.section("expert_begin", len(like)),
            expert_rows=self.section("expert_rows", len(like)),
            tile=self.case.knobs.weight,
            block_m=32,
            num_programs=self.case.knobs.num_programs,
        )
        return out_LMN

    def check(self) -> None:
        """Raise what a kernel of this rank has written down."""
        check(self.host_words, rank=self.rank, timeout_s=self.timeout_s)

    def section(self, name: str, *shape: int) -> torch.Tensor:
        """Return words of the plan, from the offset of that name in the layout."""
        start = getattr(self.layout, name)
        return self.plan[start : start + torch.Size(shape).numel()].view(shape)


def borrow(tensor: SymmTensor, like: SymmTensor) -> SymmTensor:
    """Return the beginning of a symmetric tensor in the shape of another."""
    start = tensor.local.view(-1)[: like.local.numel()]
    return SymmTensor(local=start.view(like.local.shape), ptrs_W=tensor.ptrs_W)
