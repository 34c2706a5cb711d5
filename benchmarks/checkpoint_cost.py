"""Measure what the checksums of a checkpoint cost beside saving and loading it.

    python benchmarks/checkpoint_cost.py --gigabytes 2 --folder /tmp

One process saves, verifies and loads a checkpoint of random tensors several times. The checksums
are computed once when saving and once when loading; their time is measured by itself on the same
files. Prints one JSON line with medians in seconds.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from halley.train.checkpoint import find_newest_checkpoint, load_checkpoint, save_checkpoint
from halley.train.manifest import compute_checksum


_TENSOR_BYTES = 64 << 20


def measure_s(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--samples", type=int, default=5, help="repetitions; medians are reported")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    num_tensors = max(1, round(options.gigabytes * 1e9 / _TENSOR_BYTES))
    tensors = {str(index): torch.randn(_TENSOR_BYTES // 4) for index in range(num_tensors)}
    state: dict[str, object] = {"parameters": tensors}
    times: dict[str, list[float]] = {"save": [], "load": [], "checksum": []}
    folder = Path(tempfile.mkdtemp(prefix="halley-checkpoint-", dir=options.folder))

    def load() -> None:
        path = find_newest_checkpoint(folder)
        assert path is not None
        load_checkpoint(path, state)

    try:
        for step in range(options.samples + 1):  # the first one warms up
            save_s = measure_s(lambda step=step: save_checkpoint(folder, state, step=step, keep=1))
            load_s = measure_s(load)
            (path,) = folder.iterdir()
            files = [file for file in path.iterdir() if file.name != "manifest.json"]
            checksum_s = measure_s(lambda files=files: [compute_checksum(file) for file in files])
            if step:
                for name, value in zip(times, (save_s, load_s, checksum_s), strict=True):
                    times[name].append(value)
    finally:
        shutil.rmtree(folder)
    median = {name: statistics.median(values) for name, values in times.items()}
    share = 2 * median["checksum"] / (median["save"] + median["load"])
    result = {
        "case": "checkpoint",
        "num_bytes": num_tensors * _TENSOR_BYTES,
        "save_s": round(median["save"], 3),
        "load_s": round(median["load"], 3),
        "checksum_s": round(median["checksum"], 3),
        "checksum_share": round(share, 4),
        "samples": options.samples,
        "num_cores": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
