"""Examine a machine: versions, devices, links, and whether each strategy can run."""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.cuda import nccl

from halley.cost.hardware import H200, KNOWN
from halley.strategies.registry import STRATEGIES
from halley.tools.timer import installed_version


# Optional packages, each with the extra of halley-moe that installs it.
OPTIONAL_PACKAGES = {
    "matplotlib": "plot",
    "pyarrow": "data",
    "safetensors": "hf",
    "tensorboard": "tensorboard",
    "tokenizers": "data",
    "transformers": "hf",
    "wandb": "wandb",
}

_SMI_TIMEOUT_S = 20.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or the host's CPU."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int
    compute_capability: str | None  # such as "9.0"; None for a CPU
    num_cores: int  # SMs of a GPU, or CPU cores that this process may use


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between two GPUs, by their indices in torch."""

    first: int
    second: int
    peer_access: bool  # whether each GPU can address the memory of the other
    kind: str | None  # by nvidia-smi, such as "NVLink (NV18)" or "PCIe (PIX)"; None if unknown


@dataclass(frozen=True, kw_only=True)
class StrategyState:
    """Whether a strategy can run on this machine, and the reasons if it cannot."""

    name: str
    needs: dict[str, bool]  # requirements of the strategy, and whether each is met
    problems: list[str]  # reasons why it cannot run, each with a remedy
    notes: list[str]  # limitations with which it still runs, each with a remedy


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Versions, devices, links and strategies of a machine, which ``halley doctor`` prints."""

    versions: dict[str, str | None]  # versions by name; None if not installed
    packages: dict[str, str | None]  # versions of the optional packages
    devices: list[Device]  # the GPUs that torch finds, then the CPU
    links: list[Link]  # one link for each pair of GPUs
    backends: dict[str, bool]  # whether this build of torch has a backend of torch.distributed
    strategies: list[StrategyState]  # one state for each of ``STRATEGIES``
    notes: list[str]  # problems of the machine, each with a remedy


def examine_machine() -> Machine:
    """Return versions, devices and links of this machine, and whether each strategy can run."""
    devices = [*_gpus(), _cpu()]
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    versions = {
        "halley": installed_version("halley-moe"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl.version())) if backends["nccl"] else None,
        "numpy": installed_version("numpy"),
    }
    found = {"backends": backends, "grouped_gemm_problem": _try_grouped_gemm(devices[0].kind)}
    return Machine(
        versions=versions,
        packages={name: installed_version(name) for name in OPTIONAL_PACKAGES},
        devices=devices,
        links=_links(),
        backends=backends,
        strategies=[check_strategy(name, device=devices[0], **found) for name in STRATEGIES],
        notes=_notes(devices),
    )


