"""Peer access between ranks, for hand-written memory locations and on this machine."""

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from halley.cost.hardware import link_kind
from halley.distributed import peers
from halley.distributed.peers import MemoryLocation, find_access_problem, peer_access
from halley.symm_mem.heap import SharedHeap
from halley.tools import diagnosis as doctor


CPU = MemoryLocation(host="ada", boot_id="1f", device="cpu", shm_id=24)
UUIDS = ("a", "b", "c", "d")
GPUS = [
    replace(CPU, device=f"cuda:{i}", shm_id=None, uuid=uuid, reachable=UUIDS[:i] + UUIDS[i + 1 :])
    for i, uuid in enumerate(UUIDS)
]
PROPERTIES = [SimpleNamespace(uuid=uuid) for uuid in UUIDS]
SHARED = [replace(GPUS[0], may_share=True)] * 2


@pytest.mark.parametrize("locations", [[CPU] * 3, GPUS[:1], [GPUS[2], GPUS[0]], SHARED])
def test_ranks_with_access_have_no_problem(locations: list[MemoryLocation]) -> None:
    assert find_access_problem(locations) == ""


@pytest.mark.parametrize(
    ("locations", "problem"),
    [
        ([CPU, replace(CPU, shm_id=None)], "rank 1 has no shared memory: ada has no /dev/shm"),
        (
            [CPU, CPU, replace(CPU, shm_id=25)],
            "ranks 0 and 2 have different /dev/shm: they are in different containers",
        ),
        ([CPU, replace(CPU, host="bob")], "ranks 0 and 1 are on different hosts, ada and bob"),
        (
            [GPUS[0], GPUS[1], replace(GPUS[2], boot_id="2e")],
            "ranks 0 and 2 are on different hosts, ada and ada",
        ),
        ([CPU, GPUS[1]], "ranks 0 and 1 are on different kinds of device, cpu and cuda:1"),
        (
            [GPUS[0], GPUS[1], replace(GPUS[1], device="cuda:0")],
            "ranks 0 and 2 both call their GPU cuda:0: let every rank see all GPUs "
            "(CUDA_VISIBLE_DEVICES)",
        ),
        (
            [GPUS[0], replace(GPUS[0], device="cuda:1")],
            "ranks 0 and 1 share one GPU, cuda:0 and cuda:1",
        ),
        ([SHARED[0], GPUS[0]], "ranks 0 and 1 share one GPU, cuda:0 and cuda:0"),
        (
            [*GPUS[:3], replace(GPUS[3], reachable=("a", "c"))],
            "no peer access from cuda:3 of rank 3 to cuda:1 of rank 1",
        ),
    ],
)
def test_problem_names_the_ranks_and_the_reason(
    locations: list[MemoryLocation], problem: str
) -> None:
    assert find_access_problem(locations) == problem


def test_location_of_a_gpu_has_uuid_and_reachable_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", PROPERTIES.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (2, 0))
    for device in ("cuda:2", "cuda"):
        place = peers._locate(torch.device(device))
        assert (place.device, place.uuid, place.reachable) == ("cuda:2", "c", ("b", "d"))
    assert peer_access(None, torch.device("cuda", 2)) == ""


@pytest.mark.parametrize(("weak", "kind"), [((), "NVLink"), ((3,), "PCIe")])
def test_link_is_pcie_if_any_peer_lacks_native_atomics(
    weak: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            self.code = 3 if name == "libcuda.so.1" else 1  # CUDA_ERROR_NOT_INITIALIZED

        def cuInit(self, flags: int) -> None:
            self.code = flags

        def cuDeviceGetP2PAttribute(self, value: object, which: int, gpu: int, peer: int) -> int:
            assert (which, gpu) == (3, 2)
            assert peer != 2
            value._obj.value = int(peer not in weak)  # pyright: ignore[reportAttributeAccessIssue]
            return self.code

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert link_kind(torch.device("cuda", 2)) == kind


def test_single_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert link_kind(torch.device("cuda", 0)) == link_kind(torch.device("cpu")) == ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_link_kind_agrees_with_the_doctor() -> None:
    words = {(link.kind or "").partition(" ")[0] for link in doctor._links()}
    assert link_kind(torch.device("cuda", 0)) in words


def _check_access(rank: int, num_ranks: int, missing: str) -> tuple[str, str, str]:
    found = peer_access(dist.group.WORLD, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOSTID", f"node-{rank}")
        emulated = peer_access(dist.group.WORLD, torch.device("cpu"))
        patch.delenv("NCCL_HOSTID")
        if rank == 1:
            patch.setattr(peers, "SHM", Path(missing))
        without = peer_access(dist.group.WORLD, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="no symmetric memory: rank 1 has no shared"):
            SharedHeap(dist.group.WORLD)
    return found, emulated, without.partition(":")[0]


def test_all_ranks_get_the_same_answer(run_ranks, tmp_path: Path) -> None:
    assert peer_access(None, torch.device("cpu")) == ""
    answers = run_ranks(_check_access, 2, str(tmp_path / "missing"))
    emulated = "ranks 0 and 1 are on different hosts, node-0 and node-1"
    assert answers == [("", emulated, "rank 1 has no shared memory")] * 2
