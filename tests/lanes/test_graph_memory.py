"""Memory of CUDA graphs: blocks of the simulated pool, and gradients that have such memory."""

from functools import partial
from typing import Any

import torch
from torch import nn

from halley.core.timeline import Recorder
from halley.lanes import executor
from halley.lanes.cut import Item
from halley.lanes.graph_pool import PoolModel


MIB = 2**20


def test_pool_joins_free_blocks_and_takes_the_smallest_that_fits() -> None:
    pool = PoolModel(170 * MIB)
    tensors = [pool.allocate(each * MIB) for each in (10, 20, 30, 40, 50)]  # 20 are free behind
    for at in (0, 1, 3):
        pool.free(tensors[at])  # 30, 40 and 20 are free
    tensors += [pool.allocate(each * MIB) for each in (25, 20, 35)]
    assert pool.has_all  # 25 of the 30, not of the 40, and the 20 at the end
    tensors.append(pool.allocate(5 * MIB))
    tensors.append(pool.allocate(5 * MIB))
    assert pool.has_all
    pool.allocate(2 * MIB)
    assert not pool.has_all  # all 170 are in use


def test_pool_does_not_split_a_block_if_little_remains() -> None:
    pool = PoolModel(10 * MIB)
    first = pool.allocate(9 * MIB)
    assert pool.small_bytes == 0
    pool.free(first)
    pool.allocate(8 * MIB - 1)
    pool.allocate(2 * MIB)
    assert pool.has_all
    small = pool.allocate(MIB)  # not in the piece
    assert (pool.has_all, pool.small_bytes) == (True, 2 * MIB)
    pool.free(small)
    for _ in range(3):
        pool.allocate(MIB)
    assert (pool.has_all, pool.small_bytes) == (True, 4 * MIB)
    pool.allocate(MIB + 1)
    assert not pool.has_all


def test_gradients_with_lasting_memory_become_grad_and_outlive_the_next_step() -> None:
    first, second = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    memory, transposed = torch.ones(2, 3), torch.ones(3, 2).t()
    lent: list[Any] = []
    gradients = executor._Gradients([first, second], lent=lent)
    gradients.add(torch.full((2, 3), 2.0), position=0, microbatch=1)
    gradients.add(memory, position=0, microbatch=0, lasts=True)
    gradients.add(transposed, position=1, microbatch=0, lasts=True)
    assert first.grad is not None
    assert first.grad.data_ptr() == memory.data_ptr()
    assert second.grad is not None
    assert second.grad.is_contiguous()
    assert torch.equal(first.grad, torch.full((2, 3), 3.0))
    executor._copy_lent(lent)  # the next step begins
    memory.zero_()  # and computes other gradients in this memory
    assert torch.equal(first.grad, torch.full((2, 3), 3.0))
    assert lent == []


def test_an_early_gradient_of_another_microbatch_is_copied() -> None:
    taken: list[torch.Tensor | None] = []

    def take_gradient(parameter: torch.Tensor) -> None:
        taken.append(parameter.grad)
        parameter.grad = None

    parameter, early = nn.Parameter(torch.zeros(2, 3)), torch.full((2, 3), 2.0)
    parameter.register_post_accumulate_grad_hook(take_gradient)
    gradients = executor._Gradients([parameter], lent=[])
    gradients.add(early, position=0, microbatch=1)
    gradients.add(torch.ones(2, 3), position=0, microbatch=0, lasts=True)
    early.zero_()  # a later graph of the step uses the memory
    assert [each.mean().item() for each in taken if each is not None] == [1.0, 2.0]


def test_gradients_of_a_replaced_executor_move_before_its_memory_is_used_again() -> None:
    code: Any = lambda values: [values[0].sum()]  # noqa: E731
    items = [Item(kind="segment", inputs=("f:x",), outputs=("f:loss",))]
    make = partial(executor.Executor, items, [code], [(0, 0)], loss="f:loss")
    first = make()
    parameter, memory = nn.Parameter(torch.zeros(2, 3)), torch.ones(2, 3)
    executor._Gradients([parameter], lent=first._lent).add(
        memory, position=0, microbatch=0, lasts=True
    )
    second = make(lent=first.release())
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == memory.data_ptr()
    second.run([{"f:x": torch.ones(1)}], [], recorder=Recorder("cpu", enabled=False))
    memory.zero_()  # graphs of the second executor use it
    assert torch.equal(parameter.grad, torch.ones(2, 3))


def test_an_action_without_its_graph_keeps_no_memory_of_its_arguments() -> None:
    x = torch.ones(2, 3)
    view, new = executor._call_and_copy(lambda values: [values[0].t(), values[0] + 1.0], [x])
    x.zero_()  # a graph of a later item uses the memory
    assert torch.equal(view, torch.ones(3, 2))
    assert torch.equal(new, torch.full((2, 3), 2.0))
