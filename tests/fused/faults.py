"""Protocol faults for tests: the interpreter makes mistakes in accesses to chosen memory."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from tests.fused.kernel_case import KernelCase
from tests.fused.kernel_rank import KernelRank


Region = Callable[[KernelRank], torch.Tensor]  # part of the memory of a rank


def counter(word: Any) -> Region:
    """Return a word of the counters of a rank."""
    return lambda rank: rank.counters[word.value :][:1]


def ticket(word: Any) -> Region:
    """Return a word of the plan's tickets."""
    return lambda rank: rank.plan[rank.layout.tickets + word.value :][:1]


def plan(name: str, count: Callable[[Any], int]) -> Region:
    """Return a section of the plan."""
    return lambda rank: rank.plan[getattr(rank.layout, name) :][: count(rank.layout)]


def flags(name: str, count: Callable[[Any], int]) -> Region:
    """Return a section of the flags and routing buffer."""
    return lambda rank: rank.routing_buffer.local[getattr(rank.layout, name) :][
        : count(rank.layout)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake in accesses to some memory, and a case in which it has an effect.

    ``answer`` replaces the result of an atomic operation, which is a poll or a count; it gets the
    rank and the right result. ``write`` replaces the value that an atomic operation stores; None
    drops the store. With ``until``, stores of a CTA to ``at`` become visible only after the next
    atomic operation of the CTA on that memory.
    """

    at: Region  # the memory, of all ranks
    within: str = ""  # name of the device function in which the mistake is made; "" for all
    answer: Callable[[KernelRank, Any], Any] | None = None
    write: Callable[[int], int | None] | None = None
    until: Region | None = None
    as_first_half: bool = False  # the second half of ``at`` is the first half
    case: KernelCase  # sizes with which the mistake has an effect
    timeout_s: float = 30.0  # of waits
    first_seed: int = 0  # to try: one that shows the mistake, which saves time


class _Injector(threading.local):
    """The device functions that run in this thread, and its stores that are not visible yet."""

    def __init__(self, fault: Fault, ranks: list[KernelRank]) -> None:
        self.fault, self.ranks = fault, ranks
        self.running: list[str] = []
        self.late: list[Callable[[], object]] = []

    def rank_of(self, pointers: TensorHandle, region: Region | None) -> KernelRank | None:
        """Return the rank whose memory holds the first address, if the fault concerns it."""
        if region is None or not pointers.data.size:
            return None
        address = int(pointers.data.flat[0])
        for rank in self.ranks:
            part = region(rank)
            if part.data_ptr() <= address < part.data_ptr() + part.nbytes:
                return rank
        return None

    def is_concerned(self, pointers: TensorHandle) -> KernelRank | None:
        if self.fault.within and self.fault.within not in self.running:
            return None
        return self.rank_of(pointers, self.fault.at)

    def moved(self, pointers: TensorHandle) -> TensorHandle:
        """Return the pointers, those to the second half moved to the first half."""
        if not self.fault.as_first_half:
            return pointers
        data = pointers.data
        for rank in self.ranks:
            part = self.fault.at(rank)
            half = part.nbytes // 2
            begin = part.data_ptr() + half
            data = np.where((data >= begin) & (data < begin + half), data - np.uint64(half), data)
        return TensorHandle(data, pointers.dtype)


def inject(fault: Fault, ranks: list[KernelRank], patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter make the mistake in the memory of ranks that are added to the list."""
    injector = _Injector(fault, ranks)
    builder: Any = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic, call = builder.create_atomic_rmw, InterpretedFunction.__call__

    def masked_load(self: Any, pointers: TensorHandle, *args: Any, **options: Any) -> Any:
        return load(self, injector.moved(pointers), *args, **options)

    def masked_store(self: Any, pointers: TensorHandle, *args: Any, **options: Any) -> Any:
        if fault.until is not None and injector.is_concerned(pointers):
            injector.late.append(lambda: store(self, pointers, *args, **options))
            return None
        return store(self, injector.moved(pointers), *args, **options)

    def atomic_rmw(
        self: Any, operation: Any, pointers: TensorHandle, value: TensorHandle, *args: Any
    ) -> Any:
        rank = injector.is_concerned(pointers)
        if rank and fault.write is not None:
            written = fault.write(int(value.data.flat[0]))
            if written is None:
                return value
            value = TensorHandle(np.full_like(value.data, written), value.dtype)
        result = atomic(self, operation, pointers, value, *args)
        if injector.late and injector.rank_of(pointers, fault.until):
            for each in injector.late:
                each()
            injector.late.clear()
        if rank and fault.answer is not None:
            answer = np.asarray(fault.answer(rank, result.data), dtype=result.data.dtype)
            return TensorHandle(np.broadcast_to(answer, result.data.shape).copy(), result.dtype)
        return result

    def call_device_function(self: InterpretedFunction, *args: Any, **options: Any) -> Any:
        injector.running.append(self.__name__)
        try:
            return call(self, *args, **options)
        finally:
            injector.running.pop()

    patch.setattr(builder, "create_masked_load", masked_load)
    patch.setattr(builder, "create_masked_store", masked_store)
    patch.setattr(builder, "create_atomic_rmw", atomic_rmw)
    patch.setattr(InterpretedFunction, "__call__", call_device_function)
