"""The report of the operation that a rank runs, as watchdogs exchange it."""

import json
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

import torch

from halley.core.current_operation import CURRENT_OPERATION
from halley.distributed.peers import name_ranks


_COLLECTIVES = "torch.distributed.distributed_c10d"  # its functions block with gloo


@dataclass(frozen=True, kw_only=True)
class OperationReport:
    """The operation that a rank runs.

    Attributes:
        step: training step, 0 if steps are not counted.
        num_operations: see ``core.current_operation``.
        name: name of the operation; "" before the first.
        is_waiting: the rank waits there for other ranks and computes nothing.
        is_busy: its GPU has unfinished work, as far as is known.
    """

    step: int
    num_operations: int
    name: str
    is_waiting: bool
    is_busy: bool = False

    def to_json(self) -> str:
        """Return the report as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the report that ``to_json`` wrote."""
        return cls(**json.loads(text))

    def describe(self, *, num_ranks: int) -> str:
        """Return the report in words, as the predicate of that many ranks."""
        if self.is_waiting:
            verb = "waits in" if num_ranks == 1 else "wait in"
        else:
            verb = "is in or behind" if num_ranks == 1 else "are in or behind"
        step = f"step {self.step}, " if self.step else ""
        return f"{verb} {self.name or 'no operation'} ({step}operation {self.num_operations})"


def report_operation(step: int, *, busy_device: int | None = None) -> OperationReport:
    """Return the report of this process.

    If the main thread is inside a call of ``torch.distributed``, that call is reported as an
    operation that waits, because such a call blocks with gloo.

    Args:
        step: training step, 0 if steps are not counted.
        busy_device: index of the GPU to ask for unfinished work; None asks none.
    """
    name, is_waiting = CURRENT_OPERATION.name, CURRENT_OPERATION.is_waiting
    if not is_waiting:
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        if frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES:
            name, is_waiting = f"{frame.f_code.co_name} of torch.distributed", True
    return OperationReport(
        step=step,
        num_operations=CURRENT_OPERATION.num_operations,
        name=name,
        is_waiting=is_waiting,
        is_busy=busy_device is not None and not torch.cuda.default_stream(busy_device).query(),
    )


def differ(reports: Iterable[OperationReport]) -> bool:
    """Return whether ranks run different operations; whether they wait is not compared."""
    return len({(report.step, report.num_operations, report.name) for report in reports}) > 1


def describe_reports(reports: Mapping[int, OperationReport]) -> str:
    """Return in words what the ranks run, grouping equal reports."""
    ranks_of: dict[OperationReport, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks_of.setdefault(report, []).append(rank)
    return ", ".join(
        f"{name_ranks(ranks)} {report.describe(num_ranks=len(ranks))}"
        for report, ranks in ranks_of.items()
    )
