"""Options of the compiler passes."""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from types import NoneType
from typing import Literal, get_args

from halley.cost.hardware import Hardware


Passes = Literal["none", "wgrad"]
Inner = Literal["eager", "inductor"]
_TYPES: dict[str, tuple[type, ...]] = {
    "memory_margin": (float, int),
    "profiles": (str, Path),
    "measure": (bool,),
    "hardware": (Hardware, NoneType),
    "unknown_size": (int,),
    "agree": (bool,),
    "timeout_s": (float, int),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``torch.compile(model, backend="halley", options={...})``.

    Attributes:
        passes: "wgrad" schedules weight gradients under all-to-alls, "none" changes no order.
        inner: compiler of the graphs after the passes: "inductor", or "eager", which runs their
            operators one by one.
        memory_margin: share by which the passes may raise the peak memory of the step.
        profiles: file of measured times; "" predicts all times. With ``hardware`` and without
            ``measure``, the times of that device are used, of any versions.
        measure: measure the times that the file lacks: rank 0 operators, all ranks collectives.
        hardware: device that times are predicted for; None for the device of the graph.
        unknown_size: value for sizes that depend on data, such as the rows that a rank receives.
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
        """Check the values.

        Raises:
            ValueError: a value is not allowed.
        """
        for name, kinds in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{name} ({value!r}) must be of type {names}")
        for name, allowed in (("passes", get_args(Passes)), ("inner", get_args(Inner))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} ({value}) must be one of {', '.join(allowed)}")
        if not 0.0 <= self.memory_margin < inf:
            raise ValueError(f"memory_margin ({self.memory_margin}) must be finite and at least 0")
        for name in ("timeout_s", "unknown_size"):
            if not 0 < (value := getattr(self, name)) < inf:
                raise ValueError(f"{name} ({value}) must be finite and positive")
        if self.measure and not self.profiles:
            raise ValueError("profiles must name a file when measure is set")


def parse_options(values: dict[str, object] | None) -> Options:
    """Return the options of a dict, with defaults for the rest.

    Raises:
        ValueError: a name is unknown, or a value is not allowed.
    """
    known = {field.name for field in fields(Options)}
    if unknown := sorted(set(values or {}) - known):
        raise ValueError(f"options ({', '.join(unknown)}) must be of {', '.join(sorted(known))}")
    return Options(**(values or {}))  # pyright: ignore[reportArgumentType]
