# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
"""Record in which phase each CTA of the fused kernels is at each time.

A CTA takes a record from a buffer and adds a mark whenever its phase changes. So its phases follow
one another without gaps. Without a buffer (``LAYOUT.max_marks`` is 0), the functions compile to
nothing. Records need no host: replayed launches and CUDA graphs write them, too. The buffer::

    word 0, 1       number of records that CTAs asked for, number of records that fit
    each record     word 0: kernel, number of CTAs and index of the CTA; word 1: number of marks;
                    then ``max_marks`` marks: clock in ns, with the phase in the lowest 4 bits

Example: a CTA of ``arrived_gemm_kernel`` marks OTHER at 160 ns, WAIT at 320, MULTIPLY at 800 and
END at 1600. It waited for 480 ns and multiplied for 800 ns.
"""

import weakref
from typing import NamedTuple, final

import numpy as np
import torch
import triton
import triton.language as tl

from halley.interpreter import register, unregister


# Phases of a CTA, and their names in the same order.
END = tl.constexpr(0)
OTHER = tl.constexpr(1)
WAIT = tl.constexpr(2)
PUBLISH = tl.constexpr(3)
PLAN = tl.constexpr(4)
FETCH = tl.constexpr(5)
MULTIPLY = tl.constexpr(6)
SEND = tl.constexpr(7)
ADD = tl.constexpr(8)
PHASES: tuple[str, ...] = (
    "other", "wait", "publish", "plan", "fetch", "multiply", "combine send", "combine add",
)  # fmt: skip
# Kernels with marks, and their names in the same order.
PLAN_KERNEL = tl.constexpr(0)
PUBLISH_KERNEL = tl.constexpr(1)
FETCH_KERNEL = tl.constexpr(2)
FIRST_GEMM_KERNEL = tl.constexpr(3)
SECOND_GEMM_KERNEL = tl.constexpr(4)
COMBINE_KERNEL = tl.constexpr(5)
KERNELS: tuple[str, ...] = (
    "plan_kernel", "publish_rows_kernel", "fetch_kernel", "arrived_gemm_kernel",
    "chunked_gemm_kernel", "combine_kernel",
)  # fmt: skip

_RECORDS = tl.constexpr(1)  # word of ``status`` that holds the address of the buffer
_HEADER = tl.constexpr(2)  # words before the records, and words before the marks of a record
_FIELD = tl.constexpr(2**20)  # exceeds the number of CTAs
_PHASE_MASK = 15


@triton.jit
def _mark(PHASE: tl.constexpr):
    # All threads read the clock, but only thread 0 stores its value.
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    return (now & -16) | PHASE


@triton.jit
def begin(status, KERNEL: tl.constexpr, BACKWARD: tl.constexpr, LAYOUT: tl.constexpr):
    """Take a record for this CTA, in phase OTHER; return its address and its number of marks."""
    record = status
    if LAYOUT.max_marks > 0:
        mark = _mark(OTHER)
        buffer = tl.load(status + _RECORDS).to(tl.pointer_type(tl.int64))
        index = tl.atomic_add(buffer, 1, sem="relaxed", scope="gpu")
        index = tl.minimum(index, tl.load(buffer + 1))  # records that do not fit share the last
        record = buffer + _HEADER + index * (_HEADER + LAYOUT.max_marks)
        kernel = tl.full((), 2 * KERNEL + BACKWARD, tl.int64)
        tl.store(record, (kernel * _FIELD + tl.num_programs(0)) * _FIELD + tl.program_id(0))
        tl.store(record + 1, 0)  # until ``end``
        tl.store(record + _HEADER, mark)
    return record, 1


@triton.jit
def add(record, num_marks, PHASE: tl.constexpr, LAYOUT: tl.constexpr):
    """Begin a phase of this CTA; return the new number of marks of its record."""
    if LAYOUT.max_marks > 0:
        at = _HEADER + tl.minimum(num_marks, LAYOUT.max_marks - 1)
        tl.store(record + at, _mark(PHASE))
        num_marks += 1
    return num_marks


@triton.jit
def end(record, num_marks, LAYOUT: tl.constexpr):
    """End the last phase of this CTA."""
    if LAYOUT.max_marks > 0:
        num_marks = add(record, num_marks, END, LAYOUT)
        tl.store(record + 1, num_marks)


