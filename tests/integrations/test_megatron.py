"""Megatron-Core models train as without Halley, and checkpoints are interchangeable."""

import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.megatron_case import (
    Case,
    build_model,
    checkpointing,
    halley_megatron,
    make_config,
    make_spec,
    on_cpu,
    run_step,
    specs,
    start,
    train,
)
from tests.rank_pool import RunRanks


NUM_STEPS, TOLERANCE = 4, 1e-5
CASES = {
    "plain": Case(),
    "batch overlap": Case(schedule="batch overlap"),
    "main_grad": Case(fusion=True),
    "shared experts": Case(settings={"moe_shared_expert_intermediate_size": 24}),
    "no gate": Case(
        settings={"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}
    ),
    "own activation": Case(settings={"activation_func": torch.nn.functional.gelu}),
    "capacity": Case(settings={"moe_expert_capacity_factor": 1.0}),
}

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_megatron.py"


def _losses(
    rank: int, num_ranks: int, case: Case, strategy: str
) -> tuple[list[float], list[float], dict[str, str]]:
    expected, ran = train(rank, num_ranks, case, NUM_STEPS)
    assert ran == {}
    return expected, *train(rank, num_ranks, replace(case, strategy=strategy), NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "sequential") for name in CASES),
        ("batch overlap", "chunked"),
        ("batch overlap", "fused:recompute"),
        ("main_grad", "fused"),
    ],
)
def test_losses_equal_megatrons(
    name: str,
    strategy: str,
    run_ranks: RunRanks,
    record_property: Callable[[str, str], None],
) -> None:
    for expected, losses, ran in run_ranks(_losses, 2, CASES[name], strategy):
        assert expected[-1] < expected[0]
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        path = f"halley: {strategy}"
        if name == "own activation":
            path += ", with the framework's own expert code: the experts' activation is gelu"
        assert ran == {f"decoder.layers.{i}.mlp": path for i in range(2)}
    record_property("ran", strategy)


def _main_grads(rank: int, num_ranks: int, case: Case) -> tuple[dict[str, torch.Tensor], set[bool]]:
    """Return the experts' gradient buffers, and the flags ``grad_added_to_main_grad``."""
    with on_cpu():
        model = build_model(case, num_ranks)
        model.zero_grad_buffer()
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(rank))
        run_step(model, tokens, case.schedule)
        model.finish_grad_sync()
        experts = {n: p for n, p in model.named_parameters() if "experts" in n}
    added = {parameter.grad_added_to_main_grad for parameter in experts.values()}
    return {name: parameter.main_grad for name, parameter in experts.items()}, added


def test_kernels_add_to_main_grad(run_ranks: RunRanks) -> None:
    expected = run_ranks(_main_grads, 2, Case(strategy="sequential"))
    found = run_ranks(_main_grads, 2, Case(strategy="fused", fusion=True))
    for (gradients, added), (expected_gradients, _) in zip(found, expected, strict=True):
        assert added == {True}
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-7)
        assert all(gradient.any() for gradient in gradients.values())


def _exchange(rank: int, num_ranks: int, folder: Path, writer: str, singleton: bool) -> None:
    """Save a model, load it into one with the other kind of layers, and compare the experts."""
    reader = "" if writer else "sequential"
    with on_cpu():
        metadata = {"singleton_local_shards": singleton}
        models = [build_model(Case(strategy=kind), num_ranks).module for kind in (writer, reader)]
        torch.manual_seed(rank + 1)
        with torch.no_grad():
            for parameter in models[0].parameters():
                if not getattr(parameter, "allreduce", True):
                    parameter.normal_()
        state = models[0].sharded_state_dict(metadata=metadata)
        checkpointing.save(state, str(folder))
        state = models[1].sharded_state_dict(metadata=metadata)
        models[1].load_state_dict(checkpointing.load(state, str(folder)))
    stacks, alone_experts = (models[1], models[0]) if reader else (models[0], models[1])
    for mine, theirs in zip(stacks.decoder.layers, alone_experts.decoder.layers, strict=True):
        experts = theirs.mlp.experts.local_experts
        for name, layer in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
            expected = torch.stack([getattr(expert, layer).weight for expert in experts])
            assert torch.equal(mine.mlp.experts.get_parameter(name), expected)


