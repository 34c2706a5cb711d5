"""Launch a kernel with little work on the host."""

from collections.abc import Callable
from typing import Any, final

import torch

from halley.kernels.switch import INTERPRETED


@final
class Launcher:
    """Launches one kernel, past Triton's binder once its constants have been seen.

    The binder looks at every argument of every call to see which binary fits, for longer than a
    small kernel runs. Here constants and dtypes decide alone: the kernels say that they are not to
    be specialised on their ints, and pointers are multiples of 16 bytes (``aligned``).

    Args:
        kernel: a ``triton.jit`` function; its constants come last.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._runners: dict[tuple[object, ...], Callable[..., object]] = {}

    def __call__(
        self,
        num_programs: int,
        args: tuple[object, ...],
        constants: tuple[object, ...],
        *,
        dtypes: tuple[torch.dtype, ...] = (),
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Launch that many programs; the kernel takes ``args``, then ``constants``.

        Args:
            dtypes: of those tensors among ``args`` that may have one or another.
        """
        grid = (num_programs, 1, 1)
        if INTERPRETED:
            self.kernel[grid](*args, *constants, num_warps=num_warps, num_stages=num_stages)
            return
        device = torch.cuda.current_device()
        key = (device, num_programs, num_warps, num_stages, dtypes, constants)
        run = self._runners.get(key)
        if run is None:
            binary = self.kernel[grid](
                *args, *constants, num_warps=num_warps, num_stages=num_stages
            )
            self._runners[key] = binary[grid]
        else:
            run(*args, *constants)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is not contiguous or starts amid 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
