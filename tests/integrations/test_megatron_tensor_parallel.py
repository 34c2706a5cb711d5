"""Layers with expert tensor parallelism equal Megatron-Core's, and share checkpoints with them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.integrations.framework_case import check_losses, train_both
from tests.integrations.megatron_case import (
    Case,
    build_model,
    checkpointing,
    experts_of,
    halley_megatron,
    on_cpu,
    train,
)
from tests.rank_pool import RunRanks


# With "alltoall", gloo lacks the all-gather of unequal numbers of tokens that Megatron calls.
ETP2 = {"expert_tensor_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}
CASES = {
    "etp2": Case(settings={**ETP2, "expert_model_parallel_size": 1}),
    "etp2, own activation": Case(
        settings={
            **ETP2,
            "expert_model_parallel_size": 1,
            "activation_func": torch.nn.functional.gelu,
        }
    ),
    "ep2 x etp2": Case(num_ranks=4, settings=ETP2),
}


def _run_layer(rank: int, num_ranks: int, case: Case) -> list[torch.Tensor]:
    """Return output and gradients of one MoE layer: tokens, router, experts of this rank."""
    with on_cpu():
        model = build_model(case, num_ranks)
        model.zero_grad_buffer()
        layer = model.module.decoder.layers[0].mlp
        generator = torch.Generator().manual_seed(rank)
        x_SBD = torch.randn(6, 2, 32, generator=generator, requires_grad=True)
        y_SBD, _ = layer(x_SBD)
        y_SBD.square().sum().backward()
        experts = experts_of(model, lambda weight: weight.main_grad)[:2]
    assert x_SBD.grad is not None
    return [y_SBD.detach(), x_SBD.grad, layer.router.weight.main_grad, *experts]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("etp2", "sequential"),
        ("etp2", "fused"),
        ("etp2, own activation", "sequential"),
        ("ep2 x etp2", "sequential"),
        ("ep2 x etp2", "fused"),
    ],
)
def test_values_of_a_layer_with_tensor_parallel_experts(
    name, strategy, run_ranks, record_property
) -> None:
    """Also of a rank's shards alone, before data parallelism sums their gradients."""
    case = CASES[name]
    expected = run_ranks(_run_layer, case.num_ranks, case)
    enabled = replace(case, strategy=strategy)
    found = run_ranks(_run_layer, case.num_ranks, enabled, timeout_s=180.0)
    for values, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        assert all(value.any() for value in values)
    record_property("ran", strategy)


def test_losses_equal_megatrons_with_tensor_parallel_experts(run_ranks: RunRanks) -> None:
    """Data parallelism sums the gradients of equal shards only."""
    case = CASES["ep2 x etp2"]
    enabled = replace(case, strategy="sequential")
    arguments = (train_both, case.num_ranks, train, case, enabled, case.num_steps)
    found = run_ranks(*arguments, timeout_s=240.0)
    check_losses(found, "decoder.layers.{}.mlp", "halley: sequential")


def _exchange(rank: int, num_ranks: int, folder: Path, case: Case, singleton: bool) -> None:
    """Save Halley's experts, perhaps each with a key of its own; load them into Megatron's."""
    with on_cpu():
        metadata = {"singleton_local_shards": singleton}
        kinds = (replace(case, strategy=strategy) for strategy in ("sequential", ""))
        written, read = (build_model(kind, num_ranks) for kind in kinds)
        torch.manual_seed(rank + 1)
        for stack in experts_of(written):
            stack.normal_()
        state = written.module.sharded_state_dict(metadata=metadata)
        checkpointing.save(state, str(folder))
        state = read.module.sharded_state_dict(metadata=metadata)
        read.module.load_state_dict(checkpointing.load(state, str(folder)))
    for mine, theirs in zip(experts_of(written), experts_of(read), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("case", "singleton"),
    [(Case(), True), (CASES["etp2"], True), (CASES["etp2"], False)],
)
def test_checkpoints_are_interchangeable(case, singleton, tmp_path, run_ranks) -> None:
    run_ranks(_exchange, 2, tmp_path, case, singleton)


def _divide_size(rank: int, num_ranks: int) -> str:
    settings = {**CASES["etp2"].settings, "moe_ffn_hidden_size": 25}
    case = Case(strategy="sequential", settings=settings)
    with on_cpu(), pytest.raises(ValueError, match="moe_ffn_hidden_size") as caught:
        build_model(case, num_ranks)
    return str(caught.value)


def test_uneven_shards_of_experts_are_an_error(run_ranks: RunRanks) -> None:
    rule = "moe_ffn_hidden_size (25) must be a multiple of expert_tensor_parallel_size (2)"
    assert all(said.startswith(rule) for said in run_ranks(_divide_size, 2))


def _find_order_problem(rank: int, num_ranks: int) -> list[str]:
    """Check groups of two ranks that share experts: adjacent ones, then every second rank."""
    found: list[str] = []
    for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        group, _ = dist.new_subgroups_by_enumeration(pairs)
        groups = SimpleNamespace(tp_ep=dist.group.WORLD, expt_tp=group)
        found.append(halley_megatron.find_order_problem(groups))
    return found


def test_ranks_that_share_experts_must_be_adjacent(run_ranks: RunRanks) -> None:
    """Else Halley would send tokens to ranks with other experts."""
    for rank, found in enumerate(run_ranks(_find_order_problem, 4)):
        pair = [[0, 2], [1, 3]][rank % 2]
        rule = f"expert-tensor-parallel ranks ({pair}) must be adjacent in [0, 1, 2, 3]"
        assert found == ["", rule]
