"""Groups of the mesh and gradient sums on four ranks; ranks and devices under a launcher."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.distributed import mesh as mesh_module
from halley.distributed.mesh import (
    ParallelGroups,
    build_groups,
    global_norm,
    is_launched,
    join_world,
    pick_device,
    sync_gradients,
)
from tests.moe.model_case import destroy


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _place(rank: int, num_ranks: int, ep_size: int) -> tuple[object, ...]:
    groups = build_groups(ep_size, device_type="cpu")
    assert (groups.rank, groups.num_ranks) == (rank, num_ranks)
    members = [_members(group) for group in (groups.world, groups.ep, groups.edp)]
    destroy(groups)
    return groups.ep_rank, groups.ep_size, *members


_ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ep_size", "eps", "edps"),
    [
        (1, [None] * 4, [_ALL] * 4),
        (2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (0, [_ALL] * 4, [None] * 4),  # 0 is all ranks
    ],
)
def test_groups_of_the_mesh(run_ranks, ep_size: int, eps: list[Any], edps: list[Any]) -> None:
    size = ep_size or 4
    places = zip(eps, edps, strict=True)
    want = [(rank % size, size, _ALL, ep, edp) for rank, (ep, edp) in enumerate(places)]
    assert run_ranks(_place, 4, ep_size) == want


def test_one_process_needs_no_group() -> None:
    for ep_size in (0, 1):
        assert build_groups(ep_size, device_type="cpu") == ParallelGroups()


def test_ranks_of_a_launcher_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"init_process_group must come first: .* 2 ranks"):
        build_groups(0, device_type="cpu")


def _sync(rank: int, num_ranks: int, ep_size: int, bucket_bytes: int) -> tuple[list, list, float]:
    """Sum gradients that depend on the rank; return dense gradients, those of experts, the norm."""
    groups = build_groups(ep_size, device_type="cpu")
    dense = [
        torch.tensor([rank, 10.0 * rank]),
        torch.tensor([[1.0], [8.0 * rank]], dtype=torch.bfloat16),
        torch.zeros(0),
    ]
    expert = [torch.tensor([4.0 * rank]), torch.tensor([4.0])]
    before = mesh_module.BUCKET_BYTES
    mesh_module.BUCKET_BYTES = bucket_bytes
    sync_gradients(iter(dense), iter(expert), groups=groups)
    mesh_module.BUCKET_BYTES = before
    norm = global_norm(iter(dense), iter(expert), groups=groups)
    destroy(groups)
    assert dense[1].dtype == torch.bfloat16
    return [g.tolist() for g in dense], [g.tolist() for g in expert], norm.item()


@pytest.mark.parametrize(
    ("ep_size", "bucket_bytes", "experts_by_rank"),
    [
        (1, 1, [[6.0, 4.0]] * 4),  # (0 + 4 + 8 + 12) / 4 on all ranks
        (2, 12, [[2.0, 2.0], [4.0, 2.0]] * 2),  # sums of ranks 0 and 2, and of ranks 1 and 3
        (2, 1 << 20, [[2.0, 2.0], [4.0, 2.0]] * 2),
        (4, 12, [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]),  # no expert has two copies
    ],
)
def test_gradients_are_averaged_over_ranks(run_ranks, ep_size, bucket_bytes, experts_by_rank):
    got = run_ranks(_sync, 4, ep_size, bucket_bytes)
    distinct = experts_by_rank[:ep_size]  # other ranks hold copies of these experts
    squares = 1.5**2 + 15.0**2 + 1.0**2 + 12.0**2 + sum(a * a + b * b for a, b in distinct)
    for rank, (dense, expert, norm) in enumerate(got):
        assert dense == [[1.5, 15.0], [[1.0], [12.0]], []]
        assert expert == [[value] for value in experts_by_rank[rank]]
        assert norm == pytest.approx(squares**0.5, rel=1e-6)


def test_one_process_keeps_its_gradients() -> None:
    dense, expert = [torch.tensor([3.0])], [torch.tensor([4.0])]
    sync_gradients(dense, expert, groups=ParallelGroups())
    assert (dense[0].item(), expert[0].item()) == (3.0, 4.0)
    assert global_norm(dense, expert, groups=ParallelGroups()).item() == 5.0
    assert global_norm([], expert, groups=ParallelGroups()).item() == 4.0
    assert global_norm([], [], groups=ParallelGroups()).item() == 0.0


def test_without_a_launcher_there_is_one_rank_and_no_group() -> None:
    assert not is_launched()
    with join_world("cpu") as world:
        assert (world.rank, world.num_ranks, world.is_first) == (0, 1, True)
        assert world.device == torch.device("cpu")
        assert world.store is None
        assert not dist.is_initialized()


def test_launched_rank_joins_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with join_world("cpu") as world:
        total = torch.tensor([3.0])
        dist.all_reduce(total)
        assert total.item() == 3.0
        assert world.store is not None
        world.store.set("key", "value")
        assert world.store.get("key") == b"value"
    assert not dist.is_initialized()


def test_device_of_a_rank_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device \(tpu\) must be one of auto, cpu, cuda"):
        pick_device("tpu")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(ValueError, match=r"nproc \(5\) must be at most the number of GPUs \(4\)"):
        pick_device("cuda")
