"""Run Triton kernels on a CPU; check their memory accesses, and order threads by a seed.

Triton's own interpreter has three defects, which ``install.py`` repairs for the whole process. It
rounds bfloat16 wrongly (``numerics.py``). It runs the programs of a launch one after another, so
that most missing waits have no effect (``scheduler.py``: start there). It lets kernels access any
memory (``sanitizer.py``).

Triton reads ``TRITON_INTERPRET`` when it is first imported. So every package with kernels imports
this package before triton. Without a GPU, this package sets the variable to 1 if it is unset.
"""

import os
from collections import Counter
from importlib import import_module

import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# How often each (address, number of bytes) is registered. Module state, because symmetric memory
# lives longer than a launch and kernels get its addresses as integers.
registered_memory: Counter[tuple[int, int]] = Counter()


def register(address: int, num_bytes: int) -> None:
    """Allow interpreted kernels to access memory that is not an argument, such as symmetric memory.

    Ranks in threads may register the same memory; each of them unregisters it.
    """
    registered_memory[address, num_bytes] += 1


def unregister(address: int, num_bytes: int) -> None:
    """Undo one call of ``register`` with the same arguments."""
    registered_memory[address, num_bytes] -= 1
    if registered_memory[address, num_bytes] == 0:
        del registered_memory[address, num_bytes]


if INTERPRETED:
    # Import only for interpreted kernels: compiled kernels need no other file of this package.
    import_module("halley.interpreter.install").install()
