"""torchtitan models train as without Halley; experts that do not fit are reported."""

import json
import runpy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from tests.integrations.framework_case import TOLERANCE, check_losses, train_both
from tests.integrations.torchtitan_case import (
    DIM,
    FLAG,
    SEQ_LEN,
    VOCABULARY,
    Case,
    build_model,
    config,
    halley_torchtitan,
    load,
    make_config,
    on_cpu,
    override,
    run_microbatch,
    train,
    trainer,
)
from tests.rank_pool import RunRanks


FOUR_RANKS = Case(num_ranks=4, num_steps=10, num_microbatches=2)
CASES = {
    "ep2": Case(),
    "spmd_types": Case(backend="spmd_types"),
    "tp2_ep2": Case(tp_size=2),
    "tp2": Case(tp_size=2, ep_size=1),
    "own_experts": Case(changed=True),
    "compiled": Case(compiled=True),
    "compiled_spmd_types": Case(compiled=True, backend="spmd_types"),
    "fsdp2 x ep2, two microbatches": FOUR_RANKS,
    "fsdp2 x ep2, two microbatches, compiled": replace(FOUR_RANKS, compiled=True),
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "04_torchtitan.py"


def _flag(**options: Any) -> tuple[str, ...]:
    return (f"{FLAG}={json.dumps(options)}",)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(
            (n, "sequential")
            for n, case in CASES.items()
            if case.num_ranks == 2 and not case.compiled
        ),
        ("fsdp2 x ep2, two microbatches", "fused"),
        ("fsdp2 x ep2, two microbatches, compiled", "fused"),
        ("ep2", "chunked"),
        ("spmd_types", "chunked"),
        ("ep2", "fused"),
        ("compiled", "fused"),
        ("compiled_spmd_types", "unfused:inputs"),
    ],
)
def test_losses_equal_torchtitans(name, strategy, run_ranks, record_property) -> None:
    case = CASES[name]
    enabled = replace(case, flag=_flag(strategy=strategy, strict=True))
    own = replace(case, compiled=False)
    arguments = (train_both, case.num_ranks, train, own, enabled, case.num_steps)
    found = run_ranks(*arguments, timeout_s=240.0)
    reason = "experts module OtherExperts is no plain GroupedExperts" if case.changed else ""
    check_losses(found, "layers.{}.moe.routed_experts", f"halley: {strategy}", reason=reason)
    record_property("ran", strategy)


class _Trainer:
    """The part of torchtitan's trainer that runs forward and backward, for a model on CPU ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # torchtitan captures CUDA graphs with this dispatcher, and not with the standard one.
        captured = {"comm_backend": "hybridep", "non_blocking_capacity_factor": 1.0}
        comm = captured if case.flag else {}
        model, self.context = build_model(case, make_config(num_experts=4, **comm))
        self.model_parts, self.gradient_accumulation_steps = [model], 2
        # A token has the logits a, a, -a and -a: it chooses both experts of rank 0, or of rank 1.
        row = torch.randn(1, DIM, generator=torch.Generator().manual_seed(0))
        logits = torch.cat([row, row, -row, -row])
        for layer in model.layers.values():
            weight = layer.moe.router.gate.weight
            with torch.no_grad():
                weight.copy_(distribute_tensor(logits, weight.device_mesh, weight.placements))

    def run(self, inputs: Any, labels: Any) -> float:
        return run_microbatch(self.model_parts[0], self.context, inputs, labels, self.case)


def _train_bounded(rank: int, num_ranks: int, case: Case) -> tuple[list[float], int]:
    """Train on random tokens and on equal ones, which all choose the same experts."""
    with on_cpu(case), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = _Trainer(case)
        step = trainer.run
        if case.flag:
            # The module of the trainer has Halley's function, whose steps may be repeated.
            step = load("trainer").wrap_with_cuda_graph(trainer.run)
        (model,) = trainer.model_parts
        generator = torch.Generator().manual_seed(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []
        for microbatch in range(8):
            tokens = torch.randint(0, VOCABULARY, (2, SEQ_LEN + 1), generator=generator)
            if microbatch % 4 == 3:
                tokens[:] = microbatch
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            losses.append(step(inputs, labels))
            if microbatch % trainer.gradient_accumulation_steps == 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        said = [str(warning.message) for warning in caught]
        assert len([text for text in said if "more than max_load allows" in text]) == (
            1 if case.flag and rank == 0 else 0
        )
        return losses, getattr(step, "num_repeated", 0)


def _train_bounded_and_own(rank: int, num_ranks: int) -> tuple[list[float], list[float], int]:
    own, _ = _train_bounded(rank, num_ranks, Case())
    flag = _flag(strategy="fused", strict=True, max_load=1.0)
    return own, *_train_bounded(rank, num_ranks, Case(flag=flag))


def test_steps_beyond_max_load_are_repeated(run_ranks: RunRanks) -> None:
    """A rank's buffers hold 96 rows, and equal tokens send 128 rows to one rank."""
    for expected, losses, num_repeated in run_ranks(_train_bounded_and_own, 2, timeout_s=120.0):
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        assert 2 <= num_repeated < 8


