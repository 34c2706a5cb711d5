"""Passes over whole graphs of torch.compile, which hide communication behind computation."""

from halley.compiler.backend import Backend, register, run
from halley.compiler.partition.axes import Batch, Call, Division, Refusal
from halley.compiler.wgrad.schedule import OrderReport


__all__ = ["Backend", "Batch", "Call", "Division", "OrderReport", "Refusal", "register", "run"]
