"""Measure the time until all ranks end with an error that names a failed peer.

For each fault (kill -9, SIGSTOP, a skipped forward pass, a skipped backward pass) and strategy,
ranks start, rank 1 fails after some correct steps, and every other rank must end with one line that
names rank 1, and the operation if rank 1 skipped one. Then the same ranks start again without a
fault and must finish. Prints a table and one JSON line per case. The exit code is 1 if any case
failed. Runs on GPUs if there are enough, else on CPUs, where the kernels are interpreted.

    python benchmarks/peer_faults.py --nproc 2
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import halley
from halley.core.types import Experts, Routing
from halley.distributed.launcher import reserve_port


BAD_RANK, NUM_GOOD_STEPS = 1, 3
CASE_LIMIT_S = 90.0
FAULTS = ("kill", "stop", "skip forward", "skip backward")
STRATEGIES = ("fused", "sequential")
COLLECTIVE_LIMIT_S, KERNEL_LIMIT_S = 40.0, 12.0
WATCHDOG = {"timeout_s": 8.0, "grace_s": 2.0, "deadlock_s": 8.0, "stall_s": 15.0}
# What an error must say of a skipped pass: the collective, or the wait of a kernel.
OPERATION = re.compile(
    r"route|dispatch|combine|plan|stage|pass of|publish its rows|did not arrive|all_reduce"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run; ``fault`` is one of ``FAULTS``, or "none"."""

    fault: str
    strategy: str
    device: str
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one rank.

    Attributes:
        code: exit code; None if it had to be killed.
        end_s: by the clock of ``time.time``.
        error: the last line that looks like an error.
        tail: the end of its stderr.
    """

    code: int | None
    end_s: float
    error: str
    tail: str


def main() -> int:
    """Run all cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_rank(Case(**json.loads(arguments.case)), arguments.folder)
        return 0
    if arguments.nproc < 2:
        parser.error(f"--nproc ({arguments.nproc}) must be at least 2")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= arguments.nproc else "cpu"
    rows = [
        check_case(Case(fault=fault, strategy=strategy, device=device, num_ranks=arguments.nproc))
        for strategy in STRATEGIES
        for fault in FAULTS
    ]
    say(f"\n{'strategy':12}{'fault':16}{'ended after':>12}  {'again':8}{'verdict':8}")
    for row in rows:
        ended = "-" if row["ended_s"] is None else f"{row['ended_s']:.1f} s"
        again = "works" if row["works_again"] else "fails"
        verdict = "passed" if row["passed"] else "FAILED"
        say(f"{row['strategy']:12}{row['fault']:16}{ended:>12}  {again:8}{verdict:8}")
    return 0 if all(row["passed"] for row in rows) else 1


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def check_case(case: Case) -> dict[str, object]:
    """Run a case and the clean run after it; print and return its result."""
    endings, fault_s = start(case)
    others = {rank: end for rank, end in endings.items() if rank != BAD_RANK}
    problems = [p for rank, end in others.items() if (p := find_problem(case, rank, end, fault_s))]
    clean = Case(**{**asdict(case), "fault": "none"})
    clean_endings, _ = start(clean)
    works_again = all(end.code == 0 for end in clean_endings.values())
    shown = [] if not problems else [endings]
    shown += [] if works_again else [clean_endings]
    for each in shown:
        for rank, end in each.items():
            say(
                f"--- {case.strategy}, {case.fault}, rank {rank}, exit code {end.code}:\n{end.tail}"
            )
    ended_s = None if fault_s is None else max(end.end_s for end in others.values()) - fault_s
    row: dict[str, object] = {
        **asdict(case),
        "ended_s": None if ended_s is None else round(ended_s, 1),
        "errors": {rank: end.error for rank, end in others.items()},
        "problems": problems,
        "works_again": works_again,
        "passed": not problems and works_again,
    }
    say(json.dumps(row))
    return row


def find_problem(case: Case, rank: int, end: Ending, fault_s: float | None) -> str:
    """Return the reason why the end of another rank is not as required, or ""."""
    if fault_s is None:
        return f"rank {rank}: the fault was not reached"
    if end.code is None:
        return f"rank {rank} did not end within {CASE_LIMIT_S:g} s"
    if end.code == 0:
        return f"rank {rank} ended as if nothing had happened"
    if f"rank {BAD_RANK}" not in end.error:
        return f"rank {rank} does not name rank {BAD_RANK}"
    if case.fault.startswith("skip") and not OPERATION.search(end.error):
        return f"rank {rank} names no operation"
    return ""


