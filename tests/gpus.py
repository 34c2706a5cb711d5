"""GPUs for the ranks of a test: one each, or one for all of them where the machine has too few.

Ranks that share a GPU run on it alternately, a few milliseconds each. A rank that waits goes on
once the other rank has run: values are right, times mean nothing.
"""

import os

import pytest
import torch
import torch.distributed as dist

from halley.distributed.peers import MAY_SHARE
from halley.interpreter import INTERPRETED


NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU")
needs_kernels = pytest.mark.skipif(
    NUM_GPUS < 1 or INTERPRETED, reason="needs a GPU and TRITON_INTERPRET=0"
)


def device_of(rank: int) -> torch.device:
    """Return the GPU of a rank, made the current one; the first GPU for all where there are less.

    Where it is shared, the heaps of this process may share it from now on.
    """
    shares = dist.get_world_size() > NUM_GPUS
    if shares:
        os.environ[MAY_SHARE] = "1"
    device = torch.device("cuda", 0 if shares else rank)
    torch.cuda.set_device(device)
    return device
