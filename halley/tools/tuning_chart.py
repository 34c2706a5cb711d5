"""Draws what the tuner measured: what each setting took, over what stood before it."""

from collections.abc import Sequence
from pathlib import Path

from halley.fused.tuned import Tuned


_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"
_INCHES_A_LINE = 0.24


def draw_sweeps(found: Sequence[Tuned], path: Path) -> None:
    """Draw a panel for each layer: settings downwards, time against that without them to the right.

    Args:
        found: what ``KnobTable`` holds.
        path: of the picture; the ending says which kind.

    Raises:
        ValueError: nothing was measured.
    """
    panels = [(each, gains(each)) for each in found]
    panels = [(each, lines) for each, lines in panels if lines]
    if not panels:
        raise ValueError("found (no sweeps) must hold at least one layer that was tuned")
    # A figure of its own, which no display must show.
    from matplotlib.figure import Figure

    heights = [len(lines) + 2 for _, lines in panels]
    figure = Figure((8.0, _INCHES_A_LINE * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for each, (tuned, lines) in zip(axes, panels, strict=True):
        labels = [label for label, _ in lines]
        percents = [percent for _, percent in lines]
        is_kept = [set(label.split()) <= set(tuned.settings) for label in labels]
        colours = [_ORANGE if kept else _BLUE for kept in is_kept]
        each.axvline(0.0, color=_GREY, linewidth=0.8)
        each.scatter(percents, range(len(lines)), c=colours, s=22, zorder=3)
        each.set_yticks(range(len(lines)), labels, fontsize=7)
        each.invert_yaxis()
        each.grid(axis="x", color="#E6E6E6", linewidth=0.7)
        shape = tuned.shape
        each.set_title(
            f"hidden {shape.hidden_size}, {shape.num_experts} experts, top-k {shape.top_k}, "
            f"{shape.num_tokens} tokens: {tuned.default_us:.0f} us, tuned {tuned.median_us:.0f} us",
            fontsize=9,
            loc="left",
        )
    axes[-1].set_xlabel("forward and backward, % more than without the setting (orange: kept)")
    figure.savefig(path, dpi=150)


def gains(tuned: Tuned) -> list[tuple[str, float]]:
    """Return each setting that was tried and by how many percent it changed the time."""
    return [
        (setting, 100.0 * (took_us / sweep[""] - 1.0))
        for sweep in tuned.sweeps.values()
        for setting, took_us in sweep.items()
        if setting
    ]
