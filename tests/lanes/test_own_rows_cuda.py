"""All-to-alls that copy a rank's own rows return what NCCL's all-to-all returns.

pytest tests/lanes/test_own_rows_cuda.py
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from halley.lanes.segment_compiler import keep_own_rows
from tests.gpus import NUM_GPUS, device_of, needs_gpu
from tests.rank_pool import RunRanks


pytestmark = needs_gpu


def _compare(rank: int, num_ranks: int, shift: int) -> tuple[bool, str]:
    device = device_of(rank)
    group: Any = dist.new_group(backend="nccl")
    sizes = [[(3 * source + 5 * target + shift) % 4 for target in range(num_ranks)]
             for source in range(num_ranks)]  # fmt: skip
    send, recv = sizes[rank], [row[rank] for row in sizes]
    rows = torch.randn(sum(send), 5, 8, device=device, generator=_generator(rank, device))
    graph = fx.Graph()
    source = graph.placeholder("rows")
    args = (source, recv, send, group.group_name)
    started = graph.call_function(torch.ops._c10d_functional.all_to_all_single.default, args)
    started.meta["val"] = rows
    graph.output(started)
    results: list[torch.Tensor] = []
    for each in (graph, keep_own_rows(graph)):
        result = fx.GraphModule({}, each)(rows)
        results.append(torch.ops._c10d_functional.wait_tensor(result))
    equal = torch.equal(*results) and len(results[0]) == sum(recv)
    dist.barrier()
    dist.destroy_process_group(group)
    return equal, str(started.target)


def _generator(rank: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(rank)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])  # each has other ranks that send no rows
def test_result_equals_that_of_nccl(run_ranks: RunRanks, shift: int) -> None:
    for equal, name in run_ranks(_compare, NUM_GPUS, shift, timeout_s=120.0):
        assert equal
        assert "all_to_all_single" in name  # the given graph is unchanged
