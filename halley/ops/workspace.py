"""What fused layers of a shape share: symmetric buffers, scratch, and what the device told."""

from dataclasses import dataclass
from typing import TypedDict, final

import torch

from halley.kernels.knobs import Knobs
from halley.kernels.layout import Layout
from halley.kernels.plan_words import NUM_MARKS
from halley.kernels.status import check
from halley.symm.heap import AbstractSymmHeap, Signals, SymmTensor


_CPU_BLOCK_SLOTS = 64
_FAILURE, _ROWS, _WANTED_TOKENS, _SENDS = range(4)  # words of host_words, see kernels.status
_ROOM = 1.25  # how much more than was asked for a buffer gets when it grows
_TOKEN_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class ShapeClass:
    """The sizes that decide which layers can share buffers; the same on all ranks."""

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    tp_size: int = 1


class Common(TypedDict):
    """The arguments that all kernels take but the first."""

    layout: Layout
    status: torch.Tensor
    host_words: torch.Tensor
    timeout_ns: int


@dataclass(frozen=True, kw_only=True)
class PlanSize:
    """What the host must know of a plan.

    Attributes:
        num_rows: rows, in whole tiles.
        num_sends: tokens that come over the link or from this rank, with what pads them to tasks.
        wanted_tokens: the most tokens of a rank if no layout has room for them, else 0.
    """

    num_rows: int
    num_sends: int
    wanted_tokens: int


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    layout: Layout
    signals: Signals
    stages: tuple[SymmTensor, SymmTensor]
    home: SymmTensor
    weights_home: SymmTensor
    marks: torch.Tensor

    def symmetric(self) -> list[SymmTensor]:
        return [self.signals.words, *self.stages, self.home, self.weights_home]


