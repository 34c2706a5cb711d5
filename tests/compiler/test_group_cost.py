"""Curves of a graph's groups: measured once each, and collectives priced by that of their own."""

from pathlib import Path

import torch
import torch.distributed as dist

from halley.compiler.consensus import open_consensus
from halley.compiler.group_cost import curve_keys, measure_groups
from halley.compiler.node_cost import ProfiledCost
from halley.compiler.sizes import Sizes
from halley.cost.hardware import CPU, Predictor
from halley.cost.profiles import Curve, ProfileTable, find_environment
from halley.cost.simulate import Contention
from tests.compiler.graph_case import GraphBuilder, aten, c10d


NUM_ROWS, SIZE = 64, 256  # 64 KiB in float32
CPU_DEVICE = torch.device("cpu")


def _build(experts: str, replicas: str, *, num_ranks: int = 4) -> GraphBuilder:
    """An all-to-all of one group, of so many ranks, and a sum of gradients over another."""
    b = GraphBuilder()
    x = b.input("x", NUM_ROWS, SIZE)
    even = [NUM_ROWS // num_ranks] * num_ranks
    rows = b.call(c10d.all_to_all_single.default, x, even, even, experts, name="rows")
    summed = b.call(c10d.all_reduce.default, x, "sum", replicas, name="summed")
    b.done(
        b.call(c10d.wait_tensor.default, rows),
        b.call(c10d.wait_tensor.default, summed),
        b.call(aten.neg.default, x),
    )
    return b


def _prices(rank: int, num_ranks: int, path: str) -> tuple[list[str], list[float], list[float]]:
    """Return keys of curves; the prices of both collectives, and what their curves say."""
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    world = dist.group.WORLD
    assert isinstance(pair, dist.ProcessGroup)
    assert isinstance(world, dist.ProcessGroup)
    names = world.group_name, pair.group_name
    graph = _build(*names).graph
    environment = find_environment(CPU_DEVICE, topology=f"ranks {num_ranks}")
    table = ProfileTable(Path(path) if rank == 0 else None, environment)
    sizes, keys = Sizes(NUM_ROWS), {}
    for _ in range(2):  # the second time rank 0 knows all
        consensus_groups = [open_consensus(name, timeout_s=60.0) for name in names]
        keys = curve_keys(consensus_groups)
        measure_groups(graph, consensus_groups, table, keys=keys, sizes=sizes, device=CPU_DEVICE)
    cost = ProfiledCost(Predictor(CPU), sizes=sizes, table=table, curve_keys=keys)
    found = [cost(node) for node in graph.nodes if node.name in ("rows", "summed")]
    num_bytes = 4 * NUM_ROWS * SIZE
    curves = zip(map(table.curve, keys.values()), (num_bytes, 2 * num_bytes), strict=True)
    wanted = [curve.at(size) for curve, size in curves if curve is not None]
    dist.destroy_process_group(pair)
    return list(keys.values()), found, wanted


def test_each_group_has_a_curve(run_ranks, tmp_path) -> None:
    path = tmp_path / "profiles.jsonl"
    found = run_ranks(_prices, 4, str(path), timeout_s=120.0)
    for rank, (keys, prices, wanted) in enumerate(found):
        pair = "0 to 2" if rank % 2 == 0 else "1 to 3"
        world = "_c10d_functional::all_to_all_single"
        assert keys == [world, f"{world} of 2 ranks, {pair}"]
        assert prices == wanted
        assert prices[0] != prices[1]
    lines = path.read_text().splitlines()
    assert sum('"collective"' in line for line in lines) == 2
    assert sum('"contention"' in line for line in lines) == 1


def _measure_by_two_files(rank: int, num_ranks: int, folder: str) -> tuple[bool, bool]:
    """Return whether a rank knows both curves; one pair's file has all, the other's none."""
    first = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    second = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    assert isinstance(first, dist.ProcessGroup)
    assert isinstance(second, dist.ProcessGroup)
    names = first.group_name, second.group_name
    graph = _build(*names, num_ranks=2).graph
    consensus_groups = [open_consensus(name, timeout_s=30.0) for name in names]
    keys = curve_keys(consensus_groups)
    environment = find_environment(CPU_DEVICE, topology="ranks 2")
    table = ProfileTable(
        Path(folder) / f"{rank // 2}.jsonl" if rank % 2 == 0 else None, environment
    )
    if rank == 0:
        for key in keys.values():
            table.add_curve(key, Curve(((4096, 10.0),)))
        table.add_contention(Contention())
    measure_groups(
        graph, consensus_groups, table, keys=keys, sizes=Sizes(NUM_ROWS), device=CPU_DEVICE
    )
    for group in (first, second):
        dist.destroy_process_group(group)
    known = [table.curve(key) is not None for key in keys.values()]
    return known[0], known[1]


def test_a_group_measures_if_any_of_its_ranks_lacks_its_curve(run_ranks, tmp_path) -> None:
    """Ranks of one group may be told by different rank 0s, whose files differ: none waits alone."""
    found = run_ranks(_measure_by_two_files, 4, str(tmp_path), timeout_s=60.0)
    assert found[0] == (True, True)
    assert found[2:] == [(True, True)] * 2
    assert found[1][1]  # its partner of the second group lacked it
