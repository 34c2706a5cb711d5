"""What several commands check, or read, before they start ranks."""

from importlib.util import find_spec

import torch

from halley.core.types import DTYPES


def check_package(name: str, *, extra: str, option: str) -> None:
    """Check that an optional package is installed, before the work that ends in its use.

    Args:
        name: of the package.
        extra: of halley-moe, which brings it.
        option: what the user gave that needs it, with its value.

    Raises:
        ValueError: it is not installed; names the command that installs it.
    """
    if find_spec(name) is None:
        raise ValueError(
            f"{option} must have the package {name}: pip install 'halley-moe[{extra}]'"
        )


def read_dtype(name: str, *, on_gpu: bool) -> torch.dtype:
    """Return the dtype of that name.

    Args:
        name: a key of ``DTYPES``, or "default": bfloat16 on GPUs, float32 on CPUs.

    Raises:
        ValueError: there is no such dtype.
    """
    if name == "default":
        return torch.bfloat16 if on_gpu else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype ({name}) must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
