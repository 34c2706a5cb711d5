"""Triton kernels of the operators, and how Halley launches kernels."""

from halley.interpreter import switch as switch  # first: it decides how Triton runs
