"""Run a command on the ranks of the pool, which import torch once, unlike new processes."""

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import pytest
import torch

from halley.distributed.mesh import World


def run_command(
    rank: int, num_ranks: int, main: Callable[[list[str]], int], module: str, command: str
) -> str:
    """Run a command as one rank of the pool and return its standard output.

    ``main`` runs the command line; ``module`` starts and joins the ranks of the command.
    """

    @contextmanager
    def joined(device: str) -> Iterator[tuple[World, None]]:
        yield World(rank=rank, num_ranks=num_ranks, device=torch.device("cpu")), None

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        place = importlib.import_module(module)
        patch.setattr(place, "joined", joined)
        patch.setattr(place, "launch_ranks", lambda nproc, *, device: None)
        assert main(command.split()) == 0
    return output.getvalue()
