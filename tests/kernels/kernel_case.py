"""The kernels of one layer on ranks that are threads: memory, calls, and what must come out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

import torch

from halley.core.reference import moe_reference
from halley.core.skew import parse_load, sample_routing
from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.core.types import DROPPED, Activation, Experts, Routing
from halley.kernels.dispatch_gemm import dgrad_columns, dispatch_dgrad, dispatch_gemm
from halley.kernels.gemm_combine import dgrad_combine, gemm_combine
from halley.kernels.interpreter import sanitizer
from halley.kernels.interpreter.scheduler import Scheduler
from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.layout import Layout
from halley.kernels.plan import make_plan
from halley.kernels.plan_words import EPOCH, NUM_MARKS
from halley.kernels.stage import stage_again
from halley.kernels.status import STATUS_WORDS, check
from halley.kernels.weight_gemm import weight_gemm
from halley.symm.heap import AbstractSymmHeap, SymmTensor
from halley.symm.threads import ThreadWorld


T = TypeVar("T")

TIMEOUT_S = 60.0
GARBAGE = -858993460  # what a plan holds before it is made

# The interpreter takes as long for a small tensor as for a large one: tasks are few and large.
SMALL_KNOBS = Knobs(
    num_programs=4,
    block_m=16,
    up=GemmTile(block_n=32, block_k=32, group=2, num_warps=4, num_stages=1),
    down=GemmTile(block_n=32, block_k=32, group=2, num_warps=4, num_stages=1),
    down_grad=GemmTile(block_n=32, block_k=32, group=2, num_warps=4, num_stages=1),
    up_grad=GemmTile(block_n=32, block_k=32, group=2, num_warps=4, num_stages=1),
    weight=GemmTile(block_n=32, block_k=16, group=2, num_warps=4, num_stages=1),
    num_fetchers=2,
    fetch_elements=512,
    num_combiners=2,
    combine_rows=64,
    combine_stages=2,
    chunk_columns=32,
    home_rows=16,
)


def in_one_launch(knobs: Knobs) -> Knobs:
    """Return knobs with which programs multiply and move rows by turns."""
    tiles = {
        name: replace(getattr(knobs, name), beside=0)
        for name in ("up", "down", "down_grad", "up_grad")
    }
    return replace(knobs, **tiles)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """Sizes of one layer and of the calls of it.

    Attributes:
        num_tokens_CW: tokens of each rank, a tuple a call.
        load: as for ``parse_load``, or "empty-expert": nobody picks the last expert.
        dropped: part of the slots that a router dropped.
        max_tokens: of the layout; the most tokens of a call unless given.
    """

    num_tokens_CW: tuple[tuple[int, ...], ...] = ((20, 13),)
    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 40
    intermediate_size: int = 24
    load: str = "balanced"
    dropped: float = 0.0
    activation: Activation = "swiglu"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    max_tokens: int = 0
    block_slots: int = 32
    knobs: Knobs = field(default=SMALL_KNOBS)

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens_CW[0])

    @property
    def num_parts(self) -> int:
        """Projections that the activation is made of."""
        return 2 if self.activation == "swiglu" else 1

    def layout(self) -> Layout:
        """Return the layout that all ranks share."""
        return Layout(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens or max(map(max, self.num_tokens_CW)),
            block_m=self.knobs.block_m,
            block_slots=self.block_slots,
        )


def make_experts(case: KernelCase) -> Experts:
    """Return all experts of the case."""
    generator = torch.Generator().manual_seed(case.seed)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(case.num_experts, *shape, generator=generator)
        return (values * shape[-1] ** -0.5).to(case.dtype)

    hidden, inner = case.hidden_size, case.intermediate_size
    return Experts(
        up_LGD=weight(case.num_parts * inner, hidden),
        down_LDF=weight(hidden, inner),
        activation=case.activation,
    )


def share_of(experts: Experts, rank: int, *, num_ranks: int) -> Experts:
    """Return the experts that live on a rank."""
    return experts.split([experts.num_local_experts // num_ranks] * num_ranks)[rank]


def make_tokens(case: KernelCase, rank: int, *, call: int = 0) -> tuple[torch.Tensor, Routing]:
    """Return a rank's tokens and their routing in one call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * call + rank + 1)
    num_tokens = case.num_tokens_CW[call][rank]
    x_TD = torch.randn(num_tokens, case.hidden_size, generator=generator).to(case.dtype)
    num_loaded = case.num_experts - (case.load == "empty-expert")
    load = "balanced" if case.load == "empty-expert" else case.load
    load_E = parse_load(load, num_experts=num_loaded, top_k=case.top_k)
    routing = sample_routing(load_E, num_tokens, top_k=case.top_k, generator=generator)
    if not case.dropped:
        return x_TD, routing
    dropped_TK = torch.rand(num_tokens, case.top_k, generator=generator) < case.dropped
    return x_TD, Routing(
        topk_idx_TK=routing.topk_idx_TK.masked_fill(dropped_TK, DROPPED),
        topk_weights_TK=routing.topk_weights_TK.masked_fill(dropped_TK, 0.0),
    )


