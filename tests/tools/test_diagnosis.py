"""Whether strategies can run, and facts about fake GPUs; test_doctor.py has real ones."""

import types

import pytest
import torch

from halley.strategies.registry import STRATEGIES
from halley.tools import diagnosis as doctor
from halley.tools.diagnosis import Device, Link, check_strategy, parse_topology


CPU = Device(name="a [cpu]", kind="cpu", memory_bytes=2**30, compute_capability=None, num_cores=2)
H200 = Device(
    name="NVIDIA H200", kind="cuda", memory_bytes=140 * 2**30, compute_capability="9.0",
    num_cores=132,
)  # fmt: skip
UNKNOWN = Device(
    name="NVIDIA Z9", kind="cuda", memory_bytes=2**30, compute_capability="12.0", num_cores=1
)
BOTH = {"gloo": True, "nccl": True}

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("device", [CPU, H200])
def test_nothing_is_missing(name: str, device: Device):
    state = check_strategy(name, device=device, backends=BOTH, grouped_gemm_problem=None)
    assert set(state.needs.values()) == {True}
    assert (state.problems, state.notes) == ([], [])


NO_TRITON = "its kernels are written in Triton: install triton 3.6 or newer"
TOO_OLD = "NVIDIA Z9 (too old): install torch 2.11 or newer, or choose device=cpu"


@pytest.mark.parametrize(
    ("name", "device", "missing", "need", "end"),
    [
        ("sequential", CPU, "gloo", "gloo of torch.distributed", "that is built with gloo"),
        ("sequential", H200, "nccl", "nccl of torch.distributed", "that is built with nccl"),
        ("sequential", UNKNOWN, "grouped GEMM", "torch.nn.functional.grouped_mm", TOO_OLD),
        ("fused", H200, "triton", "triton", NO_TRITON),
        ("fused", H200, "grouped GEMM", None, ""),
    ],
)
def test_missing_part_is_a_problem_with_a_remedy(
    name: str, device: Device, missing: str, need: str | None, end: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    if missing == "triton":
        monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    backends = {backend: backend != missing for backend in BOTH}
    problem = "too old" if missing == "grouped GEMM" else None
    state = check_strategy(name, device=device, backends=backends, grouped_gemm_problem=problem)
    assert [key for key, there in state.needs.items() if not there] == ([need] if need else [])
    assert [each.endswith(end) for each in state.problems] == ([True] if need else [])


def test_only_chunked_needs_known_hardware():
    sequential, chunked = (
        check_strategy(name, device=UNKNOWN, backends=BOTH, grouped_gemm_problem=None)
        for name in ("sequential", "chunked")
    )
    assert (sequential.problems, sequential.notes) == ([], [])
    assert chunked.problems == []  # it runs, on another GPU's figures
    assert chunked.needs["figures of the hardware"] is False
    (note,) = chunked.notes
    assert "with the figures of NVIDIA H200" in note


def test_grouped_gemm_is_tried(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise NotImplementedError("not for you\nand a stack of frames")

    assert doctor._try_grouped_gemm("cpu") is None
    monkeypatch.setattr(doctor.F, "grouped_mm", refuse)
    assert doctor._try_grouped_gemm("cpu") == "not for you"
    monkeypatch.setattr(doctor.F, "grouped_mm", lambda x, w, offs: x)
    assert doctor._try_grouped_gemm("cpu") == "wrong values"
    monkeypatch.delattr(doctor.F, "grouped_mm")
    assert "grouped_mm" in str(doctor._try_grouped_gemm("cpu"))


def test_topology():
    pairs = {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    backwards = {(second, first): word for (first, second), word in pairs.items()}
    assert parse_topology(TOPOLOGY) == pairs | backwards
    assert parse_topology("") == {}
    assert parse_topology("GPU0\tCPU Affinity\nGPU0\t X \t0-3\n") == {}


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for three GPUs that torch numbers the other way round than nvidia-smi."""

    def properties(device: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=f"NVIDIA {device}", total_memory=(device + 1) * 2**30, major=9, minor=0,
            multi_processor_count=132, uuid=f"uuid-{2 - device}",
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    # One way is not enough: 2 reaches 1, but 1 does not reach 2.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 2))


@pytest.mark.usefixtures("three_gpus")
def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch):
    assert doctor._gpus()[1] == Device(
        name="NVIDIA 1", kind="cuda", memory_bytes=2**31, compute_capability="9.0", num_cores=132
    )
    answers = {
        "topo": TOPOLOGY,
        "--query-gpu=index,uuid": "0, GPU-uuid-0\n1, GPU-uuid-1\n2, GPU-uuid-2\n",
    }
    monkeypatch.setattr(doctor, "_ask_smi", lambda *arguments: answers[arguments[0]])
    assert doctor._links() == [
        Link(first=0, second=1, peer_access=True, kind="PCIe (PHB)"),
        Link(first=0, second=2, peer_access=True, kind="PCIe (SYS)"),
        Link(first=1, second=2, peer_access=False, kind="NVLink (NV18)"),
    ]
    monkeypatch.setattr(doctor, "_ask_smi", lambda *arguments: "")  # without nvidia-smi
    assert [link.kind for link in doctor._links()] == [None] * 3
    assert [link.peer_access for link in doctor._links()] == [True, True, False]


@pytest.mark.parametrize(
    ("cuda", "wanted"),
    [(None, "install a CUDA build of torch"), ("13.0", "check CUDA_VISIBLE_DEVICES")],
)
def test_driver_without_cuda_build_of_torch_gives_a_note(
    cuda: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (note,) = doctor._notes([CPU])
    assert wanted in note
    assert doctor._notes([H200, CPU]) == []
