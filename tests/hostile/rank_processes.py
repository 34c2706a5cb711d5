"""Start ranks from a fork server that has imported all modules, so that a start is fast."""

import contextlib
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch

from halley.distributed.launcher import reserve_port


END_LIMIT_S = 60.0  # time in which ranks must end after a fault of another rank
Ends = dict[int, tuple[int | None, list[str]]]  # exit code and error lines, by rank


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a job and the log files of their output, by rank."""

    processes: list[ForkServerProcess]
    logs: list[Path]
    port: socket.socket = field(default_factory=reserve_port)  # bound to rank 0's port

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to each of these ranks unless it has ended."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.pid(rank), number)

    def wait(
        self, ranks: Iterable[int] | None = None, *, limit_s: float = END_LIMIT_S
    ) -> list[int | None]:
        """Wait for ranks, by default all; return exit codes, None for one that still runs."""
        deadline_s = time.monotonic() + limit_s
        processes = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        return [process.exitcode for process in processes]

    def ends(self, ranks: Iterable[int]) -> Ends:
        """Wait for ranks; return the exit code and the error lines of each, by rank."""
        ranks = list(ranks)
        codes = self.wait(ranks)
        # Torch writes further lines about broken connections.
        lines = [self.text(rank).splitlines() for rank in ranks]
        errors = [[x for x in each if re.match(r"halley: |[\w.]+Error: ", x)] for each in lines]
        return dict(zip(ranks, zip(codes, errors, strict=True), strict=True))

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for process in self.processes:
            process.kill()
            process.join()
        self.port.close()

    def text(self, rank: int) -> str:
        """Return the output of a rank."""
        log = self.logs[rank]
        return log.read_text(errors="replace") if log.exists() else ""


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def make_context(*modules: str) -> ForkServerContext:
    """Return a multiprocessing context whose fork server imports these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, __name__])
    return context


def start_ranks(
    context: ForkServerContext, run: Callable[[], int], *, num_ranks: int, logs: Path
) -> Ranks:
    """Start ranks that call a function for their exit code, in torchrun's environment."""
    ranks = Ranks(processes=[], logs=[logs / f"rank{rank}.log" for rank in range(num_ranks)])
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.port.getsockname()[1]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    for rank, log in enumerate(ranks.logs):
        log.unlink(missing_ok=True)  # the output of earlier ranks
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_run_rank, args=(run, environment, log), daemon=True)
        process.start()
        ranks.processes.append(process)
    return ranks


def _run_rank(run: Callable[[], int], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os._exit(run())
