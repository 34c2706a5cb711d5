"""Options of the ``torch.compile`` backend "halley"."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halley.core.validation import build, check_fields
from halley.cost.hardware import Hardware


Passes = Literal["none", "wgrad"]
Inner = Literal["eager", "inductor"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``torch.compile(model, backend="halley", options={...})``.

    Attributes:
        passes: "wgrad" schedules weight-gradient GEMMs under all-to-alls, "none" moves no node.
        inner: compiler after the passes: "inductor", or "eager", which runs operators one by one.
        memory_margin: fraction by which the passes may raise the peak memory of the step.
        profiles: file of measured times; with "", all times are predicted. With ``hardware`` and
            without ``measure``, times of that device with any software versions are used.
        measure: measure times that the file lacks: operators on rank 0, collectives on all ranks.
        hardware: device that times are predicted for; None for the device of the graph.
        unknown_size: assumed for sizes that depend on data, such as the rows that a rank receives.
        agree: let ranks compare their graphs and use the plan of rank 0. Otherwise each rank makes
            its own plan: for a single process, or for tests.
        timeout_s: time that a rank waits for the others to compile the same graph, in seconds.
    """

    passes: Passes = "wgrad"
    inner: Inner = "inductor"
    memory_margin: float = 0.02
    profiles: str | Path = ""
    measure: bool = False
    hardware: Hardware | None = None
    unknown_size: int = 4096
    agree: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.memory_margin < 0:
            raise ValueError(f"memory_margin ({self.memory_margin}) must be at least 0")
        for name in ("timeout_s", "unknown_size"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name} ({value}) must be positive")
        if self.measure and not self.profiles:
            raise ValueError("profiles must name a file when measure is set")


def parse_options(values: dict[str, object] | None) -> Options:
    """Return ``Options`` with the values of a dict; options missing in the dict get their defaults.

    Raises a ``ValueError`` if a name is unknown or a value is not allowed.
    """
    return build(Options, values or {})
