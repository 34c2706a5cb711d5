"""What fused layers of a shape share: symmetric buffers, scratch, and what the device told."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypedDict, final

import torch

from halley.core.position import POSITION
from halley.fused.kernels.layout import TASK_ROWS, Layout
from halley.fused.kernels.plan_words import EPOCH, NUM_MARKS
from halley.fused.kernels.status import STATUS_WORDS, check
from halley.ops.kernels.driver import current_stream
from halley.ops.kernels.gemm_config import Knobs
from halley.ops.kernels.replay import Tape
from halley.symm_mem.heap import AbstractSymmHeap, SymmTensor


_CPU_BLOCK_SLOTS = 64
_FAILURE, _ROWS, _WANTED_TOKENS, _SENDS = range(4)  # words of host_words, see kernels.status
_EXPECTED_MARGIN = 64  # the part of a plan by which the next may have more rows
_ROOM = 1.25  # how much more than was asked for a buffer gets when it grows
_TOKEN_MULTIPLE = 64
_MOST_LAYERS = 1024  # whose last plans are remembered


class ShapeClass(NamedTuple):
    """The sizes that decide which layers can share buffers; the same on all ranks."""

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    tp_size: int = 1


class Stages(TypedDict):
    """Where rows of each rank's tokens stand, which the others fetch."""

    stage_ptrs_W: torch.Tensor
    stage_tokens: int


class Common(TypedDict):
    """The arguments that all kernels take but the first."""

    layout: Layout
    marks: torch.Tensor
    num_programs: int
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


@dataclass
class _Mark:
    """Records an event on a stream, if there is one; torch takes 20 us to find the stream."""

    event: torch.cuda.Event | None
    stream: torch.cuda.Stream | None

    def __call__(self) -> None:
        if self.event is not None:
            self.event.record(self.stream)


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    layout: Layout
    words: SymmTensor
    stage: SymmTensor
    home: SymmTensor
    weights_home: SymmTensor

    def symmetric(self) -> list[SymmTensor]:
        return [self.words, self.stage, self.home, self.weights_home]


