"""Helpers of the tests of the fused strategy on a CPU."""

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
    return FusedStrategy(
        workspaces, recorder=Recorder(workspaces.device, enabled=False), fused=fused, save=save
    )


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    """Check that tensors of the same name are bitwise equal; ``what`` is for the message."""
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} differs, {what}"
