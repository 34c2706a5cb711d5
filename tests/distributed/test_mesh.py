"""Groups of the mesh and gradient sums, by hand on four ranks; ranks and devices of a launcher."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

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
from halley.moe.experts import GroupedExperts, expert_parameter_names
from tests.moe.model_case import MODELS, build_model, destroy


def _members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _place(rank: int, num_ranks: int, ep_size: int) -> tuple[object, ...]:
    groups = build_groups(ep_size, device_type="cpu")
    assert (groups.rank, groups.num_ranks) == (rank, num_ranks)
    place = (
        groups.ep_rank,
        groups.ep_size,
        _members(groups.world),
        _members(groups.ep),
        _members(groups.edp),
    )
    destroy(groups)
    return place


_ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ep_size", "want"),
    [
        (1, [(0, 1, _ALL, None, _ALL)] * 4),
        (
            2,
            [
                (0, 2, _ALL, [0, 1], [0, 2]),
                (1, 2, _ALL, [0, 1], [1, 3]),
                (0, 2, _ALL, [2, 3], [0, 2]),
                (1, 2, _ALL, [2, 3], [1, 3]),
            ],
        ),
        (0, [(rank, 4, _ALL, _ALL, None) for rank in range(4)]),  # 0 is all ranks
    ],
)
def test_groups_of_the_mesh(run_ranks, ep_size: int, want: list[tuple[object, ...]]) -> None:
    assert run_ranks(_place, 4, ep_size) == want


def _bad_groups(rank: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"ep_size \(3\) must divide the number of ranks \(4\)"):
        build_groups(3, device_type="cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    with pytest.raises(ValueError, match=r"mesh_dim_names \(\('ep', 'edp'\)\) must be"):
        ParallelGroups.from_mesh(mesh)
    destroy(ParallelGroups(mesh=mesh))


def test_ep_size_must_divide_the_ranks(run_ranks) -> None:
    run_ranks(_bad_groups, 4)


def test_one_process_needs_no_group() -> None:
    assert build_groups(0, device_type="cpu") == ParallelGroups()
    assert build_groups(1, device_type="cpu") == ParallelGroups()
    with pytest.raises(ValueError, match=r"ep_size \(2\) must divide the number of ranks \(1\)"):
        build_groups(2, device_type="cpu")
    with pytest.raises(ValueError, match=r"ep_size \(-1\) must be at least 0"):
        build_groups(-1, device_type="cpu")


def test_ranks_of_a_launcher_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"init_process_group must come first: .* one of 2 ranks"
    ):
        build_groups(0, device_type="cpu")


def _sync(rank: int, num_ranks: int, ep_size: int, bucket_bytes: int) -> tuple[list, list, float]:
    """Sum gradients that depend on the rank; return the dense ones, the experts', the norm."""
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
        (4, 12, [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]),  # no sums
    ],
)
def test_gradients_are_averaged_over_ranks(
    run_ranks, ep_size: int, bucket_bytes: int, experts_by_rank: list[list[float]]
) -> None:
    got = run_ranks(_sync, 4, ep_size, bucket_bytes)
    distinct = experts_by_rank[:ep_size]  # the other ranks hold copies
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


def test_grouped_experts_hold_the_experts_of_their_rank() -> None:
    size = {"hidden_size": 4, "intermediate_size": 8, "up_size": 16, "bias": True}
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    groups = ParallelGroups(rank=5, num_ranks=8, ep_rank=1, ep_size=4)
    experts = GroupedExperts(num_experts=12, groups=groups, **size, **place)
    assert experts.expert_ids == (3, 4, 5)
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {
        "gate_up_proj": (3, 16, 4),
        "down_proj": (3, 4, 8),
        "gate_up_proj_bias": (3, 16),
        "down_proj_bias": (3, 4),
    }
    with pytest.raises(ValueError, match=r"num_experts \(6\) must be divisible by ep_size \(4\)"):
        GroupedExperts(num_experts=6, groups=groups, **size, **place)


def test_names_of_expert_parameters_are_found() -> None:
    config = MODELS["shared experts"]
    model = build_model(dataclasses.replace(config, num_dense_layers=1, dense_intermediate_size=8))
    names = ["gate_up_proj", "down_proj"]
    assert expert_parameter_names(model) == {f"layers.1.mlp.experts.{name}" for name in names}
    experts = model.get_submodule("layers.1.mlp.experts")
    assert expert_parameter_names(experts) == set(names)
    assert expert_parameter_names(nn.Linear(2, 2)) == set()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_without_a_launcher_there_is_one_rank_and_no_group() -> None:
    assert not is_launched()
    with join_world("cpu") as world:
        assert (world.rank, world.num_ranks, world.is_first) == (0, 1, True)
        assert world.device == torch.device("cpu")
        assert world.store is None
        assert not dist.is_initialized()


@pytest.mark.usefixtures("no_launcher")
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


@pytest.mark.usefixtures("no_launcher")
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
