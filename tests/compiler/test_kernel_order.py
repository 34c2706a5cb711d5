"""Test the order of fused kernels: by their last node, after the kernels that they depend on."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from halley.compiler.inductor import order_kernels


@dataclass(eq=False)
class Kernel:
    """The attributes of a kernel of Inductor's scheduler that ``order_kernels`` reads.

    Attributes:
        places: positions of its nodes in the graph.
        reads: names of the buffers that it reads.
        writes: names of the buffers of other kernels that it writes to.
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
    """Return the names of kernels in order; Inductor sorts them by their first node before."""
    found = order_kernels(sorted(kernels, key=lambda kernel: min(kernel.places)))
    assert len(found) == len(kernels)
    return [kernel.name for kernel in found]


def test_copy_stays_before_a_kernel_fused_with_the_last_node() -> None:
    """The kernel of counts and loss needs all kernels except for the copy of the microbatch."""
    kernels = (
        Kernel("counts and loss", (0, 5), reads=("experts",)),
        Kernel("full", (1,)),
        Kernel("microbatch", (2,)),
        Kernel("copy", (3,), reads=("microbatch",), writes=("full",)),
        Kernel("experts", (4,), reads=("microbatch",)),
    )
    assert _order(*kernels) == ["full", "microbatch", "copy", "experts", "counts and loss"]


def test_buffer_is_allocated_before_it_is_written() -> None:
    """Also where a reader of the writing kernel's other result comes before the buffer."""
    kernels = (
        Kernel("norm and copy", (0, 3), writes=("full",)),
        Kernel("gemm", (1,), reads=("norm and copy",)),
        Kernel("full", (2,)),
    )
    assert _order(*kernels) == ["full", "norm and copy", "gemm"]


def test_no_kernels() -> None:
    assert order_kernels([]) == []
