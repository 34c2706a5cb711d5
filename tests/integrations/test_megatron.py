"""Megatron-Core models train as without Halley, and checkpoints are interchangeable."""

import importlib
import runpy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.integrations.framework_case import check_losses, messages, train_both
from tests.integrations.megatron_case import (
    Case,
    build_model,
    checkpointing,
    class_and_options,
    experts_of,
    forget_groups,
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


NUM_RESUMED_STEPS = 2  # before a checkpoint, and again after it
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
    "dp2 x ep2": Case(num_ranks=4, num_steps=10),
}

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_megatron.py"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "sequential") for name, case in CASES.items() if case.num_ranks == 2),
        ("batch overlap", "chunked"),
        ("batch overlap", "fused:recompute"),
        ("main_grad", "fused"),
        ("dp2 x ep2", "fused"),
    ],
)
def test_losses_equal_megatrons(name, strategy, run_ranks, record_property) -> None:
    case = CASES[name]
    enabled = replace(case, strategy=strategy)
    arguments = (train_both, case.num_ranks, train, case, enabled, case.num_steps)
    found = run_ranks(*arguments, timeout_s=240.0)
    reason = "the experts' activation is gelu" if name == "own activation" else ""
    check_losses(found, "decoder.layers.{}.mlp", f"halley: {strategy}", reason=reason)
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


class _CudaNames(TorchFunctionMode):
    """Replace the device "cuda", which Megatron's optimizers ask for, by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _build(strategy: str, num_ranks: int) -> tuple[Any, Any]:
    """Return a model and its Megatron optimizer; strategy "" builds Megatron's own layers."""
    model = build_model(Case(strategy=strategy), num_ranks)
    optimizers: Any = importlib.import_module("megatron.core.optimizer")
    config = optimizers.OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0)
    return model, optimizers.get_megatron_optimizer(config, [model])


def _state_of(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return {"model": weights, "optimizer": state}


def _train_by_optimizer(model: Any, optimizer: Any, tokens: list[torch.Tensor]) -> list[float]:
    losses: list[float] = []
    for batch in tokens:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run_step(model, batch, "plain"))
        model.finish_grad_sync()
        optimizer.step()
    return losses


def _resume(
    rank: int, num_ranks: int, folder: Path, writer: str, reader: str
) -> tuple[list[float], list[float], float]:
    """Return the later losses of the model that saved and of the one that loaded.

    The third value is the largest difference of their expert weights at the end.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = [
        torch.randint(0, 64, (2, 17), generator=generator) for _ in range(2 * NUM_RESUMED_STEPS)
    ]
    with on_cpu(), _CudaNames():
        model, optimizer = _build(writer, num_ranks)
        _train_by_optimizer(model, optimizer, tokens[:NUM_RESUMED_STEPS])
        checkpointing.save(_state_of(model, optimizer, is_loading=False), str(folder))
        expected = _train_by_optimizer(model, optimizer, tokens[NUM_RESUMED_STEPS:])

        other, other_optimizer = _build(reader, num_ranks)
        # Other weights and optimizer states, which the checkpoint must replace.
        _train_by_optimizer(other, other_optimizer, tokens[-1:])
        state = _state_of(other, other_optimizer, is_loading=True)
        state = checkpointing.load(state, str(folder))
        other.module.load_state_dict(state["model"])
        other_optimizer.load_state_dict(state["optimizer"])
        losses = _train_by_optimizer(other, other_optimizer, tokens[NUM_RESUMED_STEPS:])
    pairs = zip(experts_of(model), experts_of(other), strict=True)
    return expected, losses, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("writer", "reader"), [("sequential", "sequential"), ("sequential", ""), ("", "sequential")]
)
def test_training_resumes_from_checkpoints_of_either_kind(writer, reader, tmp_path, run_ranks):
    """Bit for bit with the same kind of layers."""
    tolerance = 0.0 if writer == reader else 1e-5
    for expected, losses, difference in run_ranks(_resume, 2, tmp_path, writer, reader):
        assert losses == pytest.approx(expected, rel=0, abs=tolerance)
        assert difference <= 10 * tolerance


def _run_unsupported(
    rank: int, num_ranks: int, settings: dict[str, Any], strict: bool
) -> list[str]:
    """Build and run a model with a setting that Halley cannot run; return the messages."""
    case = Case(strategy="unfused" if strict else "unfused:inputs", settings=settings)
    with on_cpu(), messages() as found:
        model = build_model(case, num_ranks, strict=strict)
        run_step(model, torch.randint(0, 64, (2, 17)), case.schedule)
        found += halley_megatron.describe(model.module).values()
    return found


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


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("add_bias_linear", True, "False"),
        ("moe_mlp_glu_interleave_size", 32, "None"),
        ("moe_token_dispatcher_type", "flex", "one of allgather, alltoall"),
        ("transformer_impl", "inference_optimized", "one of local, transformer_engine"),
    ],
)
def test_settings_that_halley_cannot_run_are_named(name, value, rule) -> None:
    with on_cpu():
        config = make_config(1)
    assert halley_megatron.find_problem(config) == ""
    setattr(config, name, value)
    assert halley_megatron.find_problem(config) == f"{name} ({value}) must be {rule}"


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
    layer, options = class_and_options(spec)
    assert layer is halley_megatron.HalleyMoELayer
    assert options["strategy"] == "chunked"


def test_spec_without_experts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^spec \(ModuleSpec\) must have a layer of class MoE"):
        halley_megatron.enable(specs.get_gpt_layer_local_spec())


def _job(moe_layer_freq: Any, stages: int | None) -> Any:
    """Return ``job_spec()`` with a stand-in for the modules of Megatron-LM, which need GPUs."""
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


def _job_specs(rank: int, num_ranks: int) -> list[bool]:
    with on_cpu():
        start(num_ranks)
        one, mixed = _job(1, 2), _job([0, 1], None)
        rule = r"^moe_layer_freq \(\[0, 1\]\) must be 1 with virtual"
        with pytest.raises(ValueError, match=rule):
            _job([0, 1], 2)
    layers = [one, *mixed.layer_specs]
    return [class_and_options(layer)[0] is halley_megatron.HalleyMoELayer for layer in layers]


def test_job_spec_replaces_the_moe_layers_only(run_ranks: RunRanks) -> None:
    assert run_ranks(_job_specs, 2)[0] == [True, False, True]
    assert halley_megatron.layer_spec is None  # outside of a job


def _run_example(rank: int, num_ranks: int) -> list[str]:
    forget_groups()
    with warnings.catch_warnings(action="ignore"):  # Megatron warns of its own settings
        return runpy.run_path(str(EXAMPLE))["train"](num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert lines[-2:] == ["halley: sequential", "8 experts on 2 ranks"]
