"""Compile the kernels for sm_90 without a GPU; check shared memory, spills and PTX of signals.

The interpreter cannot check a barrier before a release, fences, or the width of loads. In the
process of the tests, Triton interprets. Therefore this file is also a program: it calls the launch
functions and compiles the kernels that they would launch.
"""

import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.core.types import Experts, Routing
from halley.fused.config import KernelConfig
from halley.fused.kernels.peer import CLOCK_LANES
from halley.ops.kernels import route
from halley.ops.kernels.launch import Launcher, lay_out
from halley.ops.kernels.tiles import weight_gemm
from halley.symm_mem.heap import SymmTensor
from tests.fused import kernel_rank
from tests.fused.kernel_case import KernelCase
from tests.fused.kernel_rank import KernelRank, SavedCall


# The sizes of Qwen3-30B-A3B. With fewer experts and choices, kernels need fewer registers.
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE = 128, 8, 2048, 768
NUM_RANKS, NUM_TOKENS, NUM_SMS = 4, 8192, 132
DTYPE = torch.bfloat16
CASE = KernelCase(
    num_tokens_CW=((NUM_TOKENS,) * NUM_RANKS,), num_experts=NUM_EXPERTS, top_k=TOP_K,
    hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE, dtype=DTYPE, block_slots=256,
    config=KernelConfig(num_programs=NUM_SMS),
)  # fmt: skip
MAX_MARKS = (0, 1024)  # of the record of a program, see kernels/marks.py
MAX_SHARED_BYTES = 232448  # of a CTA on sm_90
SM_BYTES = 233472  # shared memory of an SM
RESERVED_BYTES = 1024  # of these, for each CTA
SM_REGISTERS = 65536
# Kernels with a register limit, so that they fit beside another CTA; they spill outside of loops.
MAY_SPILL = {
    "make_plan.plan_kernel",
    "dispatch_dgrad.arrived_gemm_kernel",
    "dispatch_dgrad.publish_rows_kernel",  # 8 bytes, with Triton 3.9
    "gemm_combine.combine_kernel",
    "dgrad_combine.combine_kernel",
}
# The GEMM of each launch function, and the kernel that moves rows beside it.
FETCH, COMBINE = ("arrived_gemm_kernel", "fetch_kernel"), ("chunked_gemm_kernel", "combine_kernel")
PAIRS = {
    "dispatch_gemm": FETCH, "dispatch_dgrad": FETCH,
    "gemm_combine": COMBINE, "dgrad_combine": COMBINE,
}  # fmt: skip
# Waits and marks (``kernels/marks.py``) in the code of a kernel.
NUM_WAITS_AND_MARKS = {
    "plan_kernel": (4, 9), "publish_rows_kernel": (1, 4), "fetch_kernel": (0, 4),
    "arrived_gemm_kernel": (1, 5), "chunked_gemm_kernel": (0, 4), "combine_kernel": (2, 8),
}  # fmt: skip
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled kernel and the resources of its CTAs."""

    ptx: str
    types: list[str]
    num_ctas: int
    num_warps: int
    num_registers: int
    num_spilled_bytes: int
    num_shared_bytes: int
    is_serialized: bool

    def lines(self) -> list[str]:
        """Return the instructions and labels, without comments and directives."""
        lines = (line.partition("//")[0].strip() for line in self.ptx.splitlines())
        return [line for line in lines if line and not line.startswith((".", "{", "}"))]


class MetaHeap:
    """Returns symmetric tensors without memory."""

    rank = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        ptrs_W = torch.empty(NUM_RANKS, dtype=torch.int64)
        return SymmTensor(local=torch.empty(shape, dtype=dtype, device="meta"), ptrs_W=ptrs_W)


def _launch_all(*, max_marks: int) -> dict[str, tuple[Any, ...]]:
    """Call all launch functions with the sizes of a model; return what they would launch.

    With ``max_marks``, leave out the kernels without marks.
    """
    case = replace(CASE, max_marks=max_marks)
    launches: dict[str, tuple[Any, ...]] = {}

    def record(launcher: Launcher, *args: Any, **options: Any) -> None:
        launches[f"{function}.{launcher.kernel.__name__}"] = (launcher.kernel, *args, options)

    Launcher.__call__ = record  # pyright: ignore[reportAttributeAccessIssue]
    num_local, inner_size = NUM_EXPERTS // NUM_RANKS, INTERMEDIATE_SIZE
    up_LGD = torch.empty(num_local, 2 * inner_size, HIDDEN_SIZE, dtype=DTYPE, device="meta")
    down_LDF = torch.empty(num_local, HIDDEN_SIZE, inner_size, dtype=DTYPE, device="meta")
    kernel_rank.make_experts = lambda case: None
    kernel_rank.share_of = lambda experts, rank, num_ranks: Experts(
        up_LGD=up_LGD, down_LDF=down_LDF, activation="swiglu"
    )
    rank = KernelRank(MetaHeap(), case)  # pyright: ignore[reportArgumentType]
    x_TD = torch.empty(NUM_TOKENS, HIDDEN_SIZE, dtype=DTYPE)
    idx_TK = torch.empty(NUM_TOKENS, TOP_K, dtype=torch.int64)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=torch.empty(NUM_TOKENS, TOP_K))
    function = "make_plan"
    rank.make_plan(x_TD, routing)
    rows = rank.make_rows(32 * CASE.config.block_m)
    saved = SavedCall(plan=rank.plan, rows=rows, routing=routing)
    function = "dispatch_gemm"
    rank.dispatch_gemm(rows, fused=False)
    function = "gemm_combine"
    rank.gemm_combine(rows, fused=False)
    function = "dispatch_dgrad"
    made = rank.dispatch_dgrad(x_TD, saved, fused=False)
    function = "dgrad_combine"
    rank.dgrad_combine(made, saved, fused=False)
    if max_marks:
        return launches
    counts_WL = torch.empty(NUM_RANKS, num_local, dtype=torch.int64)
    function = "route"
    route.sort_slots(idx_TK, NUM_EXPERTS)
    route.take_slots(idx_TK, counts_WL.flatten(), NUM_TOKENS)
    route.group_rows(counts_WL, len(rows.x_RD))
    ranges_L = torch.empty(num_local, dtype=torch.int32)
    for accumulate, out_LDF in ((False, down_LDF), (True, down_LDF.float())):
        function = f"weight_gemm{'_add' * accumulate}"
        weight_gemm(
            out_LDF, rows.x_RD, rows.h_RF, expert_begin=ranges_L, expert_rows=ranges_L,
            tile=CASE.config.weight, num_programs=NUM_SMS, accumulate=accumulate,
        )  # fmt: skip
    return launches


def _type_of(arg: object, annotation: str) -> str:
    if isinstance(arg, torch.Tensor):
        return f"*{TYPES[arg.dtype]}"
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{TYPES[arg.base.dtype]}{list(arg.block_shape)}>"
    return annotation or "i32"


def _compile(kernel: Any, num_ctas: int, args: Any, constants: Any, options: Any) -> dict[str, Any]:
    types = [_type_of(a, p.annotation) for a, p in zip(args, kernel.params, strict=False)]
    all_types = types + ["constexpr"] * len(constants)
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(kernel.arg_names, all_types, strict=True)),
        constexprs={(len(args) + i,): value for i, value in enumerate(constants)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
        },
    )
    chosen = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    if options.get("max_registers"):
        chosen["maxnreg"] = options["max_registers"]
    with redirect_stdout(io.StringIO()) as log:
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
    report = log.getvalue()  # of ptxas -v; see compile_in_process
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return {
        "ptx": binary.asm["ptx"],
        "types": types,
        "num_ctas": num_ctas,
        "num_warps": binary.metadata.num_warps,
        "num_registers": int(registers),
        "num_spilled_bytes": int(spilled),
        "num_shared_bytes": binary.metadata.shared,
        "is_serialized": "wgmma.mma_async instructions are serialized" in report,
    }


def compile_in_process() -> list[dict[str, Compiled]]:
    """Compile the kernels in a process in which Triton compiles, for each number of marks."""
    # A kernel from the cache would have no log.
    with tempfile.TemporaryDirectory() as cache:
        options = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        result = subprocess.run(
            [sys.executable, "-m", "tests.fused.test_compiled"],
            env=os.environ | options,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return [{name: Compiled(**each) for name, each in kernels.items()} for kernels in found]


def find_unguarded_releases(lines: list[str]) -> list[str]:
    """Return the releases that may come before a store of another thread of the CTA.

    One thread releases for the whole CTA. So a barrier must be right before the release, without a
    jump target, a store or another release between them. Only additions to counters may share a
    barrier, since one addition of a tensor becomes several instructions.
    """
    unguarded = []
    for index, line in enumerate(lines):
        if not re.search(r"atom\S*\.sys\.(acq_rel|release)|(atom|st|red)\S*\.release", line):
            continue
        for earlier in reversed(lines[:index]):
            if earlier.startswith("bar.sync"):
                break
            is_shared = "release.add" in line and "release.add" in earlier
            is_store = re.search(r"\b(st|red|cp|atom)\.", earlier) and not is_shared
            if is_store or earlier.startswith("$L__BB"):
                unguarded.append(line)
                break
        else:
            unguarded.append(line)
    return unguarded


def test_unguarded_release_is_found() -> None:
    release = "@%p1 atom.global.sys.release.exch.b32 %r1, [ %rd1 + 0 ], %r2;"
    store, barrier = "st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };", "bar.sync 0;"
    move = "mov.u32 %r1, 0x0;"
    assert find_unguarded_releases([store, barrier, move, release]) == []
    assert find_unguarded_releases([barrier, move, release, barrier, release]) == []
    assert find_unguarded_releases([barrier, release, move, release]) == [release]
    assert find_unguarded_releases([store, move, release]) == [release]
    assert find_unguarded_releases([barrier, store, release]) == [release]
    assert find_unguarded_releases([barrier, "$L__BB0_3:", release]) == [release]


def test_compiled_kernels_fit_and_signal_correctly() -> None:
    for compiled, max_marks in zip(compile_in_process(), MAX_MARKS, strict=True):
        _check_kernels(compiled, max_marks=max_marks)


def _check_kernels(compiled: dict[str, Compiled], *, max_marks: int) -> None:
    for name, kernel in compiled.items():
        _check_clock(name, kernel, max_marks=max_marks)
        _check_resources(name, kernel)
        assert find_unguarded_releases(kernel.lines()) == [], name
        _check_parameters(name, kernel)
    for function, (gemm, move) in PAIRS.items():
        _check_tiles(function, compiled[f"{function}.{gemm}"])
        _check_fit(function, [compiled[f"{function}.{gemm}"], compiled[f"{function}.{move}"]])
    signalling = [
        "make_plan.plan_kernel",
        "dispatch_dgrad.publish_rows_kernel",
        "gemm_combine.combine_kernel",
        "dgrad_combine.combine_kernel",
    ]
    fetching = ["dispatch_gemm.fetch_kernel", "dispatch_dgrad.fetch_kernel"]
    for name in signalling:
        _check_signals(name, compiled[name])
    for name in (*signalling, *fetching):
        _check_copies(name, compiled[name])
    for function in ("dispatch_gemm", "dispatch_dgrad"):
        _check_fence(compiled[f"{function}.arrived_gemm_kernel"])
    for function in ("gemm_combine", "dgrad_combine"):
        _check_counted_tiles(compiled[f"{function}.chunked_gemm_kernel"])


def _check_resources(name: str, kernel: Compiled) -> None:
    """A CTA fits on an SM, and so do all CTAs that a launch has for each SM."""
    assert kernel.num_spilled_bytes == 0 or name in MAY_SPILL, name
    assert not kernel.is_serialized, name
    assert kernel.num_shared_bytes <= MAX_SHARED_BYTES, name
    if name.startswith("weight_gemm"):
        _check_fit(name, [kernel] * (kernel.num_ctas // NUM_SMS))


def _check_parameters(name: str, kernel: Compiled) -> None:
    """The launcher packs parameters with the sizes that the kernel reads."""
    found = re.findall(
        r"\.param (?:\.align \d+ )?\.(\w+)[^\n]*_param_\d+(?:\[(\d+)\])?", kernel.ptx
    )
    sizes = [int(count or 1) * int(kind[1:]) // 8 for kind, count in found]
    packer, offsets = lay_out(kernel.types)
    codes = re.findall(r"(\d*)([siqQb])", packer.format)
    assert [struct.calcsize(f"={count}{code}") for count, code in codes] == sizes, name
    assert len(offsets) == len(sizes), name


def _check_clock(name: str, kernel: Compiled, *, max_marks: int) -> None:
    """Kernels read the clock in waits only, and with records once for each of their marks."""
    num_waits, num_marks = NUM_WAITS_AND_MARKS.get(name.partition(".")[2], (0, 0))
    reads_of_wait = CLOCK_LANES.value // (32 * kernel.num_warps)
    num_reads = num_waits * reads_of_wait + (num_marks if max_marks else 0)
    assert sum("%globaltimer" in line for line in kernel.lines()) == num_reads, name


def _check_fit(name: str, ctas: list[Compiled]) -> None:
    """These CTAs fit on one SM together."""
    assert sum(kernel.num_shared_bytes + RESERVED_BYTES for kernel in ctas) <= SM_BYTES, name
    # Registers are allocated by eights for each thread.
    registers = sum(32 * kernel.num_warps * -(-kernel.num_registers // 8) * 8 for kernel in ctas)
    assert registers <= SM_REGISTERS, name


def _check_copies(name: str, kernel: Compiled) -> None:
    """Rows are copied 16 bytes at a time."""
    assert "ld.global.v4.b32" in kernel.ptx, name
    assert "st.global.v4.b32" in kernel.ptx, name
    assert not re.search(r"(ld|st)\.global\S*\.b16", kernel.ptx), name


def _check_tiles(name: str, kernel: Compiled) -> None:
    """Tensor cores multiply tiles that TMA loads; TMA stores all outputs but gradients."""
    for instruction in (
        r"wgmma\.mma_async\.sync\.aligned\.m64n256k16\.f32\.bf16\.bf16",
        r"cp\.async\.bulk\.tensor\.2d\.shared::(cta|cluster)\.global",  # cluster: Triton 3.6
        r"cp\.async\.bulk\.tensor\.4d\.shared::(cta|cluster)\.global",
    ):
        assert re.search(instruction, kernel.ptx), f"{name}: {instruction}"
    is_stored_so = "cp.async.bulk.tensor.2d.global.shared::cta" in kernel.ptx
    assert is_stored_so == (name != "dispatch_dgrad"), name


def _check_signals(name: str, kernel: Compiled) -> None:
    """Flags of other ranks are written and polled at system scope."""
    lines = kernel.lines()
    # The plan kernel signals routing, rows, and an overflow of rows.
    wanted = NUM_RANKS * (3 if name.startswith("make_plan") else 1)
    assert sum("st.release.sys.global" in line for line in lines) == wanted, name
    acquire = r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)"
    assert any(re.search(acquire, line) for line in lines), name
    # The flag also releases the stores of the other CTAs of this rank.
    assert any("atom.global.sys.acq_rel.add" in line for line in lines), name


def _check_fence(kernel: Compiled) -> None:
    """A proxy fence orders the stores of other CTAs before the TMA loads."""
    lines = kernel.lines()
    loads = r"bulk\.tensor\.2d\.shared::(cta|cluster)\.global"
    load = next(i for i, line in enumerate(lines) if re.search(loads, line))
    fence = _last(lines[:load], "fence.proxy.async;")
    assert _last(lines[:load], ".acquire.") < fence


def _check_counted_tiles(kernel: Compiled) -> None:
    """A tile is counted after the TMA stores of all threads are complete."""
    lines = kernel.lines()
    add = r"(atom|red)\.global\.gpu\.release\.add"  # "red" since Triton 3.9
    counted = [i for i, line in enumerate(lines) if re.search(add, line)]
    assert counted
    for index in counted:
        waited = _last(lines[:index], "cp.async.bulk.wait_group 0")
        assert waited < _last(lines[:index], "bar.sync")
        assert _last(lines[:index], "bulk.tensor.2d.global.shared") < waited


def _last(lines: list[str], text: str) -> int:
    """Return the index of the last line that contains the text, -1 if there is none."""
    return max((i for i, line in enumerate(lines) if text in line), default=-1)


if __name__ == "__main__":
    launches = [_launch_all(max_marks=max_marks) for max_marks in MAX_MARKS]
    kernels = [{name: _compile(*launch) for name, launch in each.items()} for each in launches]
    json.dump(kernels, sys.stdout)
