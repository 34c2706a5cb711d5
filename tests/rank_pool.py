"""Run a test's function on several ranks, processes of a gloo group that tests share."""

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor.debug import (
    _clear_sharding_prop_cache,  # pyright: ignore[reportPrivateUsage]
)


T = TypeVar("T")
RunRanks = Callable[..., list[Any]]  # type of the fixture ``run_ranks``

# The fork server imports these modules once for all ranks. Otherwise each rank would import them
# for seconds, at its first assert_close or torch.compile.
_PRELOAD = ("torch._inductor.compile_fx", "torch.testing", "pytest", "tests.rank_pool")
# Frameworks that ranks import only if the tests have, because each takes seconds.
_FRAMEWORKS = ("transformers.modeling_utils",)
_NEWER_FRAMEWORK = ".* is newer than .*, the newest that Halley is tested with"  # a warning
# Tracing makes so many objects that, with Python's own limit, a tenth of the time goes into
# collections that look at all objects of torch again.
OBJECTS_PER_COLLECTION = 10_000
_START_TIMEOUT_S = 120.0
_GRACE_S = 2.0  # time in which other ranks can report failures after a first one
_STACK_S = 0.3  # time in which a rank can write its stack after SIGUSR1
_GROUP_TIMEOUT = timedelta(minutes=5)  # limit after which ranks of a killed test process end


@final
class RankPool:
    """The processes of a gloo group, started at the first ``run`` and again after a failure."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._folder = ""

    def run(self, fn: Callable[..., T], *args: object, timeout_s: float = 60.0) -> list[T]:
        """Call ``fn(rank, num_ranks, *args)`` on every rank and return the results by rank.

        Each rank runs it in the default group (gloo). Arguments and results are pickled. So a rank
        gets copies, and ``fn`` must be a function of a module. In each call, torch is seeded with
        the rank, and warnings are errors, except those of untested framework versions.

        If a rank raises an error, dies, or does not return in time, all ranks are killed. The
        AssertionError has the traceback, exit code or stack of each such rank.
        """
        __tracebackhide__ = True  # the message contains the traceback of the rank
        request = pickle.dumps((fn, args))
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # _collect reports ranks that have died
                connection.send_bytes(request)
        values, failures = self._collect(timeout_s)
        if failures:
            self.close()
            raise AssertionError(_describe(fn.__qualname__, self.num_ranks, failures))
        return [cast(T, values[rank]) for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Kill the processes of this pool."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = get_context("forkserver")
        # Modules are those that the tests have imported: an error during an import would end the
        # fork server without a message.
        halley = sorted(name for name in sys.modules if name.split(".")[0] == "halley")
        frameworks = [name for name in _FRAMEWORKS if name in sys.modules]
        context.set_forkserver_preload([*_PRELOAD, *halley, *frameworks])
        self._folder = tempfile.mkdtemp(prefix="halley-ranks-")
        for rank in range(self.num_ranks):
            own_end, rank_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.num_ranks, self._folder, rank_end), daemon=True
            )
            process.start()
            rank_end.close()
            self._ranks.append((process, own_end))
        _, failures = self._collect(_START_TIMEOUT_S)
        if failures:
            self.close()
            raise RuntimeError(_describe("start of the ranks", self.num_ranks, failures))

    def _collect(self, timeout_s: float) -> tuple[dict[int, object], dict[int, str]]:
        """Return the values and the failures by rank, the first failure first."""
        values: dict[int, object] = {}
        failures: dict[int, str] = {}
        waiting = {connection: index for index, (_, connection) in enumerate(self._ranks)}
        begin = time.monotonic()
        end = begin + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                index = waiting.pop(cast(Connection, connection))
                returned, value = self._receive(index)
                if returned:
                    values[index] = value
                else:
                    failures[index] = str(value)
                    end = min(end, time.monotonic() + _GRACE_S)
        duration_s = time.monotonic() - begin
        for index, stack in self._dump_stacks(sorted(waiting.values())).items():
            failures[index] = f"did not return in {duration_s:.1f} s\n{stack}"
        return values, failures

    def _receive(self, index: int) -> tuple[bool, object]:
        process, connection = self._ranks[index]
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(_GRACE_S)
            return False, f"died with exit code {process.exitcode}"

    def _dump_stacks(self, indices: list[int]) -> dict[int, str]:
        for index in indices:
            pid = self._ranks[index][0].pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, pid), signal.SIGUSR1)
        if indices:
            time.sleep(_STACK_S)
        paths = {index: _stack_path(self._folder, index) for index in indices}
        return {index: path.read_text() if path.exists() else "" for index, path in paths.items()}


def open_pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools by number of ranks, at first none; kill their processes at the end."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def _describe(name: str, num_ranks: int, failures: dict[int, str]) -> str:
    lines = [f"{name} failed, first on rank {next(iter(failures))} of {num_ranks}"]
    for rank in range(num_ranks):
        lines.append(f"--- rank {rank}: {failures.get(rank, 'returned').rstrip()}")
    return "\n".join(lines)


def _stack_path(folder: str, rank: int) -> Path:
    """Return the file into which a rank writes its stack on SIGUSR1."""
    return Path(folder) / f"stack.{rank}"


def _serve(rank: int, num_ranks: int, folder: str, connection: Connection) -> None:
    """Answer requests until the test process closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, pytest kills the pool
    with _stack_path(folder, rank).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file)
        torch.set_num_threads(1)
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=_GROUP_TIMEOUT,
        )
        connection.send_bytes(pickle.dumps((True, None)))
        with contextlib.suppress(EOFError):
            while True:
                request = connection.recv_bytes()
                connection.send_bytes(_call(rank, num_ranks, request))


def _call(rank: int, num_ranks: int, request: bytes) -> bytes:
    try:
        _forget_groups()
        fn, args = pickle.loads(request)
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", _NEWER_FRAMEWORK)
            return pickle.dumps((True, fn(rank, num_ranks, *args)))
    except BaseException:  # also SystemExit and pytest.fail, because the pool must answer
        return pickle.dumps((False, f"raised\n{traceback.format_exc()}"))


def _forget_groups() -> None:
    """Destroy the groups of the previous call, and clear the cache of DTensor that refers to them.

    The threads of a gloo group wake up a hundred times a second as long as the group lives. DTensor
    would reuse the destroyed groups for a new mesh of the same shape.
    """
    if "deepspeed" in sys.modules:  # which creates its groups once per process
        return
    _clear_sharding_prop_cache()
    for group in set(_world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
