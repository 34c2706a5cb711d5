"""Start the ranks of a job from a fork server, so that a start takes no time to import."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch


END_LIMIT_S = 60.0  # within which the ranks that are left must end


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of one run, by rank, and the files that take what they print."""

    processes: list[ForkServerProcess]
    logs: list[Path]

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

    def kill(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.join()

    def text(self, rank: int) -> str:
        """Return what a rank has printed."""
        log = self.logs[rank]
        return log.read_text(errors="replace") if log.exists() else ""


def make_context(*modules: str) -> ForkServerContext:
    """Return the context whose server has imported these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, __name__])
    return context


def start_ranks(
    context: ForkServerContext, run: Callable[[], int], *, num_ranks: int, logs: Path
) -> Ranks:
    """Run a function, whose result is an exit code, as torchrun would; ranks print to ``logs``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    ranks = Ranks(processes=[], logs=[logs / f"rank{rank}.log" for rank in range(num_ranks)])
    for rank, log in enumerate(ranks.logs):
        log.unlink(missing_ok=True)  # what earlier ranks printed must not be taken for these
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