class Launch(NamedTuple):
    """Recorded phases of all CTAs of one kernel launch; times are the GPU's clock in ns."""

    kernel: str  # one of ``KERNELS``
    backward: bool  # whether it is the form of the kernel for a backward pass
    num_programs: int
    phases: tuple[tuple[tuple[str, int, int], ...], ...]  # by CTA: name, start and end, in order

    @property
    def start_ns(self) -> int:
        """When the first CTA began."""
        return min(phases[0][1] for phases in self.phases)

    @property
    def end_ns(self) -> int:
        """When the last CTA ended."""
        return max(phases[-1][2] for phases in self.phases)


@final
class ProgramRecords:
    """Memory for the records of the CTAs of some launches; ``Workspaces`` takes it as ``records``.

    Args:
        num_records: capacity in CTAs of all launches between ``clear`` and ``read``. A forward
            and a backward pass have 17 for each SM.
        max_marks: capacity of a record in marks; 8 bytes each.
    """

    def __init__(
        self, device: torch.device, *, num_records: int = 2**13, max_marks: int = 2**10
    ) -> None:
        if num_records < 1:
            raise ValueError(f"num_records ({num_records}) must be at least 1")
        if max_marks < 2:
            raise ValueError(f"max_marks ({max_marks}) must be at least 2")
        self.num_records, self.max_marks = num_records, max_marks
        header = _HEADER.value
        size = header + (num_records + 1) * (header + max_marks)
        self._words = torch.zeros(size, dtype=torch.int64, device=device)
        self._words[1] = num_records
        self.address = self._words.data_ptr()
        if device.type == "cpu":
            register(self.address, self._words.nbytes)
            weakref.finalize(self, unregister, self.address, self._words.nbytes)

    def clear(self) -> None:
        """Delete all records, in the order of the current stream."""
        self._words[0] = 0

    def read(self) -> list[Launch]:
        """Wait for the device; return the recorded launches since ``clear``, by start.

        Raises:
            RuntimeError: there were more records or marks than fit, or a launch is incomplete.
        """
        words, header = self._words.cpu().numpy(), _HEADER.value
        count = int(words[0])
        if count > self.num_records:
            raise RuntimeError(f"num_records ({self.num_records}) must be at least {count}")
        records = words[header:].reshape(self.num_records + 1, -1)[:count]
        most_marks = int(records[:, 1].max(initial=0))
        if most_marks > self.max_marks:
            raise RuntimeError(f"max_marks ({self.max_marks}) must be at least {most_marks}")
        if int(records[:, 1].min(initial=2)) < 2:
            raise RuntimeError("a kernel has not ended on all CTAs")
        # Launches of one kernel follow one another, so the n-th record of each CTA is of the n-th.
        records = records[np.lexsort((records[:, header], records[:, 0]))]
        kinds, programs = np.divmod(records[:, 0], _FIELD.value)
        launches: list[Launch] = []
        for kind in np.unique(kinds).tolist():
            kernel, num_programs = divmod(kind, _FIELD.value)
            name, same = KERNELS[kernel // 2], records[kinds == kind]
            num_launches = len(same) // num_programs
            wanted = np.repeat(np.arange(num_programs), num_launches)
            if not np.array_equal(programs[kinds == kind], wanted):
                raise RuntimeError(f"{name} has not ended on all CTAs")
            for ctas in same.reshape(num_programs, num_launches, -1).swapaxes(0, 1):
                phases = tuple(map(_to_phases, ctas))
                launches.append(Launch(name, bool(kernel % 2), num_programs, phases))
        return sorted(launches, key=lambda launch: launch.start_ns)


def make_status(records: ProgramRecords | None, device: torch.device) -> torch.Tensor:
    """Return ``status`` of a ``KernelContext``, without a failure; CTAs take records if given."""
    address = records.address if records else 0
    return torch.tensor([0, address], dtype=torch.int64, device=device)


def _to_phases(record: np.ndarray) -> tuple[tuple[str, int, int], ...]:
    marks = record[_HEADER.value : _HEADER.value + record[1]]
    names = [PHASES[phase - 1] for phase in (marks[:-1] & _PHASE_MASK).tolist()]
    times_ns = (marks & ~_PHASE_MASK).tolist()
    return tuple(zip(names, times_ns[:-1], times_ns[1:], strict=True))
