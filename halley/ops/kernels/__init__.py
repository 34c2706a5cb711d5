"""Triton kernels of the operators, and how Halley launches kernels."""

from halley import interpreter as interpreter  # first: it decides how Triton runs