def expected_outputs(case: KernelCase) -> list[list[torch.Tensor]]:
    """Return by rank what the reference gives for its tokens, a tensor a call."""
    experts = make_experts(case)
    return [
        [
            moe_reference(*make_tokens(case, rank, call=call), experts)
            for call in range(len(case.num_tokens_CW))
        ]
        for rank in range(case.num_ranks)
    ]


def assert_close(value: torch.Tensor, reference: torch.Tensor, what: str = "") -> None:
    """Compare with the reference, by the tolerance of the value's dtype."""
    error = relative_error(value, reference)
    assert error <= RELATIVE_TOLERANCE[value.dtype], f"{what}: relative error {error:.3g}"


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


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What comes out of one rank's backward."""

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    up_LGD: torch.Tensor
    down_LDF: torch.Tensor


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
            layout=self.layout,
            stage_HTD=self.stages.local,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            marks=self.marks,
            num_programs=self.case.knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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
            marks=self.marks,
            plan=self.plan,
            up_LGD=self.experts.up_LGD,
            gated=self.case.num_parts == 2,
            layout=self.layout,
            knobs=self.case.knobs,
            num_programs=self.case.knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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
            marks=self.marks,
            rank=self.rank,
            layout=self.layout,
            knobs=self.case.knobs,
            num_programs=self.case.knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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
            layout=self.layout,
            stage_HTD=self.stages.local,
            words=self.words.local,
            words_ptrs_W=self.words.ptrs_W,
            marks=self.marks,
            num_programs=self.case.knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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
            marks=self.marks,
            plan=self.plan,
            down_LDF=self.experts.down_LDF,
            gated=case.num_parts == 2,
            layout=self.layout,
            knobs=knobs,
            num_programs=knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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
            marks=self.marks,
            rank=self.rank,
            layout=self.layout,
            knobs=self.case.knobs,
            num_programs=self.case.knobs.num_programs,
            status=self.status,
            host_words=self.host_words,
            timeout_ns=int(self.timeout_s * 1e9),
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


def run_world(
    case: KernelCase,
    fn: Callable[[KernelRank], T],
    *,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    max_switches: int = 200_000,
) -> list[T]:
    """Call ``fn`` on every rank of a world of its own and return the results by rank."""
    scheduler = Scheduler(seed, resident=resident, starve=starve, max_switches=max_switches)
    mapped: list[int] = []

    def on_map(address: int, num_bytes: int) -> None:
        sanitizer.register(address, num_bytes)
        mapped.append(address)

    world = ThreadWorld(case.num_ranks, scheduler.barrier(), on_map=on_map)

    def run(rank: int) -> T:
        return fn(KernelRank(world.heap(rank), case, timeout_s=timeout_s))

    try:
        return scheduler.run_ranks(case.num_ranks, run)
    finally:
        # Not by closing the heaps: a rank that failed would not come to their barrier.
        for address in mapped:
            sanitizer.unregister(address)


def borrow(tensor: SymmTensor, like: SymmTensor) -> SymmTensor:
    """Return the beginning of a symmetric tensor in the shape of another."""
    start = tensor.local.view(-1)[: like.local.numel()]
    return SymmTensor(local=start.view(like.local.shape), ptrs_W=tensor.ptrs_W)


def make_dy(case: KernelCase, rank: int, *, call: int = 0) -> torch.Tensor:
    """Return a gradient of a rank's output in one call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * call + rank + 501)
    shape = (case.num_tokens_CW[call][rank], case.hidden_size)
    return torch.randn(shape, generator=generator).to(case.dtype)


def expected_gradients(
    case: KernelCase,
    *,
    call: int = 0,
    tokens: Callable[..., tuple[torch.Tensor, Routing]] = make_tokens,
) -> list[Gradients]:
    """Return by rank what autograd makes of the reference in float64."""
    experts = make_experts(case)
    up, down = (w.double().requires_grad_() for w in (experts.up_LGD, experts.down_LDF))
    experts = replace(experts, up_LGD=up, down_LDF=down)
    leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rank in range(case.num_ranks):
        x_TD, routing = tokens(case, rank, call=call)
        x_TD = x_TD.double().requires_grad_()
        weights_TK = routing.topk_weights_TK.double().requires_grad_()
        y_TD = moe_reference(x_TD, replace(routing, topk_weights_TK=weights_TK), experts)
        y_TD.backward(make_dy(case, rank, call=call).double())
        leaves.append((x_TD, weights_TK))
    assert up.grad is not None
    assert down.grad is not None
    ups, downs = up.grad.chunk(case.num_ranks), down.grad.chunk(case.num_ranks)
    return [
        Gradients(x_TD=x.grad, weights_TK=w.grad, up_LGD=ups[rank], down_LDF=downs[rank])
        for rank, (x, w) in enumerate(leaves)
        if x.grad is not None and w.grad is not None
    ]


def run_forward(
    case: KernelCase,
    *,
    fused: bool = True,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    timeout_s: float = TIMEOUT_S,
) -> list[list[torch.Tensor]]:
    """Run all calls of the case on one heap, one after another; return outputs by rank and call."""

    def run(rank: KernelRank) -> list[torch.Tensor]:
        return [
            rank.forward(*make_tokens(case, rank.rank, call=call), fused=fused)
            for call in range(len(case.num_tokens_CW))
        ]

    return run_world(case, run, seed=seed, resident=resident, starve=starve, timeout_s=timeout_s)
