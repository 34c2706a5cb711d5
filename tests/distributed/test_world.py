"""The ranks of a run as the launcher's environment tells them."""

import pytest
import torch
import torch.distributed as dist

from halley.distributed.mesh import is_launched, join_world, pick_device


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank_and_no_group() -> None:
    assert not is_launched()
    with join_world("cpu") as world:
        assert (world.rank, world.num_ranks, world.is_first) == (0, 1, True)
        assert world.device == torch.device("cpu")
        assert world.store is None
        assert not dist.is_initialized()


def test_a_launched_rank_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
