"""``halley.MoE`` builds its groups, and equals the reference on one and two ranks."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import halley
from halley.core.reference import moe_reference
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.gpus import needs_kernels
from tests.rank_pool import RunRanks


SIZES = {"hidden_size": 16, "num_experts": 8, "top_k": 2, "intermediate_size": 8, "device": "cpu"}
NUM_TOKENS = (9, 5)  # of each rank


def _tokens(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(NUM_TOKENS[rank], 16, generator=generator)


def _expected(num_ranks: int) -> dict[str, torch.Tensor]:
    """Return outputs of all ranks, and gradients of the mean of the ranks' losses."""
    layer = halley.MoE(**SIZES, seed=3).layer
    outputs = []
    for rank in range(num_ranks):
        routed = layer.router(_tokens(rank))
        outputs.append(moe_reference(_tokens(rank), routed.routing, layer.local_experts()))
        loss = outputs[-1].square().mean() + routed.loss
        (loss / num_ranks).backward()
    grads = {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": torch.cat(outputs).detach()} | {n: g for n, g in grads.items() if g is not None}


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert relative_error(got, want) <= RELATIVE_TOLERANCE[torch.float32]


def _train_step(rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Run the example in the docstring of ``MoE``; return output and gradients of this rank."""
    layer = halley.MoE(**SIZES, seed=3, strategy="sequential")
    y_TD = layer(_tokens(rank))
    assert isinstance(y_TD, torch.Tensor)
    assert int(layer.expert_counts.sum()) == 2 * NUM_TOKENS[rank]
    (y_TD.square().mean() + layer.aux_loss).backward()
    layer.sync_gradients()
    names = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    values = {"y": y_TD.detach()}
    parameters = (*layer.shared_parameters(), *layer.expert_parameters())
    for name, parameter in zip(names, parameters, strict=True):
        assert parameter.grad is not None
        values[f"{name}.grad"] = parameter.grad
    return values


@needs_kernels
def test_default_device_is_the_gpu_and_values_equal_the_reference() -> None:
    """In float32, "auto" measures the strategies on collectives; in bfloat16 also "fused"."""
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    for dtype in (torch.float32, torch.bfloat16):
        moe = halley.MoE(**sizes, seed=3, dtype=dtype)
        x_TD = _tokens(0).to("cuda", dtype)
        with torch.no_grad():
            want_TD = moe_reference(x_TD, moe.layer.router(x_TD).routing, moe.layer.local_experts())
        y_TD = moe(x_TD)
        assert y_TD.device.type == "cuda"
        assert relative_error(y_TD.detach(), want_TD) <= RELATIVE_TOLERANCE[dtype]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_equal_the_reference(run_ranks: RunRanks, num_ranks: int) -> None:
    """Experts are spread over the default group, with the initial weights of a single rank."""
    ranks = run_ranks(_train_step, 2) if num_ranks == 2 else [_train_step(0, 1)]
    want = _expected(num_ranks)
    for got in ranks:
        assert got.keys() == want.keys()
        _assert_close(got["router.weight.grad"], want["router.weight.grad"])
    for name in ("y", "experts.gate_up_proj.grad", "experts.down_proj.grad"):
        _assert_close(torch.cat([got[name] for got in ranks]), want[name])


def test_batch_of_sequences_equals_its_tokens() -> None:
    layer = halley.MoE(**SIZES, seed=0)
    x_BSD = torch.randn(2, 3, 16)
    y_BSD = layer(x_BSD)
    y_TD, aux_loss, expert_counts = layer(x_BSD.flatten(0, 1), return_aux=True)
    assert y_BSD.shape == (2, 3, 16)
    assert torch.equal(y_BSD.flatten(0, 1), y_TD)
    assert aux_loss is layer.aux_loss
    assert expert_counts is layer.expert_counts


def _draw(rank: int, num_ranks: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # only the first rank's generator matters
    layers = [halley.MoE(**SIZES, strategy="sequential") for _ in range(2)]
    return [layer.layer.router.weight.detach() for layer in layers]


def test_layers_without_a_seed_differ_but_ranks_agree(run_ranks: RunRanks) -> None:
    (first, second), other_rank = run_ranks(_draw, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first, other_rank[0])
    assert torch.equal(second, other_rank[1])


def test_group_of_some_ranks_is_used(run_ranks: RunRanks) -> None:
    """Each rank forms a group alone, so each holds all experts."""
    assert run_ranks(_count_alone, 2) == [8, 8]


def _count_alone(rank: int, num_ranks: int) -> int:
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    assert isinstance(group, dist.ProcessGroup)
    layer = halley.MoE(**SIZES, group=group, strategy="sequential")
    dist.destroy_process_group(group)
    return layer.layer.experts.placement.num_local


def test_a_process_of_torchrun_starts_the_group_and_compiles() -> None:
    code = (
        "import torch, halley, torch.distributed as dist\n"
        "halley.MoE(hidden_size=16, num_experts=8, top_k=2, intermediate_size=8, device='cpu')\n"
        "print(dist.get_backend(), dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
        "print(halley.compile(torch.square, inner='eager')(torch.tensor(3)).item())"
    )
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {**os.environ, **launched}
    env.pop("TRITON_INTERPRET", None)  # Halley sets it where there is no GPU
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["gloo", "1", "9"], result.stderr


def test_strategy_object_is_run() -> None:
    place = {"recorder": halley.Recorder("cpu"), "device": "cpu"}
    strategy = halley.build_strategy("sequential", None, **place)
    moe = halley.MoE(**SIZES, strategy=strategy)
    assert moe.layer.strategy is strategy
    moe(torch.randn(4, 16))
    assert moe.expert_counts.sum() == 8


def test_compiled_layer_has_the_values_of_the_eager_one() -> None:
    layer = halley.MoE(**SIZES, seed=1, strategy="functional")
    x_TD = torch.randn(6, 16)
    assert torch.equal(halley.compile(layer, inner="eager")(x_TD), layer(x_TD))
    with pytest.raises(ValueError, match=r"key \(speed\) must be one of passes"):
        halley.compile(layer, speed="high")
    torch.compiler.reset()


def test_rows_must_be_aligned() -> None:
    sizes: dict[str, Any] = SIZES | {"intermediate_size": 12}
    with pytest.raises(ValueError, match=r"intermediate_size \(12\) must be a multiple of 8 for"):
        halley.MoE(**sizes, dtype=torch.bfloat16)
