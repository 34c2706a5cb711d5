"""Operations of triton.language in the interpreter, against torch with small integers."""

# Triton annotates the constexpr parameters of a kernel with what the kernel sees of them.
# pyright: reportArgumentType=false

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.interpreter.sanitizer import register, unregister


DTYPES = [torch.bfloat16, torch.float32]


@triton.jit
def _shapes_kernel(x_MN, trans_NM, split_2M, join_MN, permuted, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    x = tl.load(x_MN + m[:, None] * N + n[None, :])
    tl.store(trans_NM + n[:, None] * M + m[None, :], tl.trans(x))
    left, right = tl.split(tl.sum(tl.reshape(x, (M, 2, N // 2)), axis=2))
    tl.store(split_2M + m, left)
    tl.store(split_2M + M + m, right)
    even, odd = tl.split(tl.reshape(x, (M, N // 2, 2)))
    tl.store(join_MN + m[:, None] * N + n[None, :], tl.reshape(tl.join(odd, even), (M, N)))
    turned = tl.permute(tl.reshape(x, (M, 2, N // 2)), (1, 0, 2))
    tl.store(permuted + tl.arange(0, M * N), tl.reshape(turned, (M * N,)))


@triton.jit
def _descriptor_kernel(w, x_EMN, out_EMN, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    e = tl.program_id(0)
    on_device = tl.make_tensor_descriptor(
        out_EMN, shape=[E, M, N], strides=[M * N, N, 1], block_shape=[1, 4, 16]
    )
    for start in range(0, M, 4):
        tile = w.load([e, start, 0]).reshape(4, 16)
        on_device.store([e, start, 0], (tile + tile).reshape(1, 4, 16))


@triton.jit
def _integers_kernel(x_N, counts_B, running_N, num, N: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_N + at, mask=at < num, other=0)
    tl.store(counts_B + tl.arange(0, B), tl.histogram(x, B, mask=at < num))
    tl.store(running_N + at, tl.cumsum(x, axis=0))


@triton.jit
def _loop_kernel(x_N, total_1, num, start):
    total = 0
    for index in range(start, num):
        total += tl.load(x_N + index)
    tl.store(total_1, total)


@triton.jit
def _peer_kernel(addresses_W, x_N, N: tl.constexpr):
    at = tl.arange(0, N)
    peer = tl.load(addresses_W + tl.program_id(0)).to(x_N.dtype)
    tl.store(peer + at, tl.load(x_N + at) + tl.program_id(0))


def _integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reshape_split_join_and_permute(dtype: torch.dtype) -> None:
    x_MN = _integers(8, 16, dtype=dtype)
    trans_NM, join_MN = torch.empty(16, 8, dtype=dtype), torch.empty(8, 16, dtype=dtype)
    split_2M, permuted = torch.empty(2, 8, dtype=dtype), torch.empty(2, 8, 8, dtype=dtype)
    _shapes_kernel[(1,)](x_MN, trans_NM, split_2M, join_MN, permuted, M=8, N=16)
    assert torch.equal(trans_NM, x_MN.T)
    assert torch.equal(split_2M, x_MN.view(8, 2, 8).sum(2).T)
    assert torch.equal(join_MN, x_MN.view(8, 8, 2).flip(2).view(8, 16))
    assert torch.equal(permuted, x_MN.view(8, 2, 8).transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_descriptors_of_host_and_device(dtype: torch.dtype) -> None:
    x_EMN = _integers(3, 6, 16, dtype=dtype)  # half of the last tile is out of bounds
    out_EMN = torch.zeros_like(x_EMN)
    w = TensorDescriptor.from_tensor(x_EMN, [1, 4, 16])
    _descriptor_kernel[(3,)](w, x_EMN, out_EMN, E=3, M=6, N=16)
    assert torch.equal(out_EMN, x_EMN + x_EMN)


def test_masked_histogram_and_running_sum() -> None:
    x_N = torch.tensor([3, 0, 3, 1, 3, 0, 2, 3], dtype=torch.int32)
    counts_B, running_N = (torch.empty(n, dtype=torch.int32) for n in (4, 8))
    _integers_kernel[(1,)](x_N, counts_B, running_N, 5, N=8, B=4)
    assert counts_B.tolist() == [1, 1, 0, 3]
    assert running_N.tolist() == [3, 3, 6, 7, 10, 10, 10, 10]


def test_range_accepts_launch_arguments() -> None:
    x_N = torch.tensor([5, 7, 11, 13], dtype=torch.int32)
    total_1 = torch.empty(1, dtype=torch.int32)
    _loop_kernel[(1,)](x_N, total_1, 3, 1)
    assert total_1.item() == 18


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointers_from_a_table_of_addresses(dtype: torch.dtype) -> None:
    x_N = _integers(8, dtype=dtype)
    peers = [torch.zeros_like(x_N) for _ in range(3)]
    addresses_W = torch.tensor([peer.data_ptr() for peer in peers])
    with pytest.raises(IndexError, match="_peer_kernel"):
        _peer_kernel[(3,)](addresses_W, x_N, N=8)
    for peer in peers:
        register(peer.data_ptr(), 8 * dtype.itemsize)
    _peer_kernel[(3,)](addresses_W, x_N, N=8)
    for rank, peer in enumerate(peers):
        unregister(peer.data_ptr())
        assert torch.equal(peer, x_N + rank)