def start(case: Case) -> tuple[dict[int, Ending], float | None]:
    """Run the ranks of a case; return the end of each rank, and the time of the fault."""
    with tempfile.TemporaryDirectory() as name, reserve_port() as bound:
        folder = Path(name)
        command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
        command += ["--folder", name]
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(case.num_ranks):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(case.num_ranks), "LOCAL_WORLD_SIZE": str(case.num_ranks),
                "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                "MASTER_PORT": str(bound.getsockname()[1]),
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "TRITON_INTERPRET": "1" if case.device == "cpu" else "0",
            }  # fmt: skip
            with (folder / f"stderr.{rank}").open("wb") as stderr:
                ranks.append(subprocess.Popen(command, env=environment, stderr=stderr))
        try:
            ends_s = wait_for_ends(case, ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        endings = {
            rank: describe_end(process.returncode if rank in ends_s else None,
                               ends_s.get(rank, time.time()), folder / f"stderr.{rank}")
            for rank, process in enumerate(ranks)
        }  # fmt: skip
        fault_file = folder / "fault"
        return endings, float(fault_file.read_text()) if fault_file.exists() else None


def wait_for_ends(case: Case, ranks: list[subprocess.Popen[bytes]]) -> dict[int, float]:
    """Return the time at which each rank ended, without ranks that exceed the time limit."""
    ends_s: dict[int, float] = {}
    expected = set(range(case.num_ranks)) - ({BAD_RANK} if case.fault != "none" else set())
    deadline_s = time.monotonic() + CASE_LIMIT_S
    while not expected <= set(ends_s) and time.monotonic() < deadline_s:
        for rank, process in enumerate(ranks):
            if rank not in ends_s and process.poll() is not None:
                ends_s[rank] = time.time()
        time.sleep(0.05)
    return ends_s


def describe_end(code: int | None, end_s: float, path: Path) -> Ending:
    """Return the end of a rank, with the text of its standard error."""
    text = path.read_text(errors="replace")
    bare = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    lines = [line for line in bare if re.match(r"halley: |[\w.]*Error: ", line)]
    return Ending(code=code, end_s=end_s, error=lines[-1] if lines else "", tail=text[-3000:])


def run_rank(case: Case, folder: Path) -> None:
    """Train a layer as one rank, with the fault of the case."""
    rank, on_gpu = int(os.environ["RANK"]), case.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
        device_id=device if on_gpu else None,
    )
    groups = halley.build_groups(0, device_type=device.type)
    with halley.Watchdog.of_group(None, **WATCHDOG) as watchdog:
        strategy = halley.build_strategy(
            case.strategy,
            groups.ep,
            recorder=halley.Recorder(device, enabled=False),
            device=device,
            timeout_s=KERNEL_LIMIT_S,
        )
        x_TD, routing, experts = make_layer(case.num_ranks, device)
        for step in range(1, NUM_GOOD_STEPS + 3):
            watchdog.step = step
            is_bad = rank == BAD_RANK and step == NUM_GOOD_STEPS + 1
            fault = case.fault if is_bad else "none"
            if is_bad and fault != "none":
                fail(fault, folder)
            if fault != "skip forward":
                y_TD = strategy.forward(x_TD, routing, experts)
                if fault != "skip backward":
                    y_TD.sum().backward()
            total = torch.ones(1, device=device)
            dist.all_reduce(total)  # as sums of gradients of a training script
            assert total.item() == case.num_ranks  # waits for the device
    dist.destroy_process_group()


def fail(fault: str, folder: Path) -> None:
    """Write the time of the fault to a file; then kill or stop this rank if that is the fault."""
    (folder / "fault.part").write_text(str(time.time()))
    (folder / "fault.part").rename(folder / "fault")
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def make_layer(num_ranks: int, device: torch.device) -> tuple[torch.Tensor, Routing, Experts]:
    """Return tokens, their routing and this rank's experts, small on a CPU."""
    on_gpu = device.type == "cuda"
    num_tokens, hidden_size, inner_size = (512, 1024, 512) if on_gpu else (4, 16, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    options = {"device": device, "dtype": dtype}
    idx_TK = torch.arange(2 * num_tokens, device=device).view(num_tokens, 2) % (2 * num_ranks)
    weights_TK = torch.full((num_tokens, 2), 0.5, device=device)
    experts = Experts(
        up_LGD=torch.full((2, 2 * inner_size, hidden_size), 0.01, **options).requires_grad_(),
        down_LDF=torch.full((2, hidden_size, inner_size), 0.01, **options).requires_grad_(),
    )
    x_TD = torch.ones(num_tokens, hidden_size, **options).requires_grad_()
    return x_TD, Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK), experts


if __name__ == "__main__":
    sys.exit(main())
