"""Triton kernels and their launchers: tensors, ints and addresses in; no groups, no autograd."""

from halley.kernels import switch as switch  # first: it decides how Triton runs
