"""bfloat16 in the interpreter against torch, bit for bit."""

# Triton annotates the constexpr parameters of a kernel with what the kernel sees of them.
# pyright: reportArgumentType=false

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl


N = 4096
SPECIAL_BITS = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]


@triton.jit
def _cast_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.load(x_N + at).to(y_N.dtype.element_ty))


@triton.jit
def _store_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.load(x_N + at))


@triton.jit
def _truncate_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.load(x_N + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _binary_kernel(a_N, b_N, y_N, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(a_N + at)
    b = tl.load(b_N + at)
    if OP == "add":
        y = a + b
    elif OP == "sub":
        y = a - b
    elif OP == "mul":
        y = a * b
    elif OP == "div":
        y = a / b
    elif OP == "neg":
        y = -a
    elif OP == "double":
        y = a * 2.0
    elif OP == "maximum":
        y = tl.maximum(a, b)
    elif OP == "minimum":
        y = tl.minimum(a, b)
    elif OP == "where":
        y = tl.where(a < b, a, b)
    elif OP == "abs":
        y = tl.abs(a)
    elif OP == "clamp":
        y = tl.clamp(a, -1.0, 1.0)
    tl.store(y_N + at, y)


@triton.jit
def _compare_kernel(a_N, b_N, y_6N, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(a_N + at)
    b = tl.load(b_N + at)
    tl.store(y_6N + at, a < b)
    tl.store(y_6N + N + at, a <= b)
    tl.store(y_6N + 2 * N + at, a > b)
    tl.store(y_6N + 3 * N + at, a >= b)
    tl.store(y_6N + 4 * N + at, a == b)
    tl.store(y_6N + 5 * N + at, a != b)


@triton.jit
def _fma_kernel(a_N, b_N, c_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.fma(tl.load(a_N + at), tl.load(b_N + at), tl.load(c_N + at)))


@triton.jit
def _flag_kernel(a_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, (tl.load(a_N + at) > 0).to(tl.bfloat16))


@triton.jit
def _sum_kernel(x_MN, by_row_M, by_column_N, all_1, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    x = tl.load(x_MN + rows[:, None] * N + columns[None, :])
    tl.store(by_row_M + rows, tl.sum(x, axis=1))
    tl.store(by_column_N + columns, tl.sum(x, axis=0))
    tl.store(all_1, tl.sum(x))


@triton.jit
def _extrema_kernel(x_MN, y_5M, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    x = tl.load(x_MN + rows[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(y_5M + rows, tl.max(x, axis=1))
    tl.store(y_5M + M + rows, tl.min(x, axis=1))
    tl.store(y_5M + 2 * M + rows, tl.argmax(x, axis=1).to(tl.float32))
    tl.store(y_5M + 3 * M + rows, tl.argmin(x, axis=1).to(tl.float32))
    tl.store(y_5M + 4 * M + rows, tl.sum(tl.cumsum(x, axis=1), axis=1))


@triton.jit
def _dot_kernel(a_MK, b_KN, c_MN, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(a_MK + m * K + tl.arange(0, K)[None, :])
    b = tl.load(b_KN + tl.arange(0, K)[:, None] * N + n)
    total = tl.full((M, N), 1.0, tl.float32)
    total = tl.dot(a, b, total)
    tl.store(c_MN + m * N + n, total)


@triton.jit
def _exp_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.exp(tl.load(x_N + at)))


@triton.jit
def _sigmoid_kernel(x_N, y_N, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_N + at, tl.sigmoid(tl.load(x_N + at).to(tl.float32)))


def _random_bfloat16(seed: int, size: int = N) -> torch.Tensor:
    """Return values of random bits, the special ones of both signs first."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, (size,), generator=generator)
    order = torch.randperm(2 * len(SPECIAL_BITS), generator=generator)
    special = torch.tensor(SPECIAL_BITS + [0x8000 | bits for bits in SPECIAL_BITS])
    bits[: len(order)] = special[order]
    return bits.to(torch.uint16).view(torch.bfloat16)


def _random_float32(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 32, (N,), generator=generator)
    # Ties, and the values next to them, where rounding is decided; the last carries into infinity.
    bits[:6] = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7F8000]
    )
    bits[6:10] = torch.tensor([0x7F800000, 0xFF800000, 0x7F800001, 0x00000001])
    return bits.to(torch.uint32).view(torch.float32)


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare all bits, except that any NaN is like any other."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual[~nan].view(words), expected[~nan].view(words))


@pytest.mark.parametrize("kernel", [_cast_kernel, _store_kernel], ids=["explicit", "by store"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_rounding_to_bfloat16(kernel: triton.JITFunction, dtype: torch.dtype) -> None:
    x_N = _random_float32(0).to(dtype)
    y_N = torch.empty(N, dtype=torch.bfloat16)
    kernel[(1,)](x_N, y_N, N=N)
    _assert_same_bits(y_N, x_N.to(torch.bfloat16))


def test_truncation_to_bfloat16() -> None:
    x_N = _random_float32(1).nan_to_num(0.0)
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _truncate_kernel[(1,)](x_N, y_N, N=N)
    assert torch.equal(y_N.view(torch.int16).int(), x_N.view(torch.int32) >> 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_every_bfloat16_widened(dtype: torch.dtype) -> None:
    x_N = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    y_N = torch.empty(1 << 16, dtype=dtype)
    _cast_kernel[(1,)](x_N, y_N, N=1 << 16)
    _assert_same_bits(y_N, x_N.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool])
def test_bfloat16_from_and_to_integers(dtype: torch.dtype) -> None:
    x_N = torch.randint(-128, 128, (N,), generator=torch.Generator().manual_seed(0)).to(dtype)
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x_N, y_N, N=N)
    _assert_same_bits(y_N, x_N.to(torch.bfloat16))
    back_N = torch.empty_like(x_N)
    _cast_kernel[(1,)](y_N, back_N, N=N)
    assert torch.equal(back_N, x_N)


def test_large_integers_are_rounded() -> None:
    x_N = torch.arange(N, dtype=torch.int32) * 65537
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x_N, y_N, N=N)
    _assert_same_bits(y_N, x_N.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8_widened_to_bfloat16(dtype: torch.dtype) -> None:
    x_N = torch.arange(256).to(torch.uint8).view(dtype)
    finite_N = x_N.float().isfinite()  # the interpreter knows no NaN of float8_e4m3fn
    y_N = torch.empty(256, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x_N, y_N, N=256)
    _assert_same_bits(y_N[finite_N], x_N.to(torch.bfloat16)[finite_N])


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("div", lambda a, b: (a.float() / b.float()).to(a.dtype)),
        ("neg", lambda a, b: torch.zeros_like(a) - a),  # 0 is not negated to -0, on a GPU neither
        ("double", lambda a, b: a * 2),
        ("where", lambda a, b: torch.where(a < b, a, b)),
        ("abs", lambda a, b: a.abs()),
    ],
)
def test_arithmetic(
    op: str, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    a_N, b_N = _random_bfloat16(0), _random_bfloat16(1)
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _binary_kernel[(1,)](a_N, b_N, y_N, OP=op, N=N)
    _assert_same_bits(y_N, expected(a_N, b_N))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("maximum", torch.maximum),
        ("minimum", torch.minimum),
        ("clamp", lambda a, b: a.clamp(-1, 1)),
    ],
)
def test_extrema_of_pairs(
    op: str, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    a_N, b_N = (torch.randn(N, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    a_N, b_N = a_N.bfloat16(), b_N.bfloat16()
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _binary_kernel[(1,)](a_N, b_N, y_N, OP=op, N=N)
    assert torch.equal(y_N, expected(a_N, b_N))


def test_comparisons() -> None:
    a_N, b_N = _random_bfloat16(2), _random_bfloat16(3)
    b_N[N // 2 :] = a_N[N // 2 :]
    y_6N = torch.empty(6, N, dtype=torch.bool)
    _compare_kernel[(1,)](a_N, b_N, y_6N, N=N)
    expected = [a_N < b_N, a_N <= b_N, a_N > b_N, a_N >= b_N, a_N == b_N, a_N != b_N]
    assert torch.equal(y_6N, torch.stack(expected))


def test_comparison_as_a_number() -> None:
    a_N = _random_bfloat16(4)
    y_N = torch.empty(N, dtype=torch.bfloat16)
    _flag_kernel[(1,)](a_N, y_N, N=N)
    assert torch.equal(y_N, (a_N > 0).bfloat16())


def test_fused_multiply_add_rounds_once() -> None:
    a_N = torch.tensor([1.03125, 3.0]).bfloat16()  # 1 + 2**-5, whose rounded square is 1.0625
    c_N = torch.tensor([-1.0625, 0.5]).bfloat16()
    y_N = torch.empty(2, dtype=torch.bfloat16)
    _fma_kernel[(1,)](a_N, a_N, c_N, y_N, N=2)
    assert y_N.tolist() == [2**-10, 9.5]


def test_sums_are_rounded_once() -> None:
    x_MN = torch.full((4, 64), 1.0, dtype=torch.bfloat16)
    x_MN[:, 0] = 256.0  # 256 + 1 is 256 in bfloat16
    by_row_M = torch.empty(4, dtype=torch.bfloat16)
    by_column_N = torch.empty(64, dtype=torch.bfloat16)
    all_1 = torch.empty(1, dtype=torch.bfloat16)
    _sum_kernel[(1,)](x_MN, by_row_M, by_column_N, all_1, M=4, N=64)
    assert by_row_M.tolist() == [320.0] * 4  # 319 lies between 318 and 320, and goes to the even
    assert by_column_N.tolist() == [1024.0] + [4.0] * 63
    assert all_1.tolist() == [1280.0]  # 1276 lies between 1272 and 1280


def test_extrema_of_rows_and_running_sums() -> None:
    x_MN = torch.randint(-99, 99, (4, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    x_MN[:, 7], x_MN[:, 9] = 100.0, -100.0
    y_5M = torch.empty(5, 4)
    _extrema_kernel[(1,)](x_MN, y_5M, M=4, N=32)
    assert y_5M[:4].tolist() == [[100.0] * 4, [-100.0] * 4, [7.0] * 4, [9.0] * 4]
    assert torch.equal(y_5M[4], x_MN.float().cumsum(1).sum(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a_MK = torch.randint(-4, 5, (16, 32), generator=generator).to(dtype)
    b_KN = torch.randint(-4, 5, (32, 64), generator=generator).to(dtype)
    c_MN = torch.empty(16, 64)
    _dot_kernel[(1,)](a_MK, b_KN, c_MN, M=16, K=32, N=64)
    assert torch.equal(c_MN, a_MK.float() @ b_KN.float() + 1)


def test_exp_of_bfloat16_is_refused_as_on_a_gpu() -> None:
    x_N = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\['fp32', 'fp64'\] but got bf16"):
        _exp_kernel[(1,)](x_N, x_N, N=4)


def test_overflow_is_infinite_without_a_warning() -> None:
    x_N = torch.tensor([-1000.0, 0.0, 1.0, 1000.0])
    y_N = torch.empty(4)
    _sigmoid_kernel[(1,)](x_N, y_N, N=4)
    torch.testing.assert_close(y_N, x_N.sigmoid())
    _exp_kernel[(1,)](x_N, y_N, N=4)
    torch.testing.assert_close(y_N, x_N.exp())
