"""Disturb a training run again and again, and check that it ends as if nothing had happened.

    python -m tests.hostile.chaos --seed 3 --faults 30

Three CPU ranks train a small model. In each round one fault hits the run: ranks are killed, stopped
or told to end, may write no more, files of checkpoints are damaged, or a second run starts in the
same folder. The run is then started again. The script checks that

- the ranks that are left end within a minute and name the rank that was hit,
- the run goes on from the newest checkpoint that is complete, so no step in it is lost,
- with no complete checkpoint left the run ends with exit code 2 and changes no file,
- the losses of all steps are in the end those of an undisturbed run, bit for bit.

Exit code 1 and a line that names seed and round tell of a failure.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import xxhash

from halley.cli.main import main as run_command
from tests.damage import flip_bytes, hash_tree
from tests.hostile.rank_processes import Ranks, make_context, start_ranks
from tests.train.run_case import write_text


NUM_RANKS = 3
NUM_STEPS = 200
STEPS_LIMIT_S = 90.0
SETTINGS = [
    "device=cpu", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=4",
    "model.num_kv_heads=2", "model.head_dim=16", "model.moe.num_experts=6",
    "model.moe.intermediate_size=64", "data.seq_len=64", "train.batch_size=4",
    f"train.num_steps={NUM_STEPS}", "train.log_every=1000", "checkpoint.every_steps=4",
    "checkpoint.keep=3",
]  # fmt: skip


class Chaos:
    """A training run that is disturbed; a seed draws the kinds, places and times of the faults."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.draw = random.Random(seed)
        self.folder, self.output = folder, folder / "run"
        self.checkpoints = self.output / "checkpoints"
        self.context = make_context("halley.cli.main")
        self.text = write_text(folder)
        self.faults: dict[str, Callable[[], None]] = {
            "kill_all": self.kill_all,
            "kill_one": partial(self.lose_one, signal.SIGKILL),
            "kill_while_saving": self.kill_while_saving,
            "stop_one": partial(self.lose_one, signal.SIGSTOP),
            "tell_one_to_end": self.tell_to_end,
            "tell_all_to_end": partial(self.tell_to_end, range(NUM_RANKS)),
            "starve_of_disk": self.starve_of_disk,
            "damage_newest": self.damage_newest,
            "damage_all": self.damage_all,
            "start_twice": self.start_twice,
        }

    def start(self, output: Path | None = None, *, logs: str = "logs") -> Ranks:
        place = self.folder / logs
        place.mkdir(exist_ok=True)
        argv = ["train", f"--data={self.text}", f"--output={output or self.output}"]
        argv += [f"--set={setting}" for setting in SETTINGS]
        run = partial(run_command, argv)
        return start_ranks(self.context, run, num_ranks=NUM_RANKS, logs=place)

    def run_to_the_end(self, output: Path | None = None) -> None:
        """Train to the last step and check that all ranks say that they are done."""
        newest = self.newest_complete() if output is None else 0
        ranks = self.start(output)
        codes = ranks.wait(limit_s=4 * STEPS_LIMIT_S)
        assert codes == [0] * NUM_RANKS, f"exit codes {codes}: {ranks.text(0)[-800:]}"
        self.check_resumed(ranks, newest)

    def losses(self, output: Path | None = None) -> list[float]:
        lines = (output or self.output).joinpath("metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
        return [row["loss"] for row in rows]

    def step(self) -> int:
        """Return the last complete step in the metrics of the run."""
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the run may be writing the next line
        return json.loads(lines[-1])["step"] if lines else 0

    def run_some_steps(self) -> Ranks:
        """Start the run, check from which step it resumes, and let it take a few steps."""
        newest = self.newest_complete()
        ranks = self.start()
        wanted = newest + self.draw.randint(2, 8)
        self.wait_until(lambda: bool(self.start_line(ranks)) and self.step() >= wanted, ranks)
        self.check_resumed(ranks, newest)
        return ranks

    def wait_until(self, is_reached: Callable[[], bool], ranks: Ranks) -> None:
        deadline_s = time.monotonic() + STEPS_LIMIT_S
        while not is_reached():
            assert time.monotonic() < deadline_s, f"no progress: {ranks.text(0)[-800:]}"
            assert ranks.processes[0].is_alive(), f"rank 0 ended: {ranks.text(0)[-800:]}"
            time.sleep(0.002)

    def start_line(self, ranks: Ranks) -> str:
        lines = ranks.text(0).splitlines()
        return next((line for line in lines if "parameters a rank" in line), "")

    def check_resumed(self, ranks: Ranks, newest: int) -> None:
        line = self.start_line(ranks)
        want = f", resumed after step {newest}" if newest else "float32"
        assert line.endswith(want), f"checkpoint {newest} is complete, but: {line}"

    def newest_complete(self) -> int:
        """Return the step of the newest checkpoint whose files have their checksums, or 0."""
        return max((int(path.name[5:]) for path in self.complete_checkpoints()), default=0)

    def complete_checkpoints(self) -> list[Path]:
        return [path for path in sorted(self.checkpoints.glob("step-????????")) if _is_whole(path)]

    # The methods below cause one fault each, and leave no process behind.

    def kill_all(self) -> None:
        ranks = self.run_some_steps()
        ranks.signal(self.draw.sample(range(NUM_RANKS), NUM_RANKS), signal.SIGKILL)
        ranks.wait()

    def kill_while_saving(self) -> None:
        ranks = self.run_some_steps()
        self.wait_until(lambda: any(self.checkpoints.glob("*.tmp")), ranks)
        time.sleep(self.draw.random() * 0.02)
        ranks.signal(range(NUM_RANKS), signal.SIGKILL)
        ranks.wait()

    def lose_one(self, number: int) -> None:
        """Kill or stop one rank, and check that the others end and name it."""
        ranks = self.run_some_steps()
        victim = self.draw.randrange(NUM_RANKS)
        ranks.signal([victim], number)
        left = [rank for rank in range(NUM_RANKS) if rank != victim]
        codes = ranks.wait(left)
        ranks.kill()
        for rank, code in zip(left, codes, strict=True):
            assert code is not None, f"rank {rank} hangs without rank {victim}"
            assert code != 0
            assert f"rank {victim}" in ranks.text(rank), (
                f"rank {rank} does not name rank {victim}: {ranks.text(rank)[-800:]}"
            )

    def tell_to_end(self, told: Sequence[int] = ()) -> None:
        """Ask these ranks, or one, to end; check that all do with a checkpoint of the last step."""
        told = told or [self.draw.randrange(NUM_RANKS)]
        ranks = self.run_some_steps()
        number = self.draw.choice([signal.SIGINT, signal.SIGTERM])
        ranks.signal(told, number)
        codes = ranks.wait()
        ranks.kill()
        if self.step() < NUM_STEPS:
            assert codes == [128 + number] * NUM_RANKS, f"codes {codes}: {ranks.text(0)[-800:]}"
        assert self.newest_complete() == self.step()

    def starve_of_disk(self) -> None:
        """Let one rank write no more than a few bytes to a file, until the run ends of it."""
        ranks = self.run_some_steps()
        victim = self.draw.randrange(NUM_RANKS)
        complete, drafts = self.newest_complete(), set(self.checkpoints.glob("*.tmp"))
        resource.prlimit(ranks.pid(victim), resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
        codes = ranks.wait()
        ranks.kill()
        assert None not in codes, "ranks hang"
        assert all(codes), f"codes {codes}"
        assert "File too large" in ranks.text(victim), ranks.text(victim)[-800:]
        assert self.newest_complete() >= complete
        # A draft folder that an earlier kill left stays until the next save.
        assert set(self.checkpoints.glob("*.tmp")) <= drafts, "a half folder is left"

    def damage_newest(self) -> None:
        """Damage the newest of several checkpoints: the run must go on from the one before."""
        if len(self.complete_checkpoints()) < 2:
            self.tell_to_end([0])
        if len(self.complete_checkpoints()) < 2:
            return
        newest = self.newest_complete()
        self.damage(self.checkpoints / f"step-{newest:08d}")
        assert self.newest_complete() < newest
        self.kill_all()

    def damage_all(self) -> None:
        """Damage all checkpoints: the run must end and change nothing; then put them back."""
        if not self.complete_checkpoints():
            self.tell_to_end([0])
        complete = self.complete_checkpoints()
        backup = self.folder / "backup"
        shutil.copytree(self.checkpoints, backup)
        for path in complete:
            self.damage(path)
        before = hash_tree(self.output, leave_out={"run.lock"})
        ranks = self.start()
        codes = ranks.wait()
        ranks.kill()
        assert codes == [2] * NUM_RANKS, f"codes {codes}: {ranks.text(0)[-800:]}"
        for path in complete:
            assert f"checkpoint {path} is damaged" in ranks.text(0)
        assert hash_tree(self.output, leave_out={"run.lock"}) == before, "files have changed"
        shutil.rmtree(self.checkpoints)
        backup.rename(self.checkpoints)

    def damage(self, path: Path) -> None:
        names = ["manifest.json", ".metadata", "__0_0.distcp", "__2_0.distcp"]
        file = path / self.draw.choice(names)
        kind = self.draw.choice(["flip", "cut", "remove", "empty", "folder"])
        if kind == "flip":
            flip_bytes(file, num_bytes=self.draw.choice([1, 4000]))
        elif kind == "cut":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        elif kind == "empty":
            file.write_bytes(b"")
        else:
            file.unlink()
            if kind == "folder":
                file.mkdir()

    def start_twice(self) -> None:
        """Start a second run in the folder of the first, which must be refused."""
        ranks = self.run_some_steps()
        ranks.signal(range(NUM_RANKS), signal.SIGSTOP)  # a stopped run holds its lock, too
        second = self.start(logs="second")
        codes = second.wait()
        second.kill()
        assert codes == [2] * NUM_RANKS, f"codes {codes}: {second.text(0)[-800:]}"
        told = f"must not be in use by another run: process {ranks.pid(0)} on host"
        assert told in second.text(0), second.text(0)[-800:]
        ranks.signal(range(NUM_RANKS), signal.SIGKILL)
        ranks.wait()


def _is_whole(path: Path) -> bool:
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        return {".metadata", "__0_0.distcp"} <= files.keys() and all(
            xxhash.xxh3_128_hexdigest((path / name).read_bytes()) == entry["xxh3_128"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def disturb(seed: int, *, num_faults: int, limit_s: float) -> int:
    """Run one seed; return the number of faults, fewer than asked if the time or the run ended."""
    with tempfile.TemporaryDirectory(prefix="halley-chaos-") as name:
        chaos = Chaos(Path(name), seed=seed)
        start_s = time.monotonic()
        whole = chaos.folder / "whole"
        chaos.run_to_the_end(whole)
        reference = chaos.losses(whole)
        order: list[str] = []
        count = 0
        while count < num_faults and time.monotonic() - start_s < limit_s:
            if not order:
                order = chaos.draw.sample([*chaos.faults], len(chaos.faults))
            fault = order.pop()
            if chaos.step() + 10 > NUM_STEPS:
                break
            count += 1
            fault_s = time.monotonic()
            try:
                chaos.faults[fault]()
            except BaseException as error:
                for (
                    process
                ) in multiprocessing.active_children():  # SIGKILL ends a stopped process too
                    process.kill()
                raise RuntimeError(f"seed {seed}, fault {count} {fault}: {error}") from error
            say(
                f"seed {seed} fault {count:2d} {fault:18s} step {chaos.step():3d} "
                f"{time.monotonic() - fault_s:5.1f} s"
            )
        chaos.run_to_the_end()
        assert chaos.losses() == reference, f"seed {seed}: the losses differ"
        return count


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    start_s = time.monotonic()
    try:
        count = disturb(options.seed, num_faults=options.faults, limit_s=options.limit_s)
    except (AssertionError, RuntimeError) as error:
        say(f"chaos: FAILED: {error}")
        return 1
    result = {"case": "chaos", "seed": options.seed, "faults": count, "steps": NUM_STEPS}
    result |= {"bit_equal": True, "seconds": round(time.monotonic() - start_s, 1)}
    say(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
