"""Choose whether Triton compiles or interprets; without a GPU it interprets on CPU tensors.

Triton reads ``TRITON_INTERPRET`` when it is first imported. So importing this module sets it, and
every package with kernels imports this module before triton.
"""

import os

import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

if INTERPRETED:
    from halley.interpreter.install import install

    install()
