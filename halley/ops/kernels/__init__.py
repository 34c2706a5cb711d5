"""Triton kernels of the operators, and the code that launches kernels.

Files with kernels disable rules of pyright, which reads kernels as plain Python and reports false
errors.
"""

from halley import interpreter as interpreter  # first: this import sets how Triton runs kernels
