"""DeepSpeed AutoEP models train as without Halley; layers that do not fit are reported."""

import runpy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed_case import (
    MODELS,
    Case,
    build_engine,
    halley_deepspeed,
    launched,
    train,
)
from tests.rank_pool import RunRanks


NUM_STEPS, TOLERANCE = 10, 1e-5
CASES = {
    "mixtral, ZeRO 1": Case(),
    "mixtral, ZeRO 2": Case(stage=2),
    "mixtral, one rank": Case(ep_size=1),
    "qwen3_moe, ZeRO 2": Case(model="qwen3_moe", stage=2),
    "own activation": Case(activation="swiglu_oai"),
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "06_deepspeed.py"


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
        ("mixtral, ZeRO 2", "chunked"),
        ("mixtral, ZeRO 2", "fused"),
    ],
)
def test_losses_equal_deepspeeds(
    name: str,
    strategy: str,
    run_ranks: RunRanks,
    record_property: Callable[[str, str], None],
) -> None:
    for expected, losses, ran in run_ranks(_losses, 2, CASES[name], strategy):
        assert expected[-1] < expected[0]
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        path = f"halley: {strategy}"
        if CASES[name].activation:
            path += ", with the framework's own expert code: the experts' activation is swiglu_oai"
        assert ran == {f"model.layers.{i}.mlp": path for i in range(2)}
    record_property("ran", strategy)


def _exchange(rank: int, num_ranks: int, folder: Path) -> None:
    """Save an engine with DeepSpeed's layers, load it into one with Halley's."""
    with launched(rank, num_ranks):
        written, read = (build_engine(Case(strategy=kind)) for kind in ("", "sequential"))
        with torch.no_grad():
            for parameter in read.module.parameters():
                parameter.zero_()
        written.save_checkpoint(str(folder))
        read.load_checkpoint(str(folder))
    expected, found = written.module.state_dict(), read.module.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_checkpoints_are_interchangeable(tmp_path: Path, run_ranks: RunRanks) -> None:
    run_ranks(_exchange, 2, tmp_path)


def _run_unsupported(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Train with a setting that Halley cannot run; return the messages."""
    with launched(rank, num_ranks), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = build_engine(case)
            tokens = torch.randint(0, 64, (2, 12))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        except ValueError as error:
            return [str(error)]
        paths = halley_deepspeed.describe(engine.module).values()
    return [*paths, *(str(w.message) for w in caught if "must be" in str(w.message))]


@pytest.mark.parametrize(
    ("case", "problem", "strict"),
    [
        (Case(settings={"score_apply": "pre"}), "score_apply (pre) must be post", True),
        (Case(stage=3), "ZeRO stage (3) must be 1 or 2", False),
    ],
)
def test_unsupported_settings_are_left_to_deepspeed(
    case: Case, problem: str, strict: bool, run_ranks: RunRanks
) -> None:
    case = replace(case, strategy="sequential", strict=strict)
    first, second = run_ranks(_run_unsupported, 2, case)
    if strict:
        assert first == second == [problem]
    else:
        assert second == [f"deepspeed: {problem}"] * 2
        assert first == [*second, f"{problem}; DeepSpeed runs the layer"]


def _divide(rank: int, num_ranks: int) -> str:
    with launched(rank, num_ranks), pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "mixtral", {**MODELS["mixtral"], "num_local_experts": 7})
        with pytest.raises(ValueError, match="7") as caught:
            build_engine(Case(strategy="sequential"))
    return str(caught.value)


def test_uneven_experts_are_an_error(run_ranks: RunRanks) -> None:
    for said in run_ranks(_divide, 2):
        assert "divi" in said
        assert "\n" not in said


def test_enable_reports_and_disable_restores() -> None:
    layers: Any = halley_deepspeed._deepspeed.auto_ep_layer
    own = layers.AutoEPMoELayer
    for strategy in ("sequential", "chunked"):
        said = halley_deepspeed.enable(strategy)
        assert said.endswith(f"experts of AutoEP's layers run by Halley (strategy {strategy})")
        assert issubclass(layers.AutoEPMoELayer, halley_deepspeed.HalleyMoELayer)
    halley_deepspeed.disable()
    assert layers.AutoEPMoELayer is own


def _run_example(rank: int, num_ranks: int) -> list[str]:
    with launched(rank, num_ranks):
        return runpy.run_path(str(EXAMPLE))["train"](num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert lines[-2:] == ["model.layers.1.mlp: halley: sequential", "8 experts on 2 ranks"]
