"""The address sanitizer catches wrong accesses with a clear error, and allows right ones."""

# Calls pass plain values for parameters that a kernel annotates as tl.constexpr.
# pyright: reportArgumentType=false

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.interpreter import register, unregister
from halley.interpreter.scheduler import Scheduler


@triton.jit
def _copy_kernel(x_N, y_N, num, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y_N + at, tl.load(x_N + at, mask=at < num), mask=at < num)
    else:
        tl.store(y_N + at, tl.load(x_N + at), mask=at < num)


@triton.jit
def _store_at_kernel(x_N, address, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(address.to(tl.int64).to(x_N.dtype) + at, tl.load(x_N + at))


@triton.jit
def _add_at_kernel(counts_N, offset, BY_CAS: tl.constexpr):
    if BY_CAS:
        tl.atomic_cas(counts_N + offset, 0, 1)
    else:
        tl.atomic_add(counts_N + offset, 1)


@triton.jit
def _masked_add_kernel(counts_N, num, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(counts_N + at, 1, mask=at < num)


@triton.jit
def _load_descriptor_kernel(x, y_N, rows, N: tl.constexpr):
    wrong = tl.make_tensor_descriptor(y_N, [rows, N], [N, 1], [4, N])
    wrong.store([0, 0], x.load([0, 0]))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that has no other tensor directly before or after it in memory."""
    flat = tensor.flatten()
    return torch.stack([flat, flat, flat])[1].view(tensor.shape)


@pytest.fixture
def memory() -> Iterator[torch.Tensor]:
    """Yield registered memory of 16 floats, for kernels that get its address."""
    tensor = _alone(torch.zeros(16))
    register(tensor.data_ptr(), 64)
    yield tensor
    unregister(tensor.data_ptr(), 64)


def test_load_past_the_end_is_caught() -> None:
    x_N = _alone(torch.arange(100.0))
    y_N = _alone(torch.zeros(100))
    _copy_kernel[(4,)](x_N, y_N, 100, MASKED=True, BLOCK=32)
    assert torch.equal(y_N, x_N)
    past = x_N.data_ptr() + 400
    message = rf"_copy_kernel, program \(3, 0, 0\): load of 28 lanes .* first at {past:#x}"
    with pytest.raises(IndexError, match=message):
        _copy_kernel[(4,)](x_N, y_N, 100, MASKED=False, BLOCK=32)


def test_access_behind_a_view_is_caught_inside_of_its_storage() -> None:
    x_N = torch.arange(256.0)
    y_N = _alone(torch.zeros(100))
    with pytest.raises(IndexError, match="load of 28 lanes"):
        _copy_kernel[(4,)](x_N[:100], y_N, 100, MASKED=False, BLOCK=32)
    with pytest.raises(IndexError, match="load of 10 lanes"):
        _copy_kernel[(1,)](x_N.view(16, 16)[:2, :6], y_N, 6, MASKED=False, BLOCK=32)


def test_error_under_the_scheduler_names_program_rank_and_seed() -> None:
    x_N, y_N = _alone(torch.zeros(100)), _alone(torch.zeros(100))

    def run(rank: int) -> None:
        _copy_kernel[(4,)](x_N, y_N, 100, MASKED=rank == 0, BLOCK=32)

    with pytest.raises(IndexError, match=r"program \(3, 0, 0\): load of 28 lanes") as error:
        Scheduler(7, resident=2).run_ranks(2, run)
    assert error.value.__notes__[0].startswith("in rank 1, worker ")
    assert error.value.__notes__[0].endswith(", with seed 7")


def test_store_through_an_unknown_address_is_caught(memory: torch.Tensor) -> None:
    x_N = _alone(torch.arange(16.0))
    _store_at_kernel[(1,)](x_N, memory.data_ptr(), N=16)
    assert torch.equal(memory, x_N)
    with pytest.raises(IndexError, match="store of 3 lanes"):
        _store_at_kernel[(1,)](x_N, memory.data_ptr() + 12, N=16)
    other = _alone(torch.zeros(16))
    with pytest.raises(IndexError, match="store of 16 lanes"):
        _store_at_kernel[(1,)](x_N, other.data_ptr(), N=16)
    assert not other.any()


def test_memory_is_registered_as_often_as_it_is_unregistered(memory: torch.Tensor) -> None:
    x_N, address = torch.zeros(16), memory.data_ptr()
    register(address, 64)
    unregister(address, 64)
    _store_at_kernel[(1,)](x_N, address, N=16)


@pytest.mark.parametrize("by_cas", [False, True])
def test_atomic_operations_are_checked(by_cas: bool) -> None:
    counts_N = _alone(torch.zeros(4, dtype=torch.int32))
    _add_at_kernel[(1,)](counts_N, 3, BY_CAS=by_cas)
    with pytest.raises(IndexError, match="atomic operation of 1 lanes"):
        _add_at_kernel[(1,)](counts_N, 4, BY_CAS=by_cas)
    with pytest.raises(IndexError, match="atomic operation of 1 lanes"):
        _add_at_kernel[(1,)](counts_N, -1, BY_CAS=by_cas)
    assert counts_N.tolist() == [0, 0, 0, 1]


def test_masked_lanes_may_point_anywhere() -> None:
    counts_N = _alone(torch.zeros(3, dtype=torch.int32))
    _masked_add_kernel[(1,)](counts_N, 3, N=8)
    assert counts_N.tolist() == [1, 1, 1]
    _masked_add_kernel[(1,)](counts_N[:0], 0, N=8)
    with pytest.raises(IndexError, match="of 1 lanes"):
        _masked_add_kernel[(1,)](counts_N, 4, N=8)


def test_descriptor_of_more_rows_than_there_are_is_caught() -> None:
    x = TensorDescriptor.from_tensor(torch.ones(4, 16), [4, 16])
    y_N = _alone(torch.zeros(3, 16))
    _load_descriptor_kernel[(1,)](x, y_N, 3, N=16)
    assert y_N.sum() == 48
    with pytest.raises(IndexError, match="store of 16 lanes"):
        _load_descriptor_kernel[(1,)](x, y_N, 4, N=16)


def test_tensor_on_another_device_is_refused() -> None:
    x_N = torch.zeros(32)
    with pytest.raises(ValueError, match=r"device \(meta\) must be cpu"):
        _copy_kernel[(1,)](x_N, torch.zeros(32, device="meta"), 32, MASKED=True, BLOCK=32)
