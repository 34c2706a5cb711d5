"""Kernels where the graph has them, though some are joined from far apart."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from halley.compiler.inductor import keep_order


@dataclass(eq=False)
class Kernel:
    """What Inductor's scheduler tells of a kernel.

    Attributes:
        places: of the graph's nodes that it computes.
        reads: buffers.
        writes: buffers that others have made.
    """

    name: str
    places: tuple[int, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    scheduler: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        names = {f"{self.name} in {each}": each for each in self.writes}
        self.scheduler = SimpleNamespace(mutation_real_name=names)

    @property
    def max_order(self) -> int:
        return max(self.places)

    @property
    def unmet_dependencies(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=each) for each in self.reads]

    def get_buffer_names(self) -> list[str]:
        return [self.name, *self.scheduler.mutation_real_name]


def _order(*kernels: Kernel) -> list[str]:
    """Return the order of kernels that come as Inductor sorts them, by their first nodes."""
    found = keep_order(sorted(kernels, key=lambda kernel: min(kernel.places)))
    assert len(found) == len(kernels)
    return [kernel.name for kernel in found]


def test_what_nobody_reads_stays_ahead_of_a_kernel_joined_with_the_last() -> None:
    """Counts for a loss and that loss are one kernel, which needs all but the part's copy."""
    kernels = (
        Kernel("counts and loss", (0, 5), reads=("experts",)),
        Kernel("whole", (1,)),
        Kernel("part", (2,)),
        Kernel("copy", (3,), reads=("part",), writes=("whole",)),
        Kernel("experts", (4,), reads=("part",)),
    )
    assert _order(*kernels) == ["whole", "part", "copy", "experts", "counts and loss"]


def test_a_buffer_comes_ahead_of_what_writes_to_it() -> None:
    """Though what reads the writing kernel's other result stands before the buffer."""
    kernels = (
        Kernel("norm and copy", (0, 3), writes=("whole",)),
        Kernel("product", (1,), reads=("norm and copy",)),
        Kernel("whole", (2,)),
    )
    assert _order(*kernels) == ["whole", "norm and copy", "product"]


def test_no_kernels() -> None:
    assert keep_order([]) == []
