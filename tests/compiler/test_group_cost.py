"""All-to-all curves of groups: each is measured once, and prices the collectives of its group."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from halley.compiler.consensus import open_consensus
from halley.compiler.graph_analysis import Sizes
from halley.compiler.group_cost import curve_keys, measure_groups
from halley.compiler.node_cost import ProfiledCost
from halley.cost.hardware import CPU, Predictor, find_environment
from halley.cost.profiles import Curve, ProfileTable
from halley.cost.simulate import Contention
from tests.compiler.graph_case import GraphBuilder, c10d


NUM_ROWS, SIZE = 64, 256  # 64 KiB in float32
CPU_DEVICE = torch.device("cpu")
SIZES = Sizes(NUM_ROWS)
ALL_TO_ALL = "_c10d_functional::all_to_all_single"


def _build(experts: str, replicas: str) -> fx.Graph:
    """Return an all-to-all of one group and an all-reduce over another."""
    b = GraphBuilder()
    x = b.input("x", NUM_ROWS, SIZE)
    even = [NUM_ROWS // 2] * 2
    rows = b.call(c10d.all_to_all_single.default, x, even, even, experts, name="rows")
    summed = b.call(c10d.all_reduce.default, x, "sum", replicas, name="summed")
    b.done(*(b.call(c10d.wait_tensor.default, each) for each in (rows, summed)))
    return b.graph


def _groups(rank: int) -> tuple[str, str]:
    """Return the names of the group of both ranks and of a group of this rank alone."""
    alone, world = [dist.new_group([each]) for each in (0, 1)][rank], dist.group.WORLD
    assert isinstance(alone, dist.ProcessGroup)
    assert isinstance(world, dist.ProcessGroup)
    return world.group_name, alone.group_name


def _measure(names: tuple[str, str], table: ProfileTable) -> dict[str, str]:
    """Measure the groups; return the keys of their curves."""
    consensus_groups = [open_consensus(name, timeout_s=30.0) for name in names]
    keys = curve_keys(consensus_groups)
    measure_groups(
        _build(*names), consensus_groups, table, keys=keys, sizes=SIZES, device=CPU_DEVICE
    )
    return keys


def _prices(rank: int, num_ranks: int, path: str) -> tuple[list[str], list[float], list[float]]:
    """Return the keys of both curves, the prices of both collectives, and the times by curve."""
    names = _groups(rank)
    environment = find_environment(CPU_DEVICE, topology=f"ranks {num_ranks}")
    table = ProfileTable(Path(path) if rank == 0 else None, environment)
    keys: dict[str, str] = {}
    for _ in range(2):  # the second time, rank 0 has all curves
        keys = _measure(names, table)
    cost = ProfiledCost(Predictor(CPU), sizes=SIZES, table=table, curve_keys=keys)
    found = [cost(node) for node in _build(*names).nodes if node.name in ("rows", "summed")]
    num_bytes = 4 * NUM_ROWS * SIZE
    curves = zip(map(table.curve, keys.values()), (num_bytes, 2 * num_bytes), strict=True)
    return list(keys.values()), found, [curve.at(size) for curve, size in curves if curve]


def test_each_group_has_a_curve(run_ranks, tmp_path) -> None:
    path = tmp_path / "profiles.jsonl"
    for rank, (keys, prices, wanted) in enumerate(run_ranks(_prices, 2, str(path))):
        assert keys == [ALL_TO_ALL, f"{ALL_TO_ALL} of 1 ranks, {rank} to {rank}"]
        assert prices == wanted
        assert prices[0] != prices[1]
    lines = path.read_text().splitlines()
    assert sum('"collective"' in line for line in lines) == 2
    assert sum('"contention"' in line for line in lines) == 1


def test_key_of_a_group_names_its_ranks_in_the_largest_group() -> None:
    def group(name: str, ranks: list[int]) -> Any:
        return SimpleNamespace(group_name=name, rank=2, all_gather=lambda what, value: ranks)

    keys = curve_keys([group("7", [0, 1, 2, 3]), group("9", [0, 2])])
    assert keys == {"7": ALL_TO_ALL, "9": f"{ALL_TO_ALL} of 2 ranks, 0 to 2"}


def _measure_by_two_files(rank: int, num_ranks: int, folder: str) -> list[bool]:
    """Return which curves a rank has, where rank 0 starts with all of them and rank 1 with none.

    Each rank is rank 0 of the group that decides for it, which is the group of this rank alone.
    """
    world, alone = _groups(rank)
    environment = find_environment(CPU_DEVICE, topology="ranks 2")
    table = ProfileTable(Path(folder) / f"{rank}.jsonl", environment)
    if rank == 0:
        for key in (ALL_TO_ALL, f"{ALL_TO_ALL} of 2 ranks, 0 to 0"):
            table.add_curve(key, Curve(((4096, 10.0),)))
        table.add_contention(Contention())
    keys = _measure((alone, world), table)
    return [table.curve(key) is not None for key in keys.values()]


def test_a_group_measures_if_any_of_its_ranks_lacks_its_curve(run_ranks, tmp_path) -> None:
    """Ranks of a group may follow rank 0s with different files. No rank may measure alone."""
    assert run_ranks(_measure_by_two_files, 2, str(tmp_path)) == [[True, True]] * 2
