"""Configuration of the fused kernels: tile shapes, and how many CTAs run which work.

``halley tune`` measures these settings; ``tuned.py`` stores the fastest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from halley.core.field_types import show_name
from halley.ops.kernels.gemm_config import GemmTile


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Settings of all fused kernels of one layer.

    Settings change the running time only. Exception: ``block_k`` also changes the last bits of the
    results, because it changes the order of the summation.

    Attributes:
        num_programs: CTAs of a persistent launch; 0 means one for each SM.
        block_m: rows of a tile of both forward GEMMs and of their backward GEMMs.
        up, down: tiles of the forward GEMMs.
        down_grad, up_grad: tiles of the backward GEMMs with the transposed weights.
        weight: tile of the weight-gradient GEMMs; its ``block_k`` divides ``block_m``.
        combiners_beside: combining CTAs on each SM that run next to the GEMM's CTAs.
        combiners_after: more combining CTAs for each SM, which start when GEMM CTAs have ended.
        fetch_elements: elements that a warp keeps in flight while it fetches rows of other ranks.
        combine_rows: token copies that a combining CTA sums at once; divides ``TASK_ROWS``.
        combine_stages: steps in flight of that summation, one row of each token copy a step; 1
            loads all rows of the token copies at once.
        chunk_columns: columns of the second GEMM that are combined at once: a power of two and a
            multiple of ``down.block_n`` and ``up_grad.block_n``.
        sum_rows: tokens of one task of the final sum on the token's own rank.
    """

    num_programs: int = 0
    block_m: int = 128
    up: GemmTile = field(default_factory=GemmTile)
    down: GemmTile = field(default_factory=GemmTile)
    down_grad: GemmTile = field(default_factory=lambda: GemmTile(num_stages=3))
    up_grad: GemmTile = field(default_factory=GemmTile)
    weight: GemmTile = field(default_factory=lambda: GemmTile(run=0, num_stages=3))
    combiners_beside: int = 1
    combiners_after: int = 3
    fetch_elements: int = 2048
    combine_rows: int = 8
    combine_stages: int = 1
    chunk_columns: int = 512
    sum_rows: int = 8

    def fetch_block(self, hidden_size: int, *, num_warps: int) -> tuple[int, int]:
        """Return rows and columns of the block that a fetching CTA keeps in flight."""
        elements = self.fetch_elements * num_warps
        columns = min(4096, 1 << (hidden_size - 1).bit_length(), elements)
        return min(64, elements // columns), columns

    def changed(self, settings: Sequence[str]) -> "KernelConfig":
        """Return a configuration with some settings replaced.

        Args:
            settings: for example "combine_rows=16" or "up.run=2".

        Raises:
            ValueError: a setting has another form, or an unknown name.
        """
        config = self
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in _by_name(config) or not value.isdecimal():
                rule = "the name of a setting, an equals sign and an integer"
                raise ValueError(f"setting ({show_name(setting)}) must be {rule}")
            tile, _, key = name.rpartition(".")
            change: dict[str, object] = {key: int(value)}
            if tile:
                change = {tile: replace(getattr(config, tile), **change)}
            config = replace(config, **change)
        return config

    def settings(self, base: "KernelConfig") -> list[str]:
        """Return the settings that differ from ``base``, in the form that ``changed`` takes."""
        others = _by_name(base)
        return [
            f"{name}={value}" for name, value in _by_name(self).items() if value != others[name]
        ]


# An interpreted program takes the same time for any block size: use few programs and few tasks.
CPU_CONFIG = KernelConfig(
    num_programs=2,
    block_m=16,
    up=GemmTile(block_n=64, block_k=64, group=2),
    down=GemmTile(block_n=64, block_k=64, group=2),
    down_grad=GemmTile(block_n=64, block_k=64, group=2),
    up_grad=GemmTile(block_n=64, block_k=64, group=2),
    weight=GemmTile(block_n=64, block_k=16, group=2),
    fetch_elements=4096,
    combine_rows=64,
    combine_stages=2,
    chunk_columns=64,
    sum_rows=64,
)


def default_config(device: torch.device) -> KernelConfig:
    """Return the configuration of a device without a tuned one."""
    return CPU_CONFIG if device.type == "cpu" else KernelConfig()


def _by_name(config: KernelConfig) -> dict[str, int]:
    """Return all settings by name, such as "block_m" and "up.block_n"."""
    found: dict[str, int] = {}
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if isinstance(value, GemmTile):
            found |= {
                f"{field_.name}.{part.name}": getattr(value, part.name) for part in fields(value)
            }
        else:
            found[field_.name] = value
    return found
