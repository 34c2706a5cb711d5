"""What a tuner may turn: sizes of tiles and tasks, and how many programs begin with which work."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from halley.core.field_types import show_name


@dataclass(frozen=True, kw_only=True)
class GemmTile:
    """The shape of one tile of a grouped GEMM and of the loop that makes it.

    Attributes:
        block_n: columns of the product before the activation.
        block_k: depth of one step.
        group: row tiles that share columns of weights before the next columns.
        run: tiles side by side that a program makes in one loop: the loads of the next begin
            during the last products of the one before, which is stored meanwhile. 0, of gradients
            of weights alone, leaves it and the size of a tile to the number of rows.
        num_warps: warps of a program.
        per_sm: programs on one multiprocessor: one multiplies while the other stores or combines.
        num_stages: steps in flight.
        beside: of gradients of weights alone: 1 if the first of them begins while the last sums of
            the tokens' gradients are on their way.
    """

    block_n: int = 256
    block_k: int = 64
    group: int = 8
    run: int = 1
    num_warps: int = 8
    per_sm: int = 1
    num_stages: int = 4
    beside: int = 0


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The knobs of a layer. They change time, and no value but for the last bits with ``block_k``.

    Attributes:
        num_programs: programs of the persistent launches; 0 is one a multiprocessor.
        block_m: rows of a tile, of both GEMMs.
        up, down: forward.
        down_grad, up_grad: backward, of the GEMMs with the same weights turned.
        weight: of the gradients of weights; ``block_k`` divides ``block_m``.
        movers_alone: programs of a launch that moves rows on each multiprocessor, at least, where
            no tiles are made meanwhile.
        combiners_beside: programs that combine on each multiprocessor beside tiles.
        combiners_after: more of them, which begin where tiles' programs have ended.
        mover_warps: warps of a program that moves rows.
        fetch_elements: what a warp that fetches keeps in flight; those of a program together keep
            some whole rows, or a part of one.
        combine_rows: sends that a combining program sums at once; divides ``TASK_ROWS``.
        combine_stages: steps of that loop in flight, each a row of ``combine_rows`` sends; 1 loads
            all rows of that many sends at once, without a loop.
        chunk_columns: columns of the down projection that are combined at once; a power of two,
            and a multiple of the columns of a tile.
        home_rows: tokens of one task of the sum at home.
    """

    num_programs: int = 0
    block_m: int = 128
    up: GemmTile = field(default_factory=GemmTile)
    down: GemmTile = field(default_factory=GemmTile)
    down_grad: GemmTile = field(default_factory=lambda: GemmTile(num_stages=3))
    up_grad: GemmTile = field(default_factory=GemmTile)
    weight: GemmTile = field(default_factory=lambda: GemmTile(run=0, num_stages=3))
    movers_alone: int = 2
    combiners_beside: int = 1
    combiners_after: int = 3
    mover_warps: int = 4
    fetch_elements: int = 2048
    combine_rows: int = 8
    combine_stages: int = 1
    chunk_columns: int = 512
    home_rows: int = 8

    def fetch_block(self, hidden_size: int, *, num_warps: int) -> tuple[int, int]:
        """Return rows and columns of the piece that a fetching program keeps in flight."""
        elements = self.fetch_elements * num_warps
        columns = min(4096, 1 << (hidden_size - 1).bit_length(), elements)
        return min(64, elements // columns), columns

    def changed(self, settings: Sequence[str]) -> "Knobs":
        """Return these knobs with some settings changed, such as "mover_warps=8" and "up.run=2".

        Raises:
            ValueError: a setting is not of that form, or names no knob.
        """
        knobs = self
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in _named(knobs) or not value.isdecimal():
                rule = "the name of a knob, an equals sign and an integer"
                raise ValueError(f"setting ({show_name(setting)}) must be {rule}")
            tile, _, part = name.rpartition(".")
            if tile:
                knobs = replace(
                    knobs, **{tile: replace(getattr(knobs, tile), **{part: int(value)})}
                )
            else:
                knobs = replace(knobs, **{name: int(value)})
        return knobs

    def settings(self, base: "Knobs") -> list[str]:
        """Return in what these knobs differ from others, as ``changed`` takes it."""
        others = _named(base)
        return [f"{name}={value}" for name, value in _named(self).items() if value != others[name]]


def _named(knobs: Knobs) -> dict[str, int]:
    """Return all knobs by the names that settings have."""
    named: dict[str, int] = {}
    for field_ in fields(knobs):
        value = getattr(knobs, field_.name)
        if isinstance(value, GemmTile):
            for part in fields(value):
                named[f"{field_.name}.{part.name}"] = getattr(value, part.name)
        else:
            named[field_.name] = value
    return named