def test_trainer_with_max_load_accepts_cuda_graphs() -> None:
    words = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel_minimal_async_ep"]
    flag = _flag(strategy="fused", strict=True, max_load=1.5)
    parsed = config.ConfigManager().parse_args([*words, "--override.imports", *flag])
    assert not parsed.training.disable_cuda_graphs
    parsed = replace(parsed, parallelism=replace(parsed.parallelism, expert_parallel_degree=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "wrap_with_cuda_graph", None)  # restored at the end
        override.apply_overrides(parsed.override, parsed)
        assert trainer.wrap_with_cuda_graph is halley_torchtitan.wrap_with_cuda_graph
    parsed._validate_cuda_graphs()
    layers = parsed.model_spec.model.layers
    routed = [layer.moe.routed_experts for layer in layers if layer.moe is not None]
    assert {each.max_load for each in routed} == {1.5}
    assert {type(each.token_dispatcher) for each in routed} == {halley_torchtitan.MeshHolder.Config}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"max_load": 1.5}, r"^max_load \(1.5\) must be 0 with strategy auto, which reads sizes"),
        ({"strategy": "fused", "max_load": 0.5}, r"^max_load \(0.5\) must be 0 or at least 1$"),
    ],
)
def test_max_load_is_checked(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        _apply(make_config(), **options)


def test_losses_in_bfloat16(run_ranks: RunRanks) -> None:
    """Rounded at other places, and then trained apart: the first loss, before any step."""
    case = Case(dtype="bfloat16")
    enabled = replace(case, flag=(FLAG,))
    found = run_ranks(train_both, 2, train, case, enabled, case.num_steps)
    for expected, losses, ran in found:
        assert losses[0] == pytest.approx(expected[0], rel=2**-8)
        assert losses[-1] < losses[0]
        assert all(path.startswith("halley: auto; hidden_size 32, ") for path in ran.values())


def _names(rank: int, num_ranks: int) -> list[list[tuple[str, Any]]]:
    found: list[list[tuple[str, Any]]] = []
    for case in (Case(), Case(flag=(FLAG,))):
        with on_cpu(case):
            model, _ = build_model(case, make_config())
        found.append([(name, tensor.shape) for name, tensor in model.state_dict().items()])
    return found


def test_parameters_keep_names_and_shapes(run_ranks: RunRanks) -> None:
    for expected, found in run_ranks(_names, 2):
        assert found == expected


def test_command_line_accepts_the_override() -> None:
    words = ["--module", "qwen3", "--config", "qwen3_moe_debug"]
    parsed = config.ConfigManager().parse_args([*words, "--override.imports", *_flag(strict=True)])
    said = override.apply_overrides(parsed.override, parsed)
    assert len(said) == 8
    assert "RoutedExperts.Config -> HalleyRoutedExperts.Config with strict=True" in said[0]


def _apply(model_config: Any, **options: Any) -> list[str]:
    words = override.parse_cli_imports(list(_flag(**options)))
    return override.apply_overrides(override.OverrideConfig(imports=words), model_config)


@pytest.mark.parametrize("strict", [False, True])
def test_padding_dispatchers_are_left_to_torchtitan(strict: bool) -> None:
    model_config = make_config(comm_backend="hybridep")
    problem = r"^token dispatcher \(HybridEPTokenDispatcher.Config\) must be that of "
    problem += 'moe_comm_backend="standard"'
    # The cached runner of a strategy warns once only, so each case needs a strategy of its own.
    strategy = f"fused:{'inputs' if strict else 'recompute'}"
    if strict:
        with pytest.raises(ValueError, match=problem):
            _apply(model_config, strategy=strategy, strict=True)
        return
    with pytest.warns(UserWarning, match=f"{problem}; torchtitan runs them") as caught:
        _apply(model_config, strategy=strategy)
    assert len(caught) == 1
    routed = model_config.layers[0].moe.routed_experts
    assert type(routed).__qualname__ == "RoutedExperts.Config"


@pytest.mark.parametrize("strict", [False, True])
def test_unsupported_experts_are_reported(strict: bool) -> None:
    model_config = make_config(changed=True)
    _apply(model_config, strategy="chunked", strict=strict)
    problem = r"^strategy \(chunked\) cannot run experts of this kind: experts module OtherExperts"
    raises, warns = pytest.raises(ValueError, match=problem), pytest.warns(match=problem)
    with raises if strict else warns:
        model_config.build()


def _divide(rank: int, num_ranks: int) -> str:
    case = Case(flag=(FLAG,))
    with on_cpu(case), pytest.raises(ValueError, match="num_experts") as caught:
        build_model(case, make_config(num_experts=7))
    return str(caught.value)


def test_uneven_experts_are_an_error(run_ranks: RunRanks) -> None:
    said = run_ranks(_divide, 2)
    assert said == ["num_experts (7) must be divisible by ep_size (2)"] * 2


def test_deprecated_override_warns_and_works() -> None:
    words = override.parse_cli_imports(['halley.integrations.torchtitan.halley={"strict": true}'])
    model_config = make_config()
    with pytest.warns(FutureWarning, match=r"^halley.*halley is deprecated: use .*enable$"):
        override.apply_overrides(override.OverrideConfig(imports=words), model_config)
    routed = model_config.layers[0].moe.routed_experts
    assert isinstance(routed, halley_torchtitan.HalleyRoutedExperts.Config)


def _run_example(rank: int, num_ranks: int) -> list[str]:
    example = runpy.run_path(str(EXAMPLE))
    with on_cpu(Case(dtype="bfloat16")):
        return example["train"]([example["FLAG"]], num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert "RoutedExperts.Config -> HalleyRoutedExperts.Config" in lines[0]
        assert lines[-2:] == ["routed_experts: halley: sequential", "8 experts on 2 ranks"]
