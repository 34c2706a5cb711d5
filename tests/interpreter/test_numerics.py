"""bfloat16 arithmetic of interpreted kernels equals that of torch, bit for bit."""

# Calls pass plain values for parameters that a kernel annotates as tl.constexpr.
# pyright: reportArgumentType=false

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl


N = 4096
SPECIAL_BITS = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]


@triton.jit
def _convert_kernel(x_N, y_N, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    y = tl.load(x_N + at)  # with OP "store", the store converts
    if OP == "cast":
        y = y.to(y_N.dtype.element_ty)
    elif OP == "exp":
        y = tl.exp(y)
    elif OP == "sigmoid":
        y = tl.sigmoid(y)
    tl.store(y_N + at, y)


@triton.jit
def _binary_kernel(a_N, b_N, y_N, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_N + at), tl.load(b_N + at)
    if OP == "add":
        y = a + b
    elif OP == "mul":
        y = a * b
    elif OP == "div":
        y = a / b
    elif OP == "neg":
        y = -a
    elif OP == "maximum":
        y = tl.maximum(a, b)
    elif OP == "where":
        y = tl.where(a < b, a, b)
    tl.store(y_N + at, y)


@triton.jit
def _compare_kernel(a_N, b_N, y_6N, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_N + at), tl.load(b_N + at)
    tl.store(y_6N + at, a < b)
    tl.store(y_6N + N + at, a <= b)
    tl.store(y_6N + 2 * N + at, a > b)
    tl.store(y_6N + 3 * N + at, a >= b)
    tl.store(y_6N + 4 * N + at, a == b)
    tl.store(y_6N + 5 * N + at, a != b)


@triton.jit
def _reduce_kernel(x_MN, sum_M, sum_N, y_5M, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_MN + rows[:, None] * N + columns[None, :])
    tl.store(sum_M + rows, tl.sum(x, axis=1))
    tl.store(sum_N + columns, tl.sum(x, axis=0))
    tl.store(y_5M + rows, tl.max(x, axis=1))
    tl.store(y_5M + M + rows, tl.min(x, axis=1))
    tl.store(y_5M + 2 * M + rows, tl.argmax(x, axis=1).to(tl.float32))
    tl.store(y_5M + 3 * M + rows, tl.argmin(x, axis=1).to(tl.float32))
    tl.store(y_5M + 4 * M + rows, tl.sum(x))


@triton.jit
def _dot_kernel(a_MK, b_KN, c_MN, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_MK + m * K + tl.arange(0, K)[None, :])
    b = tl.load(b_KN + tl.arange(0, K)[:, None] * N + n)
    tl.store(c_MN + m * N + n, tl.dot(a, b, tl.full((M, N), 1.0, tl.float32)))


def _random_bfloat16(seed: int) -> torch.Tensor:
    """Return bfloat16 values of random bits; the first ones are special values of both signs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, (N,), generator=generator)
    order = torch.randperm(2 * len(SPECIAL_BITS), generator=generator)
    special = torch.tensor(SPECIAL_BITS + [0x8000 | bits for bits in SPECIAL_BITS])
    bits[: len(order)] = special[order]
    return bits.to(torch.uint16).view(torch.bfloat16)


def _random_float32(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 32, (N,), generator=generator)
    # Ties of rounding and the values next to them; the last value rounds up to infinity.
    halfway = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7F8000]
    bits[:6] = torch.tensor(halfway)
    bits[6:10] = torch.tensor([0x7F800000, 0xFF800000, 0x7F800001, 0x00000001])
    return bits.to(torch.uint32).view(torch.float32)


def _convert(x_N: torch.Tensor, dtype: torch.dtype, op: str = "cast") -> torch.Tensor:
    y_N = torch.empty(x_N.shape, dtype=dtype)
    _convert_kernel[(1,)](x_N, y_N, OP=op, N=len(x_N))
    return y_N


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that two tensors have the same bits, where all NaNs count as equal."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual[~nan].view(words), expected[~nan].view(words))


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, "cast"), (torch.float16, "store"), (torch.float64, "cast")]
)
def test_rounding_to_bfloat16(dtype: torch.dtype, op: str) -> None:
    x_N = _random_float32(0).to(dtype)
    _assert_same_bits(_convert(x_N, torch.bfloat16, op), x_N.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_bfloat16_widened(dtype: torch.dtype) -> None:
    x_N = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    _assert_same_bits(_convert(x_N, dtype), x_N.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_bfloat16_from_and_to_integers(dtype: torch.dtype) -> None:
    x_N = torch.randint(-128, 128, (N,), generator=torch.Generator().manual_seed(0)).to(dtype)
    y_N = _convert(x_N, torch.bfloat16)
    _assert_same_bits(y_N, x_N.to(torch.bfloat16))
    assert torch.equal(_convert(y_N, dtype), x_N)


def test_large_integers_are_rounded() -> None:
    x_N = torch.arange(N, dtype=torch.int32) * 65537
    _assert_same_bits(_convert(x_N, torch.bfloat16), x_N.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda a, b: a + b),
        ("mul", lambda a, b: a * b),
        ("div", lambda a, b: (a.float() / b.float()).to(a.dtype)),
        ("neg", lambda a, b: torch.zeros_like(a) - a),
        ("where", lambda a, b: torch.where(a < b, a, b)),
        ("maximum", torch.maximum),
    ],
)
def test_arithmetic(
    op: str, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    a_N, b_N = _random_bfloat16(0), _random_bfloat16(1)
    if op == "maximum":  # which NaN or zero it returns is not defined
        a_N, b_N = (x.nan_to_num(1.0) + 0.0 for x in (a_N, b_N))
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _binary_kernel[(1,)](a_N, b_N, y_N, OP=op, N=N)
    if op == "neg":  # before version 3.9, Triton negates 0 to 0, not to -0
        y_N += 0.0
    _assert_same_bits(y_N, expected(a_N, b_N))


def test_comparisons() -> None:
    a_N, b_N = _random_bfloat16(2), _random_bfloat16(3)
    b_N[N // 2 :] = a_N[N // 2 :]
    y_6N = torch.empty(6, N, dtype=torch.bool)
    _compare_kernel[(1,)](a_N, b_N, y_6N, N=N)
    expected = [a_N < b_N, a_N <= b_N, a_N > b_N, a_N >= b_N, a_N == b_N, a_N != b_N]
    assert torch.equal(y_6N, torch.stack(expected))


def test_reductions_round_once() -> None:
    x_MN = torch.full((4, 64), 1.0, dtype=torch.bfloat16)
    x_MN[:, 0] = 256.0  # 256 + 1 is 256 in bfloat16
    x_MN[:, 9] = 0.0
    sum_M, sum_N = torch.empty(4).bfloat16(), torch.empty(64).bfloat16()
    y_5M = torch.empty(5, 4)
    _reduce_kernel[(1,)](x_MN, sum_M, sum_N, y_5M, M=4, N=64)
    assert sum_M.tolist() == [318.0] * 4
    assert sum_N[:10].tolist() == [1024.0] + [4.0] * 8 + [0.0]
    # The sum 1272 of all, the maximum and minimum of each row, and their places.
    assert y_5M.tolist() == [[256.0] * 4, [0.0] * 4, [0.0] * 4, [9.0] * 4, [1272.0] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dot(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a_MK = torch.randint(-4, 5, (16, 32), generator=generator).to(dtype)
    b_KN = torch.randint(-4, 5, (32, 64), generator=generator).to(dtype)
    c_MN = torch.empty(16, 64)
    _dot_kernel[(1,)](a_MK, b_KN, c_MN, M=16, K=32, N=64)
    assert torch.equal(c_MN, a_MK.float() @ b_KN.float() + 1)


def test_overflow_is_infinite_without_a_warning() -> None:
    x_N = torch.tensor([-1000.0, 0.0, 1.0, 1000.0])
    torch.testing.assert_close(_convert(x_N, torch.float32, "sigmoid"), x_N.sigmoid())
    torch.testing.assert_close(_convert(x_N, torch.float32, "exp"), x_N.exp())
