"""``halley.MoE`` builds its groups and equals the reference, forward and backward."""

import os
import subprocess
import sys
from typing import final

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
    """Run the steps of the class docstring; return output and gradients of this rank."""
    layer = halley.MoE(**SIZES, seed=3, strategy="sequential")
    y_TD = layer(_tokens(rank))
    assert isinstance(y_TD, torch.Tensor)
    assert int(layer.expert_counts.sum()) == 2 * NUM_TOKENS[rank]
    (y_TD.square().mean() + layer.aux_loss).backward()
    layer.sync_gradients()
    (router,) = layer.shared_parameters()
    up, down = layer.expert_parameters()
    assert router.grad is not None
    assert up.grad is not None
    assert down.grad is not None
    return {
        "y": y_TD.detach(),
        "router.weight.grad": router.grad,
        "experts.gate_up_proj.grad": up.grad,
        "experts.down_proj.grad": down.grad,
    }


def test_one_rank_equals_the_reference() -> None:
    got, want = _train_step(0, 1), _expected(1)
    assert got.keys() == want.keys()
    for name, value in want.items():
        _assert_close(got[name], value)


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


def test_two_ranks_equal_the_reference(run_ranks: RunRanks) -> None:
    """The experts are spread over the default group, their initial weights those of one rank."""
    ranks, want = run_ranks(_train_step, 2), _expected(2)
    _assert_close(torch.cat([got["y"] for got in ranks]), want["y"])
    for got in ranks:
        _assert_close(got["router.weight.grad"], want["router.weight.grad"])
    for name in ("experts.gate_up_proj.grad", "experts.down_proj.grad"):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, r"top_k \(9\) must be between 1 and num_experts \(8\)"),
        ({"hidden_size": 6}, r"hidden_size \(6\) must be a multiple of 4"),
        ({"strategy": "fastest"}, r"strategy \(fastest\) must be one of sequential"),
        ({"strategy": None}, r"strategy \(None\) must be of type"),
        ({"group": "all"}, r"group \('all'\) must be of type"),
        ({"seed": 0.5}, r"seed \(0.5\) must be of type"),
    ],
)
def test_wrong_argument_is_named(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {**SIZES, **changes}
    with pytest.raises(ValueError, match=message):
        halley.MoE(**arguments)  # pyright: ignore[reportArgumentType]


def test_wrong_input_is_named() -> None:
    layer = halley.MoE(**SIZES)
    with pytest.raises(ValueError, match=r"x \(3, 8\) must be \(..., hidden_size\)"):
        layer(torch.zeros(3, 8))


def test_torchrun_environment_starts_the_group() -> None:
    code = (
        "import torch, halley, torch.distributed as dist\n"
        "halley.MoE(hidden_size=16, num_experts=8, top_k=2, intermediate_size=8, device='cpu')\n"
        "print(dist.get_backend(), dist.get_world_size())\n"
        "dist.destroy_process_group()"
    )
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=os.environ | launched, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.split() == ["gloo", "1"]


@final
class _PlainStrategy(halley.AbstractStrategy):
    """A strategy that a user might write, for one rank."""

    def forward(
        self, x_TD: torch.Tensor, routing: halley.Routing, experts: halley.Experts
    ) -> torch.Tensor:
        return moe_reference(x_TD, routing, experts)

    def tasks(self, shape: halley.LayerShape, predictor: halley.Predictor) -> list[halley.Task]:
        return []


def test_strategy_of_the_user_is_run() -> None:
    layer = halley.MoE(**SIZES, seed=1, strategy=_PlainStrategy())
    x_TD = torch.randn(4, 16)
    _assert_close(layer(x_TD), halley.MoE(**SIZES, seed=1)(x_TD))


def test_compiled_layer_has_the_values_of_the_eager_one() -> None:
    layer = halley.MoE(**SIZES, seed=1, strategy="functional")
    x_TD = torch.randn(6, 16)
    assert torch.equal(halley.compile(layer, inner="eager")(x_TD), layer(x_TD))
    with pytest.raises(ValueError, match=r"options \(speed\) must be of"):
        halley.compile(layer, speed="high")
    torch.compiler.reset()
