"""The fused strategy on a CPU, as tests of it make and compare it."""

from typing import get_args

import torch

from halley.core.timeline import Recorder
from halley.core.types import Save
from halley.fused.buffer_cache import Workspaces
from halley.strategies.fused import FusedStrategy


CPU = torch.device("cpu")
SAVES: tuple[Save, ...] = get_args(Save)


def build(workspaces: Workspaces, *, fused: bool = True, save: Save = "all") -> FusedStrategy:
    """Return a strategy that records nothing."""
    return FusedStrategy(workspaces, recorder=Recorder(CPU, enabled=False), fused=fused, save=save)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    """Compare bits of values by name; ``what`` says which they are."""
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} differs, {what}"
