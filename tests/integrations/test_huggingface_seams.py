"""What is registered where; what is said of a transformers, or of experts, that do not fit."""

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import halley.integrations.transformers as halley_hf
from halley.integrations.transformers import seams
from halley.integrations.transformers import weight_layout as layout
from tests.integrations.hf_case import (
    Mesh,
    compare_step,
    load_spread,
    make_model,
    make_tokens,
    run_step,
    unregistered,
    write_case,
)
from tests.rank_pool import RunRanks


MESH = Mesh(ep_size=2, fsdp_size=2)
SEAM = seams.find_seams().name
only_named = pytest.mark.skipif(
    SEAM != "ep_implementation", reason="this transformers has no names for implementations"
)


def test_missing_transformers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"^package transformers must be installed: pip install"):
        halley_hf.register()


def test_too_old_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__dict__["__version__"] = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ValueError, match=r"^transformers \(4.57.1\) must be 5.0 or newer"):
        halley_hf.register()


def test_newer_than_tested_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an import finds: transformers may put another object in its place, lazily.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0.dev0")
    with pytest.warns(UserWarning, match=r"^transformers \(5.99.0.dev0\) is newer than 5.23"):
        assert seams.find_seams().name == SEAM


@only_named
def test_changed_seam_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, experts: object, mesh: object) -> None: ...

    found = seams.find_seams()
    monkeypatch.setattr(found.parallel.EPImplementation, "__init__", changed)
    with pytest.raises(ValueError, match=r"must be 5.23 or older: .* takes self, experts, mesh"):
        halley_hf.register()


def test_unknown_strategy_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^strategy \(fastest\) must be one of sequential, "):
        halley_hf.register("fastest")


def test_register_says_what_it_did_and_unregister_undoes_it() -> None:
    found = seams.find_seams()
    assert "halley" not in found.experts.ExpertsInterface()
    for _ in range(2):
        said = halley_hf.register("chunked")
    assert said.startswith(f"transformers {transformers.__version__}: experts run by Halley")
    assert "strategy chunked" in said
    assert "halley" in found.experts.ExpertsInterface()
    halley_hf.unregister()
    assert "halley" not in found.experts.ExpertsInterface()


@only_named
def test_default_takes_the_place_of_auto() -> None:
    found = seams.find_seams()
    interface = found.parallel.EPImplementationInterface
    halley_hf.register(default=True)
    assert interface()["auto"] is interface()["halley"]
    halley_hf.unregister()
    assert interface()["auto"] is found.parallel.AutoEP
    assert "halley" not in interface()


def _load_default(rank: int, num_ranks: int, folder: Path, wanted: Any) -> list[str]:
    with unregistered():
        model = load_spread(folder, MESH, strategy="auto", default=True)
        compare_step(model, wanted, MESH, tolerance=1e-5)
        return list(halley_hf.describe(model).values())


def test_default_runs_models_that_name_nothing(tmp_path: Path, run_ranks: RunRanks) -> None:
    """By strategy auto, which has measured and says so."""
    wanted = write_case("mixtral", tmp_path, num_hidden_layers=1)
    for (path,) in run_ranks(_load_default, 2, tmp_path, wanted):
        assert path.startswith("halley: auto; hidden_size 32, 8 experts, top_k 2, with backward: ")
        assert " is fastest of " in path


def test_compiled_model_of_one_rank_is_one_graph() -> None:
    halley_hf.register("sequential", strict=True)
    model, own = make_model("qwen2_moe", experts_implementation="halley"), make_model("qwen2_moe")
    tokens = make_tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch cannot trace in transformers
        model.compile(backend="aot_eager", fullgraph=True)
        assert abs(run_step(model, tokens) - run_step(own, tokens)) < 1e-5
    torch.compiler.reset()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    halley_hf.unregister()


def test_experts_implementation_runs_on_one_rank() -> None:
    halley_hf.register("sequential")
    model, own = make_model("mixtral", experts_implementation="halley"), make_model("mixtral")
    assert model.config._experts_implementation == "halley"
    tokens = make_tokens()
    assert abs(run_step(model, tokens) - run_step(own, tokens)) < 1e-5
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    halley_hf.unregister()


def test_experts_of_other_ranks_add_nothing() -> None:
    """An id past a module's own experts is of another rank, as in AllReduceEP."""
    experts = make_model("mixtral").model.layers[0].mlp.experts
    halley_hf.register("sequential")
    run = seams.find_seams().experts_function("halley")
    x_TD = torch.randn(3, 32)
    idx_TK = torch.tensor([[0, 8], [8, 8], [3, 1]])
    weights_TK = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.25, 0.75]])
    y_TD = run(experts, x_TD, idx_TK, weights_TK)
    halley_hf.unregister()

    def expert(index: int, x_D: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x_D, experts.gate_up_proj[index]).chunk(2)
        return F.linear(F.silu(gate) * up, experts.down_proj[index])

    wanted = [
        0.5 * expert(0, x_TD[0]),
        torch.zeros(32),
        0.25 * expert(3, x_TD[2]) + 0.75 * expert(1, x_TD[2]),
    ]
    torch.testing.assert_close(y_TD, torch.stack(wanted))