def check_strategy(
    name: str, *, device: Device, backends: dict[str, bool], grouped_gemm_problem: str | None
) -> StrategyState:
    """Return whether a strategy can run on a device, and the reasons if it cannot.

    ``grouped_gemm_problem`` is torch's error message for a grouped GEMM on the device, or None.
    """
    backend = "nccl" if device.kind == "cuda" else "gloo"
    remedy = f"install a torch that is built with {backend}"
    problem = f"ranks cannot communicate, because this torch has no {backend}: {remedy}"
    required = [(f"{backend} of torch.distributed", backends[backend], problem)]
    if name in ("unfused", "fused"):
        problem = "its kernels are written in Triton: install triton 3.6 or newer"
        required.append(("triton", installed_version("triton") is not None, problem))
    else:
        operator = "torch.nn.functional.grouped_mm"
        remedy = "install torch 2.11 or newer, or choose device=cpu"
        problem = f"{operator} does not run on {device.name} ({grouped_gemm_problem}): {remedy}"
        required.append((operator, grouped_gemm_problem is None, problem))
    needs = {need: is_met for need, is_met, _ in required}
    notes: list[str] = []
    if name == "chunked":
        is_known = device.kind == "cpu" or any(device.name.startswith(gpu.name) for gpu in KNOWN)
        needs["figures of the hardware"] = is_known
        if not is_known:
            notes.append(
                f"the number of chunks is chosen with the figures of {H200.name}, because those of "
                "this GPU are not known: set num_chunks to choose it yourself"
            )
    problems = [problem for _, is_met, problem in required if not is_met]
    return StrategyState(name=name, needs=needs, problems=problems, notes=notes)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Parse the text of ``nvidia-smi topo -m``: links by pair of nvidia-smi's GPU indices.

    Example: the row ``GPU0  X  NV18  PHB`` gives {(0, 1): "NV18", (0, 2): "PHB"}.
    """
    rows = [line.split() for line in _ANSI.sub("", text).splitlines()]
    # The header and the row of GPU 0 both begin with "GPU0". Only in the row does "X" follow.
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row[:2]), [])
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    return {
        (int(row[0].removeprefix("GPU")), int(column.removeprefix("GPU"))): word
        for row in rows
        if row is not header and row and row[0] in columns
        for column, word in zip(columns, row[1:], strict=False)
        if column != row[0]
    }


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpus() -> list[Device]:
    return [
        Device(
            name=gpu.name,
            kind="cuda",
            memory_bytes=gpu.total_memory,
            compute_capability=f"{gpu.major}.{gpu.minor}",
            num_cores=gpu.multi_processor_count,
        )
        for gpu in map(torch.cuda.get_device_properties, range(_num_gpus()))
    ]


def _cpu() -> Device:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    is_linux = hasattr(os, "sched_getaffinity")
    return Device(
        name=model.group(1).strip() if model else platform.processor() or platform.machine(),
        kind="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        compute_capability=None,
        num_cores=len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1,
    )


def _links() -> list[Link]:
    if _num_gpus() < 2:
        return []
    topology = parse_topology(_ask_smi("topo", "-m"))
    smi_index = _smi_indices()
    can_access = torch.cuda.can_device_access_peer
    links: list[Link] = []
    for first, second in combinations(range(_num_gpus()), 2):
        both_ways = can_access(first, second) and can_access(second, first)
        kind = topology.get((smi_index.get(first, -1), smi_index.get(second, -1)))
        if kind is not None and kind.startswith("NV"):
            kind = f"NVLink ({kind})"
        elif kind in ("PIX", "PXB", "PHB", "NODE", "SYS"):
            kind = f"PCIe ({kind})"
        links.append(Link(first=first, second=second, peer_access=both_ways, kind=kind))
    return links


def _smi_indices() -> dict[int, int]:
    """Map torch's GPU indices, which depend on CUDA_VISIBLE_DEVICES, to those of nvidia-smi."""
    answer = _ask_smi("--query-gpu=index,uuid", "--format=csv,noheader")
    pairs = re.findall(r"^(\d+), (?:GPU-)?(\S+)$", answer, re.MULTILINE)
    index_of = {uuid: int(index) for index, uuid in pairs}
    uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(_num_gpus())]
    return {gpu: index_of[uuid] for gpu, uuid in enumerate(uuids) if uuid in index_of}


def _ask_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT_S
        )
        return done.stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _try_grouped_gemm(device: str) -> str | None:
    """Run a small grouped GEMM of torch; return its error line, "wrong values", or None if OK."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        rows = torch.ones(16, 16, device=device, dtype=dtype)
        ends = torch.tensor([16], device=device, dtype=torch.int32)
        sums = F.grouped_mm(rows, rows[None], offs=ends)
        wrong = bool((sums != 16).any())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return "wrong values" if wrong else None


def _notes(devices: list[Device]) -> list[str]:
    if devices[0].kind == "cuda" or shutil.which("nvidia-smi") is None:
        return []
    found = f"nvidia-smi is installed, but torch {torch.__version__}"
    if torch.version.cuda is None:
        return [f"{found} is built without CUDA and uses the CPU: install a CUDA build of torch"]
    remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA"
    return [f"{found} (CUDA {torch.version.cuda}) finds no GPU: {remedy}"]
