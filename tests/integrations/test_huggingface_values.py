"""A step of models of transformers that are spread over ranks: that of the whole model."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import halley.integrations.transformers as halley_hf
from halley.integrations.transformers.seams import find_seams
from tests.integrations.hf_case import (
    FAMILIES,
    Mesh,
    Wanted,
    compare_step,
    load_spread,
    unregistered,
    write_case,
)
from tests.rank_pool import RunRanks


TOLERANCE = 1e-5
MESHES = {
    "ep2": Mesh(ep_size=2, fsdp_size=2),
    "ep4": Mesh(ep_size=4, fsdp_size=4),
    "ep2_of_4": Mesh(ep_size=2, fsdp_size=4),
    "tp2_ep4": Mesh(ep_size=4, fsdp_size=2, tp_size=2),
}
OWN_GATE = ("gpt_oss",)  # families whose experts no strategy can compute


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Wanted]]:
    """Return what has been written so far: folder and wanted values by family."""
    return {}


@pytest.fixture
def case(
    family: str,
    cases: dict[str, tuple[Path, Wanted]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Wanted]:
    if family not in cases:
        folder = tmp_path_factory.mktemp(family)
        cases[family] = folder, write_case(family, folder)
    return cases[family]


def _step(
    rank: int, num_ranks: int, folder: Path, wanted: Wanted, mesh: Mesh, strategy: str
) -> dict[str, str]:
    with unregistered():
        # Said of experts that only transformers can compute, as the path below shows.
        warnings.filterwarnings("ignore", r"strategy \(chunked\) cannot run")
        model = load_spread(folder, mesh, strategy=strategy)
        compare_step(model, wanted, mesh, tolerance=TOLERANCE)
        return halley_hf.describe(model)


# Interpreted kernels are slow: fewer families and ranks.
STEPS = [
    *itertools.product(FAMILIES, ("sequential", "chunked"), ("ep2", "ep4")),
    ("mixtral", "fused", "ep2"),
    ("mixtral", "fused", "ep4"),
    ("deepseek_v3", "fused", "ep2"),
]


@pytest.mark.parametrize(("family", "strategy", "mesh"), STEPS)
def test_step_is_that_of_the_whole_model(
    family: str,
    strategy: str,
    mesh: str,
    case: tuple[Path, Wanted],
    run_ranks: RunRanks,
    record_property: Callable[[str, str], None],
) -> None:
    sizes = MESHES[mesh]
    own = family in OWN_GATE
    for paths in run_ranks(_step, sizes.fsdp_size * sizes.tp_size, *case, sizes, strategy):
        assert paths
        for path in paths.values():
            way = "sequential around their own arithmetic"
            gate = ": the experts' gate is of their own kind"
            assert path == f"halley: {way + gate if own else strategy}"
    record_property("ran", "own arithmetic" if own else strategy)


@pytest.mark.parametrize("mesh", ["ep2_of_4", "tp2_ep4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_step_on_meshes_of_two_dimensions(
    family: str, mesh: str, case: tuple[Path, Wanted], run_ranks: RunRanks
) -> None:
    if find_seams().name == "experts_function":
        pytest.skip("this transformers has no such meshes")
    run_ranks(_step, 4, *case, MESHES[mesh], "sequential")
