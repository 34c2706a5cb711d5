"""Result lines of benchmarks: the keys of machine and versions, and the file of a case."""

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from torch.cuda import nccl

from halley.distributed.mesh import ParallelGroups


Row = dict[str, object]


def machine_keys(groups: ParallelGroups, *, device: torch.device, commit: str | None) -> Row:
    """Return the keys of a result line for the machine, the versions, the commit and the date."""
    cuda = device.type == "cuda"
    return {
        "gpu": machine_name(device),
        "num_gpus": groups.num_ranks,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "commit": commit or _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
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
    """Write the lines of one case and return their file; earlier lines are replaced atomically.

    Args:
        rows: complete lines of one case on one machine.
        folder: of all results, such as ``benchmarks/results`` in the repository.
    """
    path = results_path(folder, rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    draft.replace(path)
    return path


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str:
    """Return the commit of the working tree that contains this package, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
