"""Make and write result lines of benchmarks: keys of the machine, keys of times, and files."""

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from torch.cuda import nccl

from halley.distributed.mesh import ParallelGroups
from halley.tools.timer import Timing


Row = dict[str, object]


def machine_keys(groups: ParallelGroups, *, device: torch.device, commit: str | None) -> Row:
    """Return the keys of a result line for the machine, the versions, the commit and the date."""
    cuda = device.type == "cuda"
    return {
        "gpu": machine_name(device),
        "num_gpus": groups.num_ranks,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "commit": commit or _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def time_keys(timing: Timing) -> Row:
    """Return the keys of a result line for the samples of a variant."""
    return {
        "median_us": round(timing.median_us, 1),
        "p10_us": round(timing.p10_us, 1),
        "p90_us": round(timing.p90_us, 1),
        "samples": len(timing.samples_us),
    }


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or "cpu" with the processor architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def results_path(folder: Path, row: Row) -> Path:
    """Return the file of a result line: ``<folder>/<gpu>x<count>/<case>.jsonl``."""
    gpu = str(row["gpu"]).lower().removeprefix("nvidia ").replace(" ", "-")
    return folder / f"{gpu}x{row['num_gpus']}" / f"{row['case']}.jsonl"


def write_rows(rows: list[Row], folder: Path) -> Path:
    """Write all lines of one case on one machine; return their file, which is replaced atomically.

    Args:
        rows: the lines.
        folder: of all results, such as ``benchmarks/results`` in the repository.
    """
    path = results_path(folder, rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    draft.replace(path)
    return path


def installed_version(package: str) -> str | None:
    """Return the version of a Python package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str:
    """Return the commit of the working tree that contains this package, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