@final
class Workspace:
    """Everything of one shape class that the layers of a process share.

    Calls take turns: each begins with ``begin``, on all ranks alike, and the stream orders what
    they do with the scratch.

    Args:
        shape: the class.
        heap: where the symmetric buffers come from.
        knobs: of the kernels.
        max_tokens: the most tokens that a rank brings, the same on all ranks; more make it grow.
        max_load: 0, or for how many times the rows of a balanced load there is room: then no call
            asks the device how many rows it has, and more are a failure.
        timeout_s: how long a kernel waits for a peer.

    Attributes:
        status: see ``kernels.status``.
        marks: how far the making of a plan has come, and how many passes there were.
        max_rows: rows of any call, if the host does not ask for its own; else 0.
        host_words: what the kernels tell the host, see ``kernels.status``.
        in_flight: tensors of a launch beside which the next may run, kept until that has ended.
        rows_RD: scratch: rows on their way into the first projection, then out of the second.
        mark_plan: notes that all work queued up to now makes the plan.
        tapes: of passes that were run, by what they depend on; see ``ops.passes``.
        compiled: the kinds of layers whose kernels are compiled.
    """

    def __init__(
        self,
        shape: ShapeClass,
        *,
        heap: AbstractSymmHeap,
        knobs: Knobs,
        max_tokens: int,
        timeout_s: float,
        max_load: float = 0.0,
    ) -> None:
        device = heap.device
        self.shape, self.heap, self.knobs, self.timeout_s = shape, heap, knobs, timeout_s
        self.num_programs = knobs.num_programs
        if self.num_programs == 0:
            self.num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        with torch.inference_mode(mode=False):
            self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device)
            self.marks = torch.zeros(NUM_MARKS, dtype=torch.int32, device=device)
            on_gpu = device.type == "cuda"
            self.host_words = torch.zeros(4, dtype=torch.int64, pin_memory=on_gpu)
        self._told = self.host_words.numpy()  # the same memory, read in a fraction of the time
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._plan_made = torch.cuda.Event() if on_gpu else None
        self._layouts: dict[int, Layout] = {}
        self._last = PlanSize(num_rows=0, num_sends=0, wanted_tokens=0)
        self._last_of: dict[int, PlanSize] = {}
        self.tapes: dict[tuple[object, ...], Tape] = {}
        self.compiled: set[tuple[object, ...]] = set()
        self.in_flight: tuple[torch.Tensor, ...] = ()
        self._buffers = self._allocate(max_tokens)
        balanced = max_tokens * shape.top_k * shape.tp_size
        room = int((max_load or _ROOM) * balanced) + knobs.block_m * self.layout.num_local
        room = min(room, self.layout.max_tiles * knobs.block_m)
        num_bytes = room * shape.hidden_size * shape.dtype.itemsize
        try:
            self.rows_RD = heap.on_all_ranks(num_bytes, partial(self._make_rows, room))
        except MemoryError:
            self._free(*self._buffers.symmetric())
            raise
        self.max_rows = self.capacity if max_load else 0
        self.mark_plan = _Mark(None if self.max_rows else self._plan_made, self._stream)

    @property
    def layout(self) -> Layout:
        """Offsets of the mailbox and of plans; another one after ``grow``."""
        return self._buffers.layout

    @property
    def words(self) -> SymmTensor:
        """The mailbox."""
        return self._buffers.words

    @property
    def stage(self) -> SymmTensor:
        """Rows of each rank's tokens, which the others fetch, ``(2, max_tokens, D)``.

        The halves serve passes in turn: a pass may begin while a peer fetches rows of the last.
        """
        return self._buffers.stage

    @property
    def stages(self) -> Stages:
        """What kernels that fetch must know of the stage."""
        stage = self._buffers.stage
        return {"stage_ptrs_W": stage.ptrs_W, "stage_tokens": stage.local.shape[1]}

    @property
    def epoch(self) -> int:
        """Number of the pass that was begun last; waits for the device."""
        return int(self.marks[EPOCH.value])

    @property
    def home(self) -> SymmTensor:
        """The sums that ranks send to each rank, ``(W, max_tokens, D)``."""
        return self._buffers.home

    @property
    def weights_home(self) -> SymmTensor:
        """The gradients of routing weights that ranks send, ``(W, max_tokens, K)``, float32."""
        return self._buffers.weights_home

    @property
    def common(self) -> Common:
        """What the kernels of a call have in common."""
        return {
            "layout": self._buffers.layout,
            "marks": self.marks,
            "num_programs": self.num_programs,
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

    def begin(self) -> None:
        """Begin a call.

        Raises:
            RuntimeError: an earlier wait failed; nothing works until all ranks made a new one.
        """
        self.check()
        POSITION.begin("a pass of a fused layer")
        self.in_flight = ()
        if self._stream is None:
            return
        device = self.heap.device
        if current_stream(device.index) != self._stream.cuda_stream:
            stream = torch.cuda.current_stream(device)
            # The scratch may still be in use there. A graph is put in order by who replays it.
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
                self._stream = self.mark_plan.stream = stream

    def lasting(self) -> list[torch.Tensor]:
        """Return all tensors of the workspace; they stay until it grows."""
        symmetric = self._buffers.symmetric()
        shared = [part for each in symmetric for part in (each.local, each.ptrs_W)]
        return [self.status, self.marks, self.host_words, self.rows_RD, *shared]

    def check(self) -> None:
        """Raise what a kernel that has run wrote down; does not wait for those that have not.

        Raises:
            RuntimeError: a wait of this rank failed: names rank, peer and operation. Raised by
                every later call too, as nobody clears it: the ranks are no longer in step.
        """
        if self._told[_FAILURE]:
            check(self.host_words, rank=self.heap.rank, timeout_s=self.timeout_s)

    def read_plan(self, layer: int = 0) -> PlanSize:
        """Return the size of the plan last made, or with ``max_rows`` what any plan has at most.

        Waits for ``mark_plan``, and for nothing that came after it; not at all with ``max_rows``.

        Args:
            layer: by which its size is found again, see ``expect``.

        Raises:
            RuntimeError: a peer did not publish, or a CUDA graph is captured that would read.
        """
        if self.max_rows:
            self.check()  # on a CPU the plan is made by now
            return self.expect(layer)
        if self._plan_made is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph of strategy fused needs max_load: without, the host reads how "
                    "many rows each call has"
                )
            with POSITION.waiting("the plan of a fused layer"):
                self._plan_made.synchronize()
        self.check()
        size = PlanSize(
            num_rows=int(self._told[_ROWS]),
            num_sends=int(self._told[_SENDS]),
            wanted_tokens=int(self._told[_WANTED_TOKENS]),
        )
        if not size.wanted_tokens:
            if len(self._last_of) == _MOST_LAYERS:
                self._last_of.clear()
            self._last = self._last_of[layer] = size
        return size

    def expect(self, layer: int = 0) -> PlanSize:
        """Return a size that is likely to be enough for a layer's next plan, 0 rows if unknown.

        A little more than its last, or where that is not known, the last of any layer. Who makes
        tensors of that many rows need not wait for ``read_plan``, only look whether they were
        enough.

        Args:
            layer: a number that tells layers apart, such as the address of its weights.
        """
        if self.max_rows:
            num_sends = min(self.max_rows + 2 * TASK_ROWS, self.layout.max_sends)
            return PlanSize(num_rows=self.max_rows, num_sends=num_sends, wanted_tokens=0)
        last = self._last_of.get(layer, self._last)
        return PlanSize(
            num_rows=rows_with_margin(last.num_rows, block_m=self.knobs.block_m),
            num_sends=rows_with_margin(last.num_sends, block_m=TASK_ROWS),
            wanted_tokens=0,
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
        self.tapes.clear()
        self._free(*old.symmetric())

    def reserve(self, num_rows: int) -> None:
        """Make room for more rows; this rank's own affair."""
        most = self.layout.max_tiles * self.knobs.block_m
        self.rows_RD = self._make_rows(max(num_rows, min(int(_ROOM * num_rows), most)))
        self.tapes.clear()

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
            # Kernels are compiled for a layout: so for few, and again only for twice the tokens.
            max_tokens=1 << (max_tokens - 1).bit_length(),
            block_m=self.knobs.block_m,
            **sizes,
        )
        made: list[SymmTensor] = []
        try:
            made.append(self.heap.zeros((layout.mailbox_words,), torch.int32))
            for copies in (2, num_ranks):
                rows = (copies, max_tokens, shape.hidden_size)
                made.append(self.heap.zeros(rows, shape.dtype))
            slots = (num_ranks, max_tokens, shape.top_k)
            made.append(self.heap.zeros(slots, torch.float32))
        except MemoryError:
            self._free(*made)
            raise
        words, stage, home, weights_home = made
        self._layouts[layout.plan_words] = layout
        return _Buffers(
            layout=layout,
            words=words,
            stage=stage,
            home=home,
            weights_home=weights_home,
        )

    def _free(self, *tensors: SymmTensor) -> None:
        for tensor in tensors:
            self.heap.free(tensor)


def rows_with_margin(num_rows: int, *, block_m: int) -> int:
    """Return the rows, of whole tiles, that are made room for where the last plan had that many."""
    return rows_in_steps(num_rows + num_rows // _EXPECTED_MARGIN, block_m=block_m)


def rows_in_steps(num_rows: int, *, block_m: int) -> int:
    """Return that many rows or some more, of whole tiles.

    In coarse steps: passes of the same sizes are repeated with less work than others.
    """
    num_tiles = -(-num_rows // block_m)
    step = 1 << max(0, (num_tiles // _EXPECTED_MARGIN).bit_length() - 1)
    return -(-num_tiles // step) * step * block_m


def roomy_tokens(num_tokens: int) -> int:
    """Return for how many tokens room is made where that many need it."""
    return -(-int(_ROOM * num_tokens) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
