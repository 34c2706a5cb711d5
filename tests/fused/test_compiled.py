"""The kernels compiled for sm_90, without a GPU: registers, shared memory, and the PTX of waits.

What the interpreter cannot see: a barrier before a release, fences, the width of loads. Triton
interprets in the process of the tests, so this file also runs as a program of its own, which calls
the launchers on tensors without memory and compiles what they would launch.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs as triton_knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused.kernels import dispatch_gemm, gemm_combine, stage
from halley.fused.kernels import dispatch_plan as plan
from halley.fused.kernels.layout import Layout
from halley.fused.kernels.plan_words import NUM_MARKS
from halley.ops.kernels import route, weight_gemm
from halley.ops.kernels.driver import lay_out
from halley.ops.kernels.gemm_config import Knobs
from halley.ops.kernels.launch import Launcher


MAX_SHARED_BYTES = 232448  # of a program on sm_90
MODELS = {
    "qwen3": {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768},
    "mixtral": {"num_experts": 8, "top_k": 2, "hidden_size": 4096, "intermediate_size": 14336},
}
NUM_RANKS, NUM_TOKENS = 4, 8192
MULTIPROCESSOR_BYTES = 233472  # of shared memory
RESERVED_BYTES = 1024  # of these, for each program
MULTIPROCESSOR_REGISTERS = 65536
# Registers that no loop has need of.
SPILLED_BYTES = {
    "make_plan": 40,
    "dispatch_dgrad.multiply": 60,
    "gemm_combine.move": 64,
    "dgrad_combine.move": 28,
}
MODULES = (plan, stage, dispatch_gemm, gemm_combine, weight_gemm, route)
ROUTE = ("sort_slots", "take_slots", "group_rows", "places_of_part")
FUSED = ("dispatch_gemm", "dispatch_dgrad", "gemm_combine", "dgrad_combine")
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of a kernel."""

    ptx: str
    types: list[str]
    num_warps: int
    num_registers: int
    num_spilled_bytes: int
    num_shared_bytes: int
    is_serialized: bool

    def lines(self) -> list[str]:
        """Return the instructions and labels, without comments and directives."""
        lines = (line.partition("//")[0].strip() for line in self.ptx.splitlines())
        return [line for line in lines if line and not line.startswith((".", "{", "}"))]


def _record_launches() -> dict[str, tuple[Any, ...]]:
    """Let the launchers note what they would launch, by the function that asked for it."""
    launches: dict[str, tuple[Any, ...]] = {}

    def recorder(kernel: Any) -> Callable[..., None]:
        def record(num_programs: int, args: Any, constants: Any, **options: Any) -> None:
            frame = sys._getframe(1)
            name = frame.f_code.co_name
            if name in FUSED:
                is_gemm = kernel.__name__.startswith("multiply")
                name += ".multiply" if is_gemm else ".move"
            if name == "weight_gemm":
                name += ".{0.run}x{0.block_n}".format(frame.f_locals["tile"])
                name += ".wide" * frame.f_locals["is_wide"] + ".add" * frame.f_locals["accumulate"]
            if options.get("overlaps"):
                name += ".beside"
            launches.setdefault(name, (kernel, args, constants, options))

        return record

    for module in MODULES:
        found = {k: each for k, each in vars(module).items() if isinstance(each, Launcher)}
        vars(module).update({k: recorder(each.kernel) for k, each in found.items()})
    return launches