@final
class Workspace:
    """Everything of one shape class that the layers of a process share.

    Calls take turns: each begins with ``begin``, on all ranks alike, and the stream orders what
    they do with the scratch.

    Args:
        shape: the class.
        heap: where the symmetric buffers come from.
        knobs: of the kernels.
        max_tokens: the most tokens that a rank brings, the same on all ranks.
        timeout_s: how long a kernel waits for a peer.

    Attributes:
        status: int64, zero as long as no wait has failed.
        host_words: what the kernels tell the host, see ``kernels.status``.
        rows_RD: scratch: rows on their way into the first projection, then out of the second.
        epoch: number of the call that was begun last.
    """

    def __init__(
        self,
        shape: ShapeClass,
        *,
        heap: AbstractSymmHeap,
        knobs: Knobs,
        max_tokens: int,
        timeout_s: float,
    ) -> None:
        device = heap.device
        self.shape, self.heap, self.knobs, self.timeout_s = shape, heap, knobs, timeout_s
        self.num_programs = knobs.num_programs
        if self.num_programs == 0:
            self.num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        with torch.inference_mode(mode=False):
            self.status = torch.zeros(1, dtype=torch.int64, device=device)
            on_gpu = device.type == "cuda"
            self.host_words = torch.zeros(4, dtype=torch.int64, pin_memory=on_gpu)
        self._told = self.host_words.numpy()  # the same memory, read in a fraction of the time
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._plan_made = torch.cuda.Event() if on_gpu else None
        self._layouts: dict[int, Layout] = {}
        self.epoch = 0
        self._buffers = self._allocate(max_tokens)
        slots = max_tokens * shape.top_k
        self.rows_RD = self._make_rows(int(_ROOM * slots) + knobs.block_m * self.layout.num_local)

    @property
    def layout(self) -> Layout:
        """Offsets of the mailbox and of plans; another one after ``grow``."""
        return self._buffers.layout

    @property
    def words(self) -> SymmTensor:
        """The mailbox."""
        return self._buffers.signals.words

    @property
    def stage(self) -> SymmTensor:
        """Rows of each rank's tokens, which the others fetch in this pass, ``(max_tokens, D)``.

        Two of them serve passes in turn: a pass may begin while a peer fetches rows of the last.
        """
        return self._buffers.stages[self.epoch % 2]

    @property
    def home(self) -> SymmTensor:
        """The sums that ranks send to each rank, ``(W, max_tokens, D)``."""
        return self._buffers.home

    @property
    def weights_home(self) -> SymmTensor:
        """The gradients of routing weights that ranks send, ``(W, max_tokens, K)``, float32."""
        return self._buffers.weights_home

    @property
    def marks(self) -> torch.Tensor:
        """How far the making of a plan has come; goes by epochs, as the mailbox does."""
        return self._buffers.marks

    @property
    def common(self) -> Common:
        """What the kernels of a call have in common."""
        return {
            "layout": self._buffers.layout,
            "status": self.status,
            "host_words": self.host_words,
            "timeout_ns": int(self.timeout_s * 1e9),
        }

    @property
    def capacity(self) -> int:
        """Rows of the scratch."""
        return self.rows_RD.shape[0]

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of this rank that its peers address."""
        return sum(tensor.local.nbytes for tensor in self._buffers.symmetric())

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's own device memory."""
        return sum(t.nbytes for t in (self.rows_RD, self.marks, self.status))

    def begin(self) -> None:
        """Begin a call.

        Raises:
            RuntimeError: an earlier wait failed; nothing works until all ranks made a new one.
        """
        self.check()
        if self._stream is not None:
            stream = torch.cuda.current_stream(self.heap.device)
            if stream != self._stream:  # the scratch may still be in use there
                stream.wait_stream(self._stream)
                self._stream = stream
        self.epoch = self._buffers.signals.next_epoch()

    def check(self) -> None:
        """Raise what a kernel that has run wrote down; does not wait for those that have not.

        Raises:
            RuntimeError: a wait of this rank failed: names rank, peer and operation. Raised by
                every later call too, as nobody clears it: the ranks are no longer in step.
        """
        if self._told[_FAILURE]:
            check(self.host_words, rank=self.heap.rank, timeout_s=self.timeout_s)

    def mark_plan(self) -> None:
        """Note that all work up to here makes the plan."""
        if self._plan_made is not None:
            self._plan_made.record()

    def read_plan(self) -> PlanSize:
        """Return the size of the plan last made.

        Waits for ``mark_plan``, and for nothing that came after it.

        Raises:
            RuntimeError: a peer did not publish.
        """
        if self._plan_made is not None:
            self._plan_made.synchronize()
        self.check()
        return PlanSize(
            num_rows=int(self._told[_ROWS]),
            num_sends=int(self._told[_SENDS]),
            wanted_tokens=int(self._told[_WANTED_TOKENS]),
        )

    def layout_of(self, plan: torch.Tensor) -> Layout:
        """Return the layout that a plan was made with, by its length."""
        return self._layouts[plan.shape[0]]

    def made(self, plan: torch.Tensor) -> bool:
        """Return whether plans of this length are this workspace's."""
        return plan.shape[0] in self._layouts

    def grow(self, num_tokens: int) -> None:
        """Make room for more tokens a rank. Collective.

        Raises:
            MemoryError: a rank has too little memory. Raised on all ranks, which keep what they
                have and may go on with fewer tokens.
        """
        old, self._buffers = self._buffers, self._allocate(roomy_tokens(num_tokens))
        self._free(*old.symmetric())

    def reserve(self, num_rows: int) -> None:
        """Make room for more rows; this rank's own affair."""
        most = self.layout.max_tiles * self.knobs.block_m
        self.rows_RD = self._make_rows(max(num_rows, min(int(_ROOM * num_rows), most)))

    def _make_rows(self, num_rows: int) -> torch.Tensor:
        block = self.knobs.block_m
        shape = (-(-num_rows // block) * block, self.shape.hidden_size)
        return torch.empty(shape, dtype=self.shape.dtype, device=self.heap.device)

    def _allocate(self, max_tokens: int) -> _Buffers:
        shape, num_ranks = self.shape, self.heap.num_ranks
        sizes = {"block_slots": _CPU_BLOCK_SLOTS} if self.heap.device.type == "cpu" else {}
        layout = Layout(
            num_ranks=num_ranks,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            tp_size=shape.tp_size,
            max_tokens=max_tokens,
            block_m=self.knobs.block_m,
            **sizes,
        )
        made: list[SymmTensor] = []
        try:
            signals = self.heap.signals(layout.mailbox_words, epoch=self.epoch)
            made.append(signals.words)
            for rows in ((max_tokens,), (max_tokens,), (num_ranks, max_tokens)):
                made.append(self.heap.zeros((*rows, shape.hidden_size), shape.dtype))
            slots = (num_ranks, max_tokens, shape.top_k)
            made.append(self.heap.zeros(slots, torch.float32))
        except MemoryError:
            self._free(*made)
            raise
        with torch.inference_mode(mode=False):
            marks = torch.zeros(NUM_MARKS, dtype=torch.int32, device=self.heap.device)
        _, stage, other_stage, home, weights_home = made
        self._layouts[layout.plan_words] = layout
        return _Buffers(
            layout=layout,
            signals=signals,
            stages=(stage, other_stage),
            home=home,
            weights_home=weights_home,
            marks=marks,
        )

    def _free(self, *tensors: SymmTensor) -> None:
        for tensor in tensors:
            self.heap.free(tensor)


def roomy_tokens(num_tokens: int) -> int:
    """Return for how many tokens room is made where that many need it."""
    return -(-int(_ROOM * num_tokens) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
