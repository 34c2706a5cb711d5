"""A second process takes compiled segments from Inductor's cache on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from halley.lanes.cut import Item
from halley.lanes.segment_compiler import SegmentCompiler


def _make_item(num_rows: int | None) -> Item:
    """Return a segment of one input of ``num_rows`` rows; None for a number that data decide."""
    environment = ShapeEnv()
    graph = fx.Graph()
    x_TD = graph.placeholder("x_TD")
    with FakeTensorMode(shape_env=environment):
        size = environment.create_unbacked_symint() if num_rows is None else num_rows
        x_TD.meta["val"] = torch.empty_strided((size, 8), (8, 1))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x_TD, 2.0))
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (doubled,)),))
    return Item(kind="segment", code=graph)


def main() -> None:
    """Compile two segments, and print the numbers of cache hits, misses and bypasses."""
    compiler = SegmentCompiler("inductor")
    x_TD = torch.linspace(-1.0, 1.0, 24).view(3, 8)
    for num_rows in (3, None):
        (result,) = compiler.compile(_make_item(num_rows))[1]([x_TD])
        torch.testing.assert_close(result, (2.0 * x_TD).tanh())
    names = ("hit", "miss", "bypass")
    found = [counters["inductor"][f"fxgraph_cache_{name}"] for name in names]
    sys.stdout.write(json.dumps(found))


def test_second_process_compiles_nothing_again(tmp_path: Path) -> None:
    # An operator or a size that bypasses the cache would make each start of a run a cold one.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.lanes.test_segment_compiler"]
    found = [
        json.loads(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=120.0
            ).stdout
        )
        for _ in range(2)
    ]
    assert found == [[0, 2, 0], [2, 0, 0]]


if __name__ == "__main__":
    main()