def _launch_all(*, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int) -> None:
    """Call the launchers with the sizes of a model, on tensors without memory."""
    knobs = Knobs()
    layout = Layout(
        num_ranks=NUM_RANKS,
        num_experts=num_experts,
        top_k=top_k,
        max_tokens=NUM_TOKENS,
        block_m=knobs.block_m,
    )
    num_rows, num_local = 32 * knobs.block_m, layout.num_local

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    table = empty(NUM_RANKS, dtype=torch.int64)
    words, plan_words = empty(9, dtype=torch.int32), empty(9, dtype=torch.int32)
    x_TD, weights_TK = empty(NUM_TOKENS, hidden_size), empty(9, top_k, dtype=torch.float32)
    idx_TK = empty(NUM_TOKENS, top_k, dtype=torch.int64)
    x_RD, h_RF = empty(num_rows, hidden_size), empty(num_rows, intermediate_size)
    pre_RG, weight_R = empty(num_rows, 2 * intermediate_size), empty(9, dtype=torch.float32)
    up_LGD = empty(num_local, 2 * intermediate_size, hidden_size)
    down_LDF = empty(num_local, hidden_size, intermediate_size)
    columns = dispatch_gemm.dgrad_columns(intermediate_size, knobs)
    dweight_RC = empty(num_rows, columns, dtype=torch.float32)
    shared: dict[str, Any] = {
        "layout": layout, "num_programs": 132, "status": empty(1, dtype=torch.int64),
        "host_words": empty(4, dtype=torch.int64), "timeout_ns": 10**9,
    }  # fmt: skip
    call: dict[str, Any] = {
        "rank": 0, "words": words, "words_ptrs_W": table,
        "marks": empty(NUM_MARKS, dtype=torch.int32), **shared,
    }  # fmt: skip
    stage_HTD = empty(2, NUM_TOKENS, hidden_size)
    plan.make_plan(plan_words, x_TD, idx_TK, weights_TK, stage_HTD=stage_HTD, **call)
    stage.stage_again(x_TD, weight_R, plan=plan_words, stage_HTD=stage_HTD, **call)
    shared |= {
        "plan": plan_words, "knobs": knobs, "stage_ptrs_W": table, "stage_tokens": NUM_TOKENS,
        "marks": call["marks"], "fused": False,
    }  # fmt: skip
    call |= {"plan": plan_words, "knobs": knobs, "fused": False}
    dispatch_gemm.dispatch_gemm(x_RD, h_RF, pre_RG, up_LGD=up_LGD, gated=True, **shared)
    dispatch_gemm.dispatch_dgrad(
        x_RD, pre_RG, h_RF, dweight_RC, pre_RG=pre_RG, weight_R=weight_R,
        down_LDF=down_LDF, gated=True, **shared,
    )  # fmt: skip
    home: dict[str, Any] = {
        "home_WTD": empty(NUM_RANKS, NUM_TOKENS, hidden_size), "home_ptrs_W": table, **call,
    }  # fmt: skip
    gemm_combine.gemm_combine(x_TD, x_RD, h_RF, down_LDF=down_LDF, **home)
    gemm_combine.dgrad_combine(
        x_TD, weights_TK, x_RD, pre_RG, dweight_RC, up_LGD=up_LGD, topk_idx_TK=idx_TK,
        weights_home_WTK=weights_TK, weights_home_ptrs_W=table, **home,
    )  # fmt: skip
    counts_WL = empty(NUM_RANKS, num_local, dtype=torch.int64)
    route.sort_slots(idx_TK, num_experts)
    route.take_slots(idx_TK, counts_WL.flatten(), NUM_TOKENS)
    route.group_rows(counts_WL, num_rows)
    route.places_of_part(counts_WL, 2, 1, num_rows)
    wide_LDF = empty(*down_LDF.shape, dtype=torch.float32)
    for out_LMN, accumulate, overlaps in (
        (down_LDF, False, False),
        (down_LDF, False, True),
        (down_LDF, True, False),
        (wide_LDF, False, False),
        (wide_LDF, True, False),
    ):
        weight_gemm.weight_gemm(
            out_LMN, x_RD, h_RF, expert_begin=words, expert_rows=words, tile=knobs.weight,
            num_programs=132, accumulate=accumulate, overlaps=overlaps,
        )  # fmt: skip


def _type_of(arg: object, annotation: str) -> str:
    if isinstance(arg, torch.Tensor):
        return f"*{TYPES[arg.dtype]}"
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{TYPES[arg.base.dtype]}{list(arg.block_shape)}>"
    return annotation or "i32"


