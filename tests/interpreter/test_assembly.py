"""Inline PTX in Triton's interpreter: fences, clock, release stores, unknown instructions."""

# Calls pass plain values for parameters that a kernel annotates as tl.constexpr.
# pyright: reportArgumentType=false

import time

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _fence_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [tl.load(x_N + at)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    one = tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [tl.full((), 1, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    none = tl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(y_N + at, x + one + none)


@triton.jit
def _clock_kernel(time_1, lanes_N, N: tl.constexpr):
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(time_1, now)
    lanes = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.zeros((N,), tl.int32)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(lanes_N + tl.arange(0, N), lanes)


@triton.jit
def _store_kernel(word_1, value):
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
        [(word_1 + 1).to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _unknown_kernel():
    tl.inline_asm_elementwise(
        "brev.b32 $0, $1;", "=r,r", [tl.full((), 1, tl.int32)],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


def test_fences_and_waits_return_their_operand() -> None:
    x_N = torch.arange(8, dtype=torch.int32)
    y_N = torch.empty_like(x_N)
    _fence_kernel[(1,)](x_N, y_N, N=8)
    assert torch.equal(y_N, x_N + 1)


def test_clock_is_the_clock_of_the_host() -> None:
    time_1, lanes_N = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    before = time.monotonic_ns()
    _clock_kernel[(1,)](time_1, lanes_N, N=4)
    after = time.monotonic_ns()
    assert before <= time_1.item() <= lanes_N[0].item() <= after
    assert len(set(lanes_N.tolist())) == 1


def test_store_release_writes_one_word() -> None:
    words_3 = torch.arange(3, dtype=torch.int32)
    _store_kernel[(1,)](words_3, 7)
    assert words_3.tolist() == [0, 7, 2]


def test_unknown_assembly_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"brev\.b32"):
        _unknown_kernel[(1,)]()
