"""A step of Transformers models with experts spread over ranks equals the undivided model's."""

from collections.abc import Callable
from pathlib import Path

import pytest

import halley.integrations.transformers as halley_transformers
from halley.integrations.transformers.registration import find_extension_point
from tests.integrations.transformers_case import (
    FAMILIES,
    Expected,
    Mesh,
    compare_step,
    disabled_afterwards,
    load_sharded,
    save_model,
)
from tests.rank_pool import RunRanks


TOLERANCE = 1e-5
MESHES = {
    "ep2": Mesh(ep_size=2, fsdp_size=2),
    "ep4": Mesh(ep_size=4, fsdp_size=4),
    "ep2_of_4": Mesh(ep_size=2, fsdp_size=4),
    "tp2_ep4": Mesh(ep_size=4, fsdp_size=2, tp_size=2),
}
UNSUPPORTED = {"gpt_oss": "the experts have a gate function of their own"}  # by family


@pytest.fixture(scope="module")
def saved() -> dict[str, tuple[Path, Expected]]:
    """Return the models that tests of this file have saved so far, by family."""
    return {}


@pytest.fixture
def case(
    family: str,
    saved: dict[str, tuple[Path, Expected]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Expected]:
    if family not in saved:
        folder = tmp_path_factory.mktemp(family)
        saved[family] = folder, save_model(family, folder)
    return saved[family]


def _step(
    rank: int, num_ranks: int, folder: Path, expected: Expected, mesh: Mesh, strategy: str
) -> dict[str, str]:
    with disabled_afterwards():
        model = load_sharded(folder, mesh, strategy=strategy)
        compare_step(model, expected, mesh, tolerance=TOLERANCE)
        return halley_transformers.describe(model)


# All families with one strategy; the others with few.
STEPS = [
    *((family, "sequential", "ep2") for family in FAMILIES),
    ("mixtral", "chunked", "ep4"),
    ("mixtral", "fused", "ep2"),
    ("deepseek_v3", "fused", "ep2"),
]


@pytest.mark.parametrize(("family", "strategy", "mesh"), STEPS)
def test_step_equals_undivided_model(
    family: str,
    strategy: str,
    mesh: str,
    case: tuple[Path, Expected],
    run_ranks: RunRanks,
    record_property: Callable[[str, str], None],
) -> None:
    sizes = MESHES[mesh]
    path = f"halley: {strategy}"
    if family in UNSUPPORTED:
        path = f"halley: sequential, with the framework's own expert code: {UNSUPPORTED[family]}"
    for found in run_ranks(_step, sizes.fsdp_size * sizes.tp_size, *case, sizes, strategy):
        assert found
        assert set(found.values()) == {path}
    record_property("ran", "own arithmetic" if family in UNSUPPORTED else strategy)


@pytest.mark.parametrize(("family", "mesh"), [("mixtral", "tp2_ep4"), ("qwen2_moe", "ep2_of_4")])
def test_step_on_two_dimensional_mesh(
    family: str, mesh: str, case: tuple[Path, Expected], run_ranks: RunRanks
) -> None:
    if find_extension_point().kind == "experts_function":
        pytest.skip("this transformers has no such meshes")
    run_ranks(_step, 4, *case, MESHES[mesh], "sequential")
