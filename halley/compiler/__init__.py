"""Compiler passes over graphs of torch.compile that overlap communication with computation.

Start reading in ``pipeline.py``, which lists all changes to a graph in order. ``backend.py`` has
the entry points. docs/lancet.md explains the method.
"""

from halley import interpreter as interpreter  # must run before Inductor imports Triton


# isort: split
from halley.compiler.backend import Backend, compile_function, register, run
from halley.compiler.wgrad.schedule import OrderReport


__all__ = ["Backend", "OrderReport", "compile_function", "register", "run"]
