"""Run Triton kernels of several ranks on a CPU, with schedules from a seed and bounds checks.

Triton's own interpreter has three defects. It rounds bfloat16 wrongly. It runs the programs of a
launch one after another, so that most missing waits have no effect. It lets kernels access any
memory. ``install.py`` repairs them for the whole process. Start with ``scheduler.py``, which runs
ranks and programs as threads in an order that a seed determines.

Triton reads ``TRITON_INTERPRET`` when it is first imported. So every package with kernels imports
this package before triton. Without a GPU, Triton interprets, on CPU tensors.
"""

import os
from importlib import import_module

import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Size and number of registrations of symmetric memory, by address. Module state, because symmetric
# memory lives longer than a launch and kernels get its addresses as integers.
registered_memory: dict[int, tuple[int, int]] = {}


def register(address: int, num_bytes: int) -> None:
    """Allow kernels to access memory that is not an argument, such as symmetric memory.

    Several ranks in threads may register the same memory; each of them unregisters it.

    Raises:
        ValueError: the address is registered with another size.
    """
    size, count = registered_memory.get(address, (num_bytes, 0))
    if size != num_bytes:
        raise ValueError(f"num_bytes ({num_bytes}) must be {size}, as {address:#x} is registered")
    registered_memory[address] = size, count + 1


def unregister(address: int) -> None:
    """Undo one ``register`` of an address.

    Raises:
        ValueError: it is not registered.
    """
    if address not in registered_memory:
        raise ValueError(f"address ({address:#x}) must be registered")
    size, count = registered_memory.pop(address)
    if count > 1:
        registered_memory[address] = size, count - 1


if INTERPRETED:
    # By name, because compiled kernels need none of these files.
    import_module("halley.interpreter.install").install()
