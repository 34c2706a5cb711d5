"""Memory of a forward graph in parts: as counted, and as it runs, on one rank."""

from contextlib import nullcontext
from typing import Any, final

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from benchmarks.graph_bench.gpt2_moe import TOP_K
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.partition.divide import divide
from halley.compiler.partition.region import Region, find_region
from halley.compiler.sizes import Sizes
from tests.compiler.captured_case import BATCH_SIZE, Captured, compute_nodes, joined
from tests.compiler.gpt2_model import SEQ_LEN


NUM_PARTS = 4
UNKNOWN_SIZE = BATCH_SIZE * SEQ_LEN * TOP_K["dropless"]  # one rank receives all rows


@final
class _Counting(fx.Interpreter):
    """Runs a graph and counts the bytes of its own storages that are alive after each node."""

    def __init__(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        super().__init__(module)
        self.peak = 0
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._given = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._found = {key: each for key, each in self._found.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._found.values()))
        return result


def _peaks(rank: int, num_ranks: int) -> dict[str, tuple[int, int]]:
    """Return the peak as it ran and as counted: whole, in parts that are joined, or in place."""
    case, found = Captured("dropless"), {}
    for name in ("whole", "joined", "in place"):
        graph, sizes = case.graph(), Sizes(UNKNOWN_SIZE)
        if name != "whole":
            flow = case.flow(graph)
            region = find_region(flow, compute_nodes(graph))
            assert isinstance(region, Region), region
            with joined() if name == "joined" else nullcontext():
                divide(graph, flow, [(region, NUM_PARTS)], sizes=sizes)
        analysis = GraphAnalysis(graph)
        with torch.no_grad():
            runner = _Counting(fx.GraphModule(case.module, graph), case.args)
            runner.boxed_run(list(case.args))
        found[name] = runner.peak, LiveBytes(analysis, sizes).peak(range(len(analysis.nodes)))[0]
    return found


def test_parts_in_place_take_less_memory_and_it_is_counted_right(run_ranks) -> None:
    (peaks,) = run_ranks(_peaks, 1)
    for ran, counted in peaks.values():
        assert abs(counted - ran) < 0.05 * ran
    for at in range(2):  # parts beside their wholes are most of what joining adds
        whole, joined, in_place = (peaks[name][at] for name in ("whole", "joined", "in place"))
        assert whole < in_place
        assert in_place - whole < 0.7 * (joined - whole)
