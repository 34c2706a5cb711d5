"""torchtitan models train as without Halley; experts that do not fit are reported."""

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.torchtitan_case import (
    FLAG,
    Case,
    build_model,
    config,
    halley_torchtitan,
    make_config,
    on_cpu,
    override,
    train,
)
from tests.rank_pool import RunRanks


NUM_STEPS, TOLERANCE = 4, 1e-5
CASES = {
    "ep2": Case(),
    "spmd_types": Case(backend="spmd_types"),
    "tp2_ep2": Case(tp_size=2),
    "tp2": Case(tp_size=2, ep_size=1),
    "own_experts": Case(changed=True),
}


EXAMPLE = Path(__file__).parents[2] / "examples" / "04_torchtitan.py"


def _flag(**options: Any) -> tuple[str, ...]:
    return (f"{FLAG}={json.dumps(options)}",)


def _losses(
    rank: int, num_ranks: int, case: Case, flag: tuple[str, ...]
) -> tuple[list[float], list[float], dict[str, str]]:
    expected, ran = train(rank, num_ranks, case, NUM_STEPS)
    assert ran == {}
    return expected, *train(rank, num_ranks, replace(case, flag=flag), NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "sequential") for name in CASES),
        ("ep2", "chunked"),
        ("spmd_types", "chunked"),
        ("ep2", "fused"),
    ],
)
def test_losses_equal_torchtitans(
    name: str,
    strategy: str,
    run_ranks: RunRanks,
    record_property: Callable[[str, str], None],
) -> None:
    flag = _flag(strategy=strategy, strict=True)
    for expected, losses, ran in run_ranks(_losses, 2, CASES[name], flag):
        assert expected[-1] < expected[0]
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        path = f"halley: {strategy}"
        if CASES[name].changed:
            path += ", with the framework's own expert code: "
            path += "experts module OtherExperts is no plain GroupedExperts"
        assert ran == {f"layers.{i}.moe.routed_experts": path for i in range(2)}
    record_property("ran", strategy)


def test_losses_in_bfloat16(run_ranks: RunRanks) -> None:
    """Rounded at other places, and then trained apart: the first loss, before any step."""
    for expected, losses, ran in run_ranks(_losses, 2, Case(dtype="bfloat16"), (FLAG,)):
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
    problem = (
        r"^token dispatcher \(HybridEPTokenDispatcher.Config\) must be that of "
        'moe_comm_backend="standard"'
    )
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
    assert isinstance(
        model_config.layers[0].moe.routed_experts, halley_torchtitan.HalleyRoutedExperts.Config
    )


def _run_example(rank: int, num_ranks: int) -> list[str]:
    example = runpy.run_path(str(EXAMPLE))
    with on_cpu(Case(dtype="bfloat16")):
        return example["train"]([example["FLAG"]], num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert "RoutedExperts.Config -> HalleyRoutedExperts.Config" in lines[0]
        assert lines[-2:] == ["routed_experts: halley: sequential", "8 experts on 2 ranks"]
