"""Kernel launches in Triton's interpreter: order of programs, scheduling, errors."""

# Calls pass plain values for parameters that a kernel annotates as tl.constexpr.
# pyright: reportArgumentType=false

import pytest
import torch
import triton
import triton.language as tl

from halley.interpreter.scheduler import Scheduler


@triton.jit
def _ticket_kernel(ticket, order_XYZ, grid_3):
    x = tl.program_id(0)
    y = tl.program_id(1)
    z = tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(order_XYZ + at, tl.atomic_add(ticket, 1))
    tl.store(grid_3 + 0, tl.num_programs(0))
    tl.store(grid_3 + 1, tl.num_programs(1))
    tl.store(grid_3 + 2, tl.num_programs(2))


@triton.jit
def _wait_for_next_kernel(flags_P, out_P, VOLATILE: tl.constexpr):
    """Let each program but the last wait for the flag of the program with the next higher id."""
    program = tl.program_id(0)
    waits = program + 1 < tl.num_programs(0)
    while waits:
        if VOLATILE:
            waits = tl.load(flags_P + program + 1, volatile=True) == 0
        else:
            waits = tl.atomic_add(flags_P + program + 1, 0, sem="acquire", scope="gpu") == 0
    tl.store(out_P + program, program)
    tl.atomic_xchg(flags_P + program, 1, sem="release", scope="gpu")


@triton.jit
def _failing_kernel(x_N):
    tl.store(x_N, 1.0)
    tl.static_assert(x_N.dtype.element_ty == tl.int32, "not integers")


def test_programs_run_in_order_with_the_first_axis_first() -> None:
    ticket, order_XYZ = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 3, 4, dtype=torch.int32)
    grid_3 = torch.zeros(3, dtype=torch.int32)
    _ticket_kernel[(2, 3, 4)](ticket, order_XYZ, grid_3)
    assert torch.equal(order_XYZ.permute(2, 1, 0).reshape(-1), torch.arange(24, dtype=torch.int32))
    assert grid_3.tolist() == [2, 3, 4]


def test_program_ids_and_grids_are_per_thread() -> None:
    ticket, order_XYZ = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2, 3, 2).int()
    grid_3 = torch.zeros(2, 3, dtype=torch.int32)

    def run(rank: int) -> None:
        grid = (2, 3, 2) if rank else (2, 3)
        _ticket_kernel[grid](ticket[rank], order_XYZ[rank], grid_3[rank])

    Scheduler(0, resident=5).run_ranks(2, run)
    assert order_XYZ[1].unique().tolist() == list(range(12))
    assert order_XYZ[0].view(-1)[:6].sort().values.tolist() == list(range(6))
    assert grid_3.tolist() == [[2, 3, 1], [2, 3, 2]]


@pytest.mark.parametrize("volatile", [False, True])
def test_waiting_for_a_higher_id_needs_both_resident(volatile: bool) -> None:
    flags_P, out_P = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    def run(rank: int) -> None:
        flags_P.zero_()
        _wait_for_next_kernel[(4,)](flags_P, out_P, VOLATILE=volatile)

    for seed in range(3):
        Scheduler(seed, resident=4).run_ranks(1, run)
        assert out_P.tolist() == [0, 1, 2, 3]
    scheduler = Scheduler(9, resident=3, max_switches=300)
    with pytest.raises(RuntimeError, match="no end after 300 switches with seed 9 and 3 resident"):
        scheduler.run_ranks(1, run)


def test_error_in_a_kernel_is_raised_unchanged() -> None:
    with pytest.raises(AssertionError, match="not integers"):
        _failing_kernel[(1,)](torch.zeros(1))


def test_empty_grid_does_nothing() -> None:
    x_N = torch.zeros(1)
    _failing_kernel[(0,)](x_N)
    Scheduler(0, resident=2).run_ranks(1, lambda rank: _failing_kernel[(0,)](x_N))
    assert x_N.item() == 0
