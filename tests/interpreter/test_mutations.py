"""The scheduler reveals protocol mistakes that a sequential interpreter hides.

Each rank has programs that store a block on the other rank and set its flag, and programs that wait
for a block and double it. Each mutation must give wrong values with some seeds.
"""

# Triton annotates the constexpr parameters of a kernel with what the kernel sees of them.
# pyright: reportArgumentType=false

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from halley.interpreter.sanitizer import register, unregister
from halley.interpreter.scheduler import Scheduler


NUM_BLOCKS, BLOCK, NUM_EPOCHS, NUM_SEEDS = 4, 4, 2, 20
IN_KERNEL = ["no wait", "stale epoch", "flag of another block", "flag before data"]


@triton.jit
def _exchange_kernel(
    data_BN, out_BN, inbox_ptrs_W, flag_ptrs_W, rank, epoch,
    MUTATION: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Example: with B = 4, program 1 sends block 1 to the other rank, and 5 waits for block 1."""
    block = tl.program_id(0) % B
    at = block * N + tl.arange(0, N)
    receiver = rank
    if tl.program_id(0) < B:
        receiver = 1 - rank
    inbox = tl.load(inbox_ptrs_W + receiver).to(data_BN.dtype)
    flags = tl.load(flag_ptrs_W + receiver).to(tl.pointer_type(tl.int32))
    if tl.program_id(0) < B:
        if MUTATION == "flag before data":
            tl.atomic_xchg(flags + block, epoch, sem="release", scope="sys")
        tl.store(inbox + at, tl.load(data_BN + at))
        if MUTATION != "flag before data":
            tl.atomic_xchg(flags + block, epoch, sem="release", scope="sys")
    else:
        wanted = epoch
        word = flags + block
        if MUTATION == "no wait":
            wanted = 0
        elif MUTATION == "stale epoch":
            wanted = epoch - 1
        elif MUTATION == "flag of another block":
            word = flags + (block + 1) % B
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") < wanted:
            pass
        tl.store(out_BN + at, 2 * tl.load(inbox + at))


class _Exchange:
    """Memory of two ranks; kernels get tables of its addresses."""

    def __init__(self) -> None:
        self.inboxes = torch.zeros(2, NUM_BLOCKS * BLOCK)
        self.flags = torch.zeros(2, NUM_BLOCKS, dtype=torch.int32)
        self.inbox_ptrs_W = torch.tensor([inbox.data_ptr() for inbox in self.inboxes])
        self.flag_ptrs_W = torch.tensor([flags.data_ptr() for flags in self.flags])

    def is_right(self, scheduler: Scheduler, mutation: str) -> bool:
        """Exchange twice; return whether every rank got the doubled blocks of the other one."""
        self.inboxes.zero_()
        self.flags.zero_()
        sent = torch.arange(1.0, 1 + NUM_EPOCHS * 2 * NUM_BLOCKS * BLOCK).view(NUM_EPOCHS, 2, -1)
        received = torch.zeros_like(sent)

        def run(rank: int) -> None:
            for index in range(NUM_EPOCHS):
                _exchange_kernel[(2 * NUM_BLOCKS,)](
                    sent[index, rank],
                    received[index, rank],
                    self.inbox_ptrs_W,
                    self.flag_ptrs_W,
                    rank,
                    index + 1,
                    MUTATION=mutation,
                    B=NUM_BLOCKS,
                    N=BLOCK,
                )
                if mutation != "no barrier":
                    scheduler.barrier().wait()

        scheduler.run_ranks(2, run)
        return torch.equal(received, 2 * sent.flip(1))


@pytest.fixture(scope="module")
def exchange() -> Iterator[_Exchange]:
    """Yield registered memory."""
    exchange = _Exchange()
    tensors = (exchange.inboxes, exchange.flags)
    for tensor in tensors:
        register(tensor.data_ptr(), tensor.nbytes)
    yield exchange
    for tensor in tensors:
        unregister(tensor.data_ptr())


@pytest.mark.parametrize(("resident", "starve"), [(1, 0.02), (4, 0.0), (8, 0.02)])
def test_right_kernel_is_right_with_every_seed(
    exchange: _Exchange, resident: int, starve: float
) -> None:
    for seed in range(5):
        scheduler = Scheduler(seed, resident=resident, starve=starve)
        assert exchange.is_right(scheduler, "none"), f"wrong with seed {seed}"


@pytest.mark.parametrize("mutation", [*IN_KERNEL, "no barrier"])
def test_mutation_is_caught(exchange: _Exchange, mutation: str) -> None:
    caught: list[int] = []
    for seed in range(NUM_SEEDS):
        if not exchange.is_right(Scheduler(seed, resident=8), mutation):
            caught.append(seed)
        if len(caught) == 3:
            return
    pytest.fail(f"{mutation} is caught with seeds {caught} only")
