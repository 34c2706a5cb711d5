"""DeepSpeed AutoEP models train as without Halley; layers that do not fit are reported."""

import importlib
import os
import runpy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.framework_case import check_losses, messages, train_both
from tests.rank_pool import RunRanks


_REASON = "deepspeed is not installed: make compat runs these tests with it"

# DeepSpeed looks for a GPU when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings(action="ignore"):
    deepspeed: Any = pytest.importorskip("deepspeed", reason=_REASON)
    transformers: Any = pytest.importorskip("transformers", reason=_REASON)
    halley_deepspeed: Any = importlib.import_module("halley.integrations.deepspeed")

VOCABULARY, SEQ_LEN, BATCH = 64, 12, 2
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained."""

    strategy: str = ""  # of Halley; "" for DeepSpeed's own layer
    model: str = "mixtral"  # a key of ``MODELS``, which is also AutoEP's name for it
    stage: int = 1  # of ZeRO
    ep_size: int = 2  # expert-parallel degree
    settings: dict[str, Any] = field(default_factory=dict)  # of DeepSpeed's "expert_parallel"
    activation: str = ""  # DeepSpeed's name of the experts' activation; "" for the model's
    strict: bool = True  # as for ``enable``
    num_ranks: int = 2
    num_microbatches: int = 1  # of a step of the optimizer


@contextmanager
def launched(rank: int, num_ranks: int) -> Iterator[None]:
    """Set the environment variables of a launcher, and ignore DeepSpeed's warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed uses names that torch 2.13 deprecates
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", num_ranks)):
            patch.setenv(name, str(value))
        # DeepSpeed would compile a collective for ranks of one host. That takes minutes, and a
        # killed rank leaves a lock behind.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        yield


def build_engine(case: Case) -> Any:
    """Return DeepSpeed's engine around a model with random weights, the same in every call."""
    if case.strategy:
        halley_deepspeed.enable(case.strategy, strict=case.strict)
    try:
        kind = transformers.CONFIG_MAPPING[case.model]
        config = kind(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            **MODELS[case.model],
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_accumulation_steps": case.num_microbatches,
                "zero_optimization": {"stage": case.stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "expert_parallel": {
                    "enabled": True,
                    "autoep_size": case.ep_size,
                    "preset_model": case.model,
                    **case.settings,
                },
            },
        )
        for module in engine.module.modules():
            if case.activation and hasattr(module, "activation_limit"):
                module.activation = case.activation
        return engine
    finally:
        halley_deepspeed.disable()


def train(rank: int, num_ranks: int, case: Case, num_steps: int) -> tuple[list[float], Any]:
    """Train on random tokens; return the loss of each microbatch, and the descriptions."""
    with launched(rank, num_ranks):
        engine = build_engine(case)
        generator = torch.Generator().manual_seed(rank)
        losses: list[float] = []
        for _ in range(num_steps * case.num_microbatches):
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ_LEN), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / num_ranks)
        return losses, halley_deepspeed.describe(engine.module)


NUM_STEPS = 10
CASES = {
    "mixtral, ZeRO 1": Case(),
    "mixtral, ZeRO 2": Case(stage=2),
    "mixtral, one rank": Case(ep_size=1),
    "qwen3_moe, ZeRO 2": Case(model="qwen3_moe", stage=2),
    "own activation": Case(activation="swiglu_oai"),
    "dp2 x ep2, two microbatches, ZeRO 2": Case(stage=2, num_ranks=4, num_microbatches=2),
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "06_deepspeed.py"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "sequential") for name, case in CASES.items() if case.num_ranks == 2),
        ("mixtral, ZeRO 2", "chunked"),
        ("mixtral, ZeRO 2", "fused"),
        ("dp2 x ep2, two microbatches, ZeRO 2", "fused"),
    ],
)
def test_losses_equal_deepspeeds(name, strategy, run_ranks, record_property) -> None:
    case = CASES[name]
    enabled = replace(case, strategy=strategy)
    arguments = (train_both, case.num_ranks, train, case, enabled, NUM_STEPS)
    found = run_ranks(*arguments, timeout_s=240.0)
    reason = "the experts' activation is swiglu_oai" if case.activation else ""
    check_losses(found, "model.layers.{}.mlp", f"halley: {strategy}", reason=reason)
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


def _save_after_enable(rank: int, num_ranks: int, folder: Path) -> None:
    """Save an engine with DeepSpeed's layers and one with Halley's after another ``enable``."""
    with launched(rank, num_ranks):
        engines = {kind or "own": build_engine(Case(strategy=kind)) for kind in ("", "sequential")}
        halley_deepspeed.enable("chunked", strict=True)
        try:
            for name, engine in engines.items():
                engine.save_checkpoint(str(folder / name), tag="saved")
        finally:
            halley_deepspeed.disable()


def test_existing_engines_save_their_experts_after_another_enable(tmp_path, run_ranks) -> None:
    """DeepSpeed writes a file for each expert of the layers that it finds by ``isinstance``."""
    run_ranks(_save_after_enable, 2, tmp_path)
    for name in ("own", "sequential"):
        files = sorted(path.name for path in (tmp_path / name / "saved").glob("layer_*_expert_*"))
        assert len(files) == 2 * 8, files  # 2 layers of 8 experts


def _run_unsupported(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Train with a setting that Halley cannot run; return the messages."""
    with launched(rank, num_ranks), messages() as found:
        engine = build_engine(case)
        tokens = torch.randint(0, 64, (2, 12))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        found += halley_deepspeed.describe(engine.module).values()
    return found


@pytest.mark.parametrize(
    ("case", "problem", "strict"),
    [
        (Case(settings={"score_apply": "pre"}), "score_apply (pre) must be post", True),
        (Case(stage=3), "ZeRO stage (3) must be 1 or 2", False),
    ],
)
def test_unsupported_settings_are_left_to_deepspeed(case, problem, strict, run_ranks) -> None:
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
    own, made = layers.AutoEPMoELayer, list[type]()
    for strategy in ("sequential", "chunked", "sequential"):
        said = halley_deepspeed.enable(strategy)
        assert said.endswith(f"experts of AutoEP's layers run by Halley (strategy {strategy})")
        assert issubclass(layers.AutoEPMoELayer, halley_deepspeed.HalleyMoELayer)
        made.append(layers.AutoEPMoELayer)
    halley_deepspeed.disable()
    assert layers.AutoEPMoELayer is own
    assert made[0] is made[2]
    assert made[0] is not made[1]


def _run_example(rank: int, num_ranks: int) -> list[str]:
    with launched(rank, num_ranks):
        return runpy.run_path(str(EXAMPLE))["train"](num_ranks)


def test_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_run_example, 2):
        assert lines[-2:] == ["model.layers.1.mlp: halley: sequential", "8 experts on 2 ranks"]
