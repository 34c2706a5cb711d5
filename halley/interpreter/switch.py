"""The one file that knows whether Triton compiles or interprets.

Every other kernel file imports ``tl`` as usual, after this one: the choice is made when Triton is
first imported. Without a GPU the kernels are interpreted on CPU tensors.
"""

import os

import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

if INTERPRETED:
    from halley.interpreter.install import install

    install()