def _compile(kernel: Any, args: Any, constants: Any, options: Any) -> dict[str, Any]:
    names = kernel.arg_names
    annotations = [param.annotation for param in kernel.params]
    types = [_type_of(arg, a) for arg, a in zip(args, annotations, strict=False)]
    first = len(args)
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types + ["constexpr"] * len(constants), strict=True)),
        constexprs={(first + i,): value for i, value in enumerate(constants)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
        },
    )
    chosen = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    if options.get("max_registers"):
        chosen["maxnreg"] = options["max_registers"]
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(binary.asm["ptx"])
        ptxas = triton_knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name=sm_90a", ptx, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spilled is not None
    assert registers is not None
    return {
        "ptx": binary.asm["ptx"],
        "types": types,
        "num_warps": binary.metadata.num_warps,
        "num_registers": int(registers[1]),
        "num_spilled_bytes": int(spilled[1]),
        "num_shared_bytes": binary.metadata.shared,
        "is_serialized": "wgmma.mma_async instructions are serialized" in report,
    }


def main(model: str) -> None:
    """Compile the kernels of a model and write what came out to standard output."""
    launches = _record_launches()
    _launch_all(**MODELS[model])
    compiled = {name: _compile(*found) for name, found in launches.items()}
    json.dump(compiled, sys.stdout)


def compile_in_process(model: str) -> dict[str, Compiled]:
    """Compile the kernels of a model in a process in which Triton compiles."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.fused.test_compiled", model],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return {name: Compiled(**found) for name, found in json.loads(result.stdout).items()}


def find_unguarded_releases(lines: list[str]) -> list[str]:
    """Return the releases that some thread's stores may follow.

    One thread releases for the whole program: a barrier must stand right before, with no place
    between that a jump leads to, no store and no other release. Only additions to counters may
    share a barrier, since a tensor of them becomes several instructions.
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


@pytest.mark.parametrize("model", MODELS)
def test_what_the_compiler_makes_of_the_kernels(model: str) -> None:
    """One test a model, since each compiles its kernels once."""
    compiled = compile_in_process(model)
    for name, kernel in compiled.items():
        _check_resources(name, kernel)
        if not name.startswith(("weight_gemm", *ROUTE)) and not name.endswith(".multiply"):
            _check_copies(name, kernel)
        assert find_unguarded_releases(kernel.lines()) == [], name
        _check_parameters(name, kernel)
    for name in FUSED:
        _check_tiles(name, compiled[f"{name}.multiply"])
        _check_room(name, compiled[f"{name}.multiply"], compiled[f"{name}.move"])
    weights = {name for name in compiled if name.startswith("weight_gemm")}
    plain = "1x256" if model == "mixtral" else "8x128"  # which has few experts, of many rows
    others = ("1x256.beside", "1x256.add", "1x256.wide", "1x256.wide.add")
    assert weights == {f"weight_gemm.{each}" for each in (plain, *others)}
    _check_room("weights", compiled["weight_gemm.1x256.beside"], compiled["dgrad_combine.move"])
    if model != "mixtral":
        pair = compiled["weight_gemm.8x128"]
        assert 2 * (pair.num_shared_bytes + RESERVED_BYTES) <= MULTIPROCESSOR_BYTES
        assert 2 * 32 * pair.num_warps * pair.num_registers <= MULTIPROCESSOR_REGISTERS
    for name in ("make_plan", "stage_again", "gemm_combine.move", "dgrad_combine.move"):
        _check_signals(name, compiled[name])
    for name in ("dispatch_gemm", "dispatch_dgrad"):
        _check_fence(compiled[f"{name}.multiply"])
    for name in ("gemm_combine", "dgrad_combine"):
        _check_counted_tiles(compiled[f"{name}.multiply"])


def _check_resources(name: str, kernel: Compiled) -> None:
    assert kernel.num_spilled_bytes <= SPILLED_BYTES.get(name, 0), name
    assert not kernel.is_serialized, name
    assert kernel.num_shared_bytes <= MAX_SHARED_BYTES, name