@pytest.mark.parametrize(
    ("family", "changes", "wanted"),
    [
        ("mixtral", {}, ""),
        ("phimoe", {}, ""),
        ("gpt_oss", {}, "the experts' gate is of their own kind"),
        ("mixtral", {"hidden_act": "gelu"}, "the experts' activation is GELUActivation"),
    ],
)
def test_what_strategies_cannot_compute(family: str, changes: dict[str, Any], wanted: str) -> None:
    model = make_model(family, **changes)
    (experts, *_) = [module for module in model.modules() if layout.is_experts(module)]
    assert layout.find_custom(experts) == wanted


def test_transposed_weights_are_taken_as_views() -> None:
    experts = make_model("mixtral").model.layers[0].mlp.experts
    wanted = layout.local_experts(experts, lambda rows, ids: rows).stacked
    assert wanted is not None
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.transpose(1, 2).contiguous())
    experts.down_proj = nn.Parameter(experts.down_proj.transpose(1, 2).contiguous())
    experts.is_transposed = True
    found = layout.local_experts(experts, lambda rows, ids: rows).stacked
    assert found is not None
    assert torch.equal(found.up_LGD, wanted.up_LGD)
    assert torch.equal(found.down_LDF, wanted.down_LDF)
    assert found.up_LGD.data_ptr() == experts.gate_up_proj.data_ptr()


def _load_chunked(rank: int, num_ranks: int, folder: Path, strict: bool) -> str:
    with unregistered():
        try:
            load_spread(folder, MESH, strategy="chunked", strict=strict)
        except (ValueError, UserWarning) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("strict", [False, True])
def test_strategy_that_cannot_is_refused_at_load(
    strict: bool, tmp_path: Path, run_ranks: RunRanks
) -> None:
    write_case("gpt_oss", tmp_path, num_hidden_layers=1)
    wanted = (
        "strategy (chunked) cannot run experts of this kind: the experts' gate is of their own kind"
    )
    first, second = run_ranks(_load_chunked, 2, tmp_path, strict)
    if strict:
        assert first == second == f"ValueError: {wanted}"
    else:
        instead = "their own arithmetic runs, between dispatch and combine"
        assert (first, second) == (f"UserWarning: {wanted}; {instead}", "")


def _leave(rank: int, num_ranks: int, folder: Path, wanted: Any, strict: bool) -> list[str]:
    """Load a model whose experts lack what Halley reads; return what is said."""
    kind = transformers.models.mixtral.modeling_mixtral.MixtralExperts
    original = kind.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.is_transposed

    kind.__init__ = unmarked
    try:
        with unregistered(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = load_spread(folder, MESH, strategy="sequential", strict=strict)
            for module in model.modules():
                if hasattr(module, "is_concatenated"):
                    module.is_transposed = False  # transformers' own forward wants it
            if SEAM == "ep_implementation":  # before, transformers divides gradients twice
                compare_step(model, wanted, MESH, tolerance=1e-5)
        found = [str(warning.message) for warning in said if "Mixtral" in str(warning.message)]
        return [*halley_hf.describe(model).values(), *found[:1]]
    except ValueError as error:
        return [str(error)]
    finally:
        kind.__init__ = original


@pytest.mark.skipif(SEAM == "experts_function", reason="nothing else spreads experts there")
@pytest.mark.parametrize("strict", [False, True])
def test_unknown_experts_are_left_to_transformers(
    strict: bool, tmp_path: Path, run_ranks: RunRanks
) -> None:
    wanted = write_case("mixtral", tmp_path, num_hidden_layers=1)
    problem = "experts module MixtralExperts must be one that transformers' experts interface runs"
    first, second = run_ranks(_leave, 2, tmp_path, wanted, strict)
    if strict:
        assert first == second == [problem]
    else:
        assert second == [f"transformers: {problem}"]
        assert first == [f"transformers: {problem}", f"{problem}; transformers runs it"]


def _divide_badly(rank: int, num_ranks: int) -> list[str]:
    said: list[str] = []
    everyone: Any = torch.distributed.group.WORLD
    for family, changes in (
        ("mixtral", {"num_local_experts": 3, "intermediate_size": 16}),
        ("llama", {}),
    ):
        try:
            sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64}
            kind: Any = transformers.CONFIG_MAPPING[family]
            model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **changes))
            halley_hf.shard_experts(model, everyone)
        except ValueError as error:
            said.append(str(error))
    try:
        alone: Any = torch.distributed.new_group([0])
        if rank == 0:
            halley_hf.shard_experts(make_model("mixtral"), alone)
    except ValueError as error:
        said.append(str(error))
    return said


def test_experts_that_do_not_divide_are_one_sentence(run_ranks: RunRanks) -> None:
    said = run_ranks(_divide_badly, 2)[0]
    assert said == [
        "num_experts (3) must be divisible by ep_size (2)",
        "model (LlamaForCausalLM) must have experts to spread",
        "ep_group (1 ranks) must be all 2 ranks: copies of experts need transformers 5.19 or newer",
    ]


def _load_unevenly(rank: int, num_ranks: int, folder: Path) -> str:
    with unregistered(), pytest.raises(ValueError, match="3") as caught:
        load_spread(folder, MESH, strategy="sequential")
    return str(caught.value)


def test_mesh_that_does_not_divide_is_one_sentence(tmp_path: Path, run_ranks: RunRanks) -> None:
    """By transformers itself, where it divides the experts."""
    write_case("mixtral", tmp_path, num_local_experts=3, num_hidden_layers=1)
    for said in run_ranks(_load_unevenly, 2, tmp_path):
        assert "3 experts" in said or "num_experts (3)" in said
        assert "\n" not in said
