"""Triton kernels of the operators, and how Halley launches kernels.

Files with kernels disable rules of pyright: it reads kernels as plain Python and finds errors that
are none.
"""

from halley import interpreter as interpreter  # first: this import sets how Triton runs kernels