def _check_parameters(name: str, kernel: Compiled) -> None:
    """What is packed for a launch has the sizes that the kernel reads."""
    found = re.findall(
        r"\.param (?:\.align \d+ )?\.(\w+)[^\n]*_param_\d+(?:\[(\d+)\])?", kernel.ptx
    )
    sizes = [int(count or 1) * int(kind[1:]) // 8 for kind, count in found]
    packer, offsets = lay_out(kernel.types)
    codes = re.findall(r"(\d*)([siqQb])", packer.format)
    assert [struct.calcsize(f"={count}{code}") for count, code in codes] == sizes, name
    assert len(offsets) == len(sizes), name


def _check_room(name: str, multiply: Compiled, move: Compiled) -> None:
    """A program of each part fits on one multiprocessor."""
    both = (multiply, move)
    shared = sum(kernel.num_shared_bytes + RESERVED_BYTES for kernel in both)
    assert shared <= MULTIPROCESSOR_BYTES, name
    # Registers are given out by eights a thread.
    registers = sum(32 * kernel.num_warps * -(-kernel.num_registers // 8) * 8 for kernel in both)
    assert registers <= MULTIPROCESSOR_REGISTERS, name


def _check_copies(name: str, kernel: Compiled) -> None:
    """Rows are copied 16 bytes at a time."""
    assert "ld.global.v4.b32" in kernel.ptx, name
    assert "st.global.v4.b32" in kernel.ptx, name
    assert not re.search(r"(ld|st)\.global\S*\.b16", kernel.ptx), name


def _check_tiles(name: str, kernel: Compiled) -> None:
    """Tiles come by tensor memory, and go so but for gradients; tensor cores multiply them."""
    for instruction in (
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        "cp.async.bulk.tensor.2d.shared::cta.global",
        "cp.async.bulk.tensor.4d.shared::cta.global",
    ):
        assert instruction in kernel.ptx, f"{name}: {instruction}"
    is_stored_so = "cp.async.bulk.tensor.2d.global.shared::cta" in kernel.ptx
    assert is_stored_so == (name != "dispatch_dgrad"), name


def _check_signals(name: str, kernel: Compiled) -> None:
    """Peers are signalled and waited for at the scope of the system."""
    lines = kernel.lines()
    # A plan tells all ranks of routing, of rows, and where there is no room for rows.
    wanted = NUM_RANKS * (3 if name == "make_plan" else 1)
    assert sum("st.release.sys.global" in line for line in lines) == wanted, name
    acquire = r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)"
    assert any(re.search(acquire, line) for line in lines), name
    # What other programs of this rank stored for the peers is released with the flag.
    assert any("atom.global.sys.acq_rel.add" in line for line in lines), name


def _check_fence(kernel: Compiled) -> None:
    """Rows that programs stored are fenced from the loads of tensor memory."""
    lines = kernel.lines()
    load = next(i for i, line in enumerate(lines) if "bulk.tensor.2d.shared::cta.global" in line)
    fence = _last(lines[:load], "fence.proxy.async;")
    assert _last(lines[:load], ".acquire.") < fence


def _check_counted_tiles(kernel: Compiled) -> None:
    """A tile is counted when its stores are complete, of all threads."""
    lines = kernel.lines()
    counted = [i for i, line in enumerate(lines) if "atom.global.gpu.release.add" in line]
    assert counted
    for index in counted:
        waited = _last(lines[:index], "cp.async.bulk.wait_group 0")
        assert waited < _last(lines[:index], "bar.sync")
        assert _last(lines[:index], "bulk.tensor.2d.global.shared") < waited


def _last(lines: list[str], text: str) -> int:
    """Return the index of the last line with that text, -1 if there is none."""
    return max((i for i, line in enumerate(lines) if text in line), default=-1)


if __name__ == "__main__":
    main(sys.argv[1])
