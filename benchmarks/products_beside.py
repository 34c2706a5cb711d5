# The kernel is Triton, which only looks like Python to a type checker.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""Measure GEMMs beside a kernel that occupies SMs as an NCCL collective does, on one GPU.

The kernel copies data on the GPU and then waits, with the given number of CTAs. It starts on its
own stream together with the first of ten GEMMs. Prints JSON lines: the time of a GEMM alone, its
time beside the kernel, and the delay of the kernel's end, for several numbers of reserved SMs.

    python benchmarks/products_beside.py 4 16 > benchmarks/results/h200x1/products_beside.jsonl
"""

import datetime
import json
import statistics
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from halley.core.timeline import delay_gpu
from halley.ops.sm_carveout import gemm_with_carveout


Gemm = Callable[[int], torch.Tensor]
NUM_GEMMS = 10
NUM_TRIALS = 7
MARGINS = (0, 4, 8, 16, 24, 32)
WORDS = 2**20
HEAD_START_US = 1000.0  # the host is ahead when the GPU begins
# Rows, columns and inner size; of weight gradients of experts also how many.
DENSE = (
    (1024, 4096, 12288),
    (8192, 8192, 2048),
    (4096, 4096, 4096),
    (8192, 5120, 1280),
    (1280, 50264, 8192),
)
GROUPED = ((1280, 5120, 8192, 8), (4096, 14336, 16384, 4))


@triton.jit
def hold(out_ptr, in_ptr, num_words, wait_ns, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.extra.cuda.globaltimer()
    for start in range(tl.program_id(0) * BLOCK, num_words, NUM_PROGRAMS * BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + word, tl.load(in_ptr + word, mask=word < num_words), word < num_words)
    while tl.extra.cuda.globaltimer() - begin < wait_ns:
        pass


def make_gemms() -> dict[str, Gemm]:
    found: dict[str, Gemm] = {}
    for m, n, k in DENSE:
        left, right = randn(m, k), randn(k, n)
        found[f"dense {m} x {n} x {k}"] = lambda margin, left=left, right=right: gemm_with_carveout(
            None, left, right, None, margin
        )
    for m, n, k, num_groups in GROUPED:
        left, right = randn(k, m).t(), randn(k, n)
        ends = torch.arange(1, num_groups + 1, dtype=torch.int32, device="cuda") * (k // num_groups)
        found[f"grouped {num_groups} x {m} x {n} x {k // num_groups}"] = (
            lambda margin, left=left, right=right, ends=ends: gemm_with_carveout(
                None, left, right, ends, margin
            )
        )
    return found


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def time_us(gemm: Gemm, reserved_sms: int, *, num_programs: int, wait_us: float) -> list[float]:
    """Return the medians of a GEMM's time and of the delay of the kernel's end, in microseconds."""
    side, words = torch.cuda.Stream(), torch.zeros(2, WORDS, dtype=torch.int32, device="cuda")
    trials: list[list[float]] = []
    for _ in range(NUM_TRIALS):
        begin, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        delay_gpu(HEAD_START_US)
        begin.record()
        if wait_us:
            side.wait_event(begin)
            with torch.cuda.stream(side):
                wait_ns = round(1e3 * wait_us)
                hold[(num_programs,)](*words, WORDS, wait_ns, num_programs, 4096, num_warps=16)
                done.record()
        for _ in range(NUM_GEMMS):
            gemm(reserved_sms)
        end.record()
        torch.cuda.synchronize()
        late_us = 1e3 * begin.elapsed_time(done) - wait_us if wait_us else 0.0
        trials.append([1e3 * begin.elapsed_time(end) / NUM_GEMMS, late_us])
    return [statistics.median(column) for column in zip(*trials, strict=True)]


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]]
    for name, gemm in make_gemms().items():
        plain_us, _ = time_us(gemm, 0, num_programs=1, wait_us=0.0)
        for num_programs in numbers:
            for margin in MARGINS:
                wait_us = 2.5 * NUM_GEMMS * plain_us
                alone_us, _ = time_us(gemm, margin, num_programs=1, wait_us=0.0)
                beside_us, late_us = time_us(
                    gemm, margin, num_programs=num_programs, wait_us=wait_us
                )
                line = {
                    "case": "products_beside",
                    "product": name,
                    "taken": num_programs,
                    "sm_margin": margin,
                    "plain_us": round(plain_us, 1),
                    "alone_us": round(alone_us, 1),
                    "beside_us": round(beside_us, 1),
                    "beside_over_plain": round(beside_us / plain_us, 3),
                    "late_us": round(late_us, 1),
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