@pytest.mark.parametrize(("writer", "singleton"), [("", False), ("sequential", True)])
def test_checkpoints_are_interchangeable(
    writer: str, singleton: bool, tmp_path: Path, run_ranks: RunRanks
) -> None:
    run_ranks(_exchange, 2, tmp_path, writer, singleton)


def _run_unsupported(
    rank: int, num_ranks: int, settings: dict[str, Any], strict: bool
) -> list[str]:
    """Build and run a model with a setting that Halley cannot run; return the messages."""
    with on_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = Case(strategy="unfused" if strict else "unfused:inputs", settings=settings)
        try:
            model = build_model(case, num_ranks, strict=strict)
        except ValueError as error:
            return [str(error)]
        tokens = torch.randint(0, 64, (2, 17))
        run_step(model, tokens, case.schedule)
        paths = halley_megatron.describe(model.module).values()
    return [*paths, *(str(w.message) for w in caught if "must be" in str(w.message))]


@pytest.mark.parametrize("strict", [False, True])
def test_unsupported_settings_are_left_to_megatron(strict: bool, run_ranks: RunRanks) -> None:
    settings = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True}
    problem = "moe_shared_expert_overlap (True) must be False"
    first, second = run_ranks(_run_unsupported, 2, settings, strict)
    if strict:
        for (said,) in (first, second):
            assert said.startswith(f"{problem} when instantiating")  # Megatron appends to it
    else:
        assert second == [f"megatron: {problem}"] * 2
        assert first == [*second, f"{problem}; Megatron runs the layer"]


def _divide(rank: int, num_ranks: int) -> str:
    with on_cpu():
        start(num_ranks)
        config = make_config(num_ranks, num_moe_experts=8)
        config.num_moe_experts = 7  # Megatron itself checks complete configurations
        with pytest.raises(ValueError, match="num_experts") as caught:
            halley_megatron.HalleyMoELayer(config, strategy="sequential")
    return str(caught.value)


def test_uneven_experts_are_an_error(run_ranks: RunRanks) -> None:
    said = run_ranks(_divide, 2)
    assert said == ["num_experts (7) must be divisible by ep_size (2)"] * 2


def test_deprecated_use_halley_warns_and_works() -> None:
    with pytest.warns(FutureWarning, match=r"^use_halley is deprecated: use .*megatron.enable$"):
        spec = halley_megatron.use_halley(make_spec(), strategy="chunked")
    assert spec.submodules.mlp.module is halley_megatron.HalleyMoELayer
    assert spec.submodules.mlp.params["strategy"] == "chunked"


def test_spec_without_experts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^spec \(ModuleSpec\) must have a layer with module MoE"):
        halley_megatron.enable(specs.get_gpt_layer_local_spec())


def _job(moe_layer_freq: Any, stages: int | None) -> Any:
    """Return ``job_spec()`` with a stand-in for Megatron-LM, which pip cannot install."""
    config = make_config(1, moe_layer_freq=moe_layer_freq)
    arguments = SimpleNamespace(
        moe_layer_freq=moe_layer_freq,
        num_layers=2,
        transformer_impl="local",
        normalization="RMSNorm",
        qk_l2_norm=False,
        virtual_pipeline_model_parallel_size=stages,
    )
    training, parser = ModuleType("megatron.training"), ModuleType("megatron.training.arguments")
    vars(training)["get_args"] = lambda: arguments
    vars(parser)["core_transformer_config_from_args"] = lambda args: config
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, training.__name__, training)
        patch.setitem(sys.modules, parser.__name__, parser)
        return halley_megatron.job_spec()


def _job_specs(rank: int, num_ranks: int) -> list[Any]:
    with on_cpu():
        start(num_ranks)
        one, mixed = _job(1, 2), _job([0, 1], None)
        with pytest.raises(
            ValueError, match=r"^moe_layer_freq \(\[0, 1\]\) must be 1 with virtual"
        ):
            _job([0, 1], 2)
    layers = [one, *mixed.layer_specs]
    return [layer.submodules.mlp.module.__name__ for layer in layers]


def test_job_spec_replaces_the_moe_layers_only(run_ranks: RunRanks) -> None:
    assert run_ranks(_job_specs, 2)[0] == ["HalleyMoELayer", "MLP", "HalleyMoELayer"]
    assert halley_megatron.layer_spec is None  # outside of a job


def _run_example(rank: int, num_ranks: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of its own settings
        return runpy.run_path(str(EXAMPLE))["train"](num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert lines[-2:] == ["halley: sequential", "8 experts on 2 ranks"]
