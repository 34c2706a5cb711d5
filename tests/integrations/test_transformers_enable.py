"""``enable`` and ``disable`` of the Transformers plug-in, and the experts that it cannot run."""

import importlib
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import halley.integrations.transformers as halley_transformers
from halley.core.reference import moe_reference
from halley.core.types import DROPPED, Experts, Routing
from halley.integrations import transformers_experts
from halley.integrations.transformers import find_extension_point
from tests.integrations.framework_case import messages
from tests.integrations.transformers_case import (
    Mesh,
    compare_step,
    disabled_afterwards,
    load_sharded,
    make_model,
    make_tokens,
    run_step,
    save_model,
)
from tests.rank_pool import RunRanks


MESH = Mesh(ep_size=2, fsdp_size=2)
KIND = find_extension_point().kind
GATE = "the experts have a gate function of their own"
DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
needs_names = pytest.mark.skipif(
    KIND != "ep_implementation", reason="this transformers has no names for implementations"
)


def test_missing_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"^package transformers must be installed: pip install '\.\[hf\]' in a checkout"
    with pytest.raises(ValueError, match=message):
        halley_transformers.enable()


def test_old_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__dict__["__version__"] = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ValueError, match=r"^transformers \(4.57.1\) must be 5.0 or newer"):
        halley_transformers.enable()


def test_untested_newer_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # In sys.modules, since transformers may have replaced itself there by a lazy module.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0.dev0")
    with pytest.warns(UserWarning, match=r"^transformers \(5.99.0.dev0\) is newer than 5.24"):
        assert find_extension_point().kind == KIND


@needs_names
def test_changed_interface_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, experts: object, mesh: object) -> None: ...

    point = find_extension_point()
    monkeypatch.setattr(point.parallel.EPImplementation, "__init__", changed)
    with pytest.raises(ValueError, match=r"must be 5.24 or older: .* takes self, experts, mesh"):
        halley_transformers.enable()


def test_strategy_in_place_of_the_model_is_an_error() -> None:
    model: Any = "chunked"
    with pytest.raises(ValueError, match=r"^model \('chunked'\) must be a loaded model"):
        halley_transformers.enable(model)


def test_enable_reports_and_disable_restores() -> None:
    interface = find_extension_point().experts.ExpertsInterface
    assert "halley" not in interface()
    for _ in range(2):
        said = halley_transformers.enable(strategy="chunked")
    start = f"transformers {transformers.__version__}: experts run by Halley (strategy chunked) in "
    assert said.startswith(start)
    assert "halley" in interface()
    halley_transformers.disable()
    assert "halley" not in interface()


@needs_names
def test_default_replaces_the_implementation_auto() -> None:
    point = find_extension_point()
    implementations = point.parallel.EPImplementationInterface()
    for default in (True, False):  # the second call takes back what the first replaced
        halley_transformers.enable(default=default)
        assert "halley" in implementations
        own = implementations["halley"] if default else point.parallel.AutoEP
        assert implementations["auto"] is own
    halley_transformers.disable()
    assert implementations["auto"] is point.parallel.AutoEP
    assert "halley" not in implementations


def test_deprecated_names_warn_and_work() -> None:
    with pytest.warns(FutureWarning, match=r"^register is deprecated: use .*transformers.enable$"):
        said = halley_transformers.register("chunked", strict=True)
    assert "(strategy chunked)" in said
    with pytest.warns(FutureWarning, match=r"^unregister is deprecated: use .*disable$"):
        halley_transformers.unregister()
    assert "halley" not in find_extension_point().experts.ExpertsInterface()
    model = make_model("mixtral", num_hidden_layers=1)
    with pytest.warns(FutureWarning, match=r"^shard_experts is deprecated: use .*enable\(model"):
        halley_transformers.shard_experts(model, None, strategy="sequential")
    run_step(model, make_tokens())
    assert list(halley_transformers.describe(model).values()) == ["halley: sequential"]
    with pytest.warns(FutureWarning, match="^overlap_shared_experts is deprecated"):
        assert halley_transformers.overlap_shared_experts(model) == []


def test_deprecated_package_name_warns_and_forwards() -> None:
    sys.modules.pop("halley.integrations.huggingface", None)
    with pytest.warns(FutureWarning, match=r"use halley.integrations.transformers$"):
        old = importlib.import_module("halley.integrations.huggingface")
    for name in halley_transformers.__all__:
        assert getattr(old, name) is getattr(halley_transformers, name)


def _run_document(rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    """Run the first example of docs/transformers.md with a small model and two ranks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    assert len(example.splitlines()) <= 12
    example = example.replace("Qwen/Qwen3-30B-A3B", str(folder)).replace("size=8", "size=2")
    # "auto" would measure; the values of strategies have tests of their own.
    example = example.replace("enable()", 'enable(strategy="sequential")')
    found: dict[str, Any] = {}
    with disabled_afterwards():
        exec(example, found)
        run_step(found["model"], make_tokens()[2 * rank : 2 * rank + 2])
        return halley_transformers.describe(found["model"])


@needs_names
def test_example_of_the_document_runs(tmp_path: Path, run_ranks: RunRanks) -> None:
    save_model("qwen3_moe", tmp_path)
    paths = {f"model.layers.{i}.mlp.experts": "halley: sequential" for i in range(2)}
    assert run_ranks(_run_document, 2, tmp_path) == [paths, paths]


def _assert_equal_steps(model: Any, own: Any) -> None:
    tokens = make_tokens()
    assert abs(run_step(model, tokens) - run_step(own, tokens)) < 1e-5
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_enabled_model_on_one_rank_keeps_values() -> None:
    model, own = make_model("mixtral"), make_model("mixtral")
    said = halley_transformers.enable(model, strategy="sequential")
    assert said.endswith("(strategy sequential) in this MixtralForCausalLM")
    _assert_equal_steps(model, own)
    state = halley_transformers.full_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize(("family", "compiled"), [("mixtral", False), ("qwen2_moe", True)])
def test_experts_implementation_on_one_rank_keeps_values(family: str, compiled: bool) -> None:
    """A compiled block stays one graph."""
    halley_transformers.enable(strategy="sequential", strict=True)
    model = make_model(family, experts_implementation="halley", num_hidden_layers=1)
    own = make_model(family, num_hidden_layers=1)
    assert model.config._experts_implementation == "halley"
    with warnings.catch_warnings():
        if compiled:
            warnings.simplefilter("ignore")  # torch reads .grad of the graph's inputs
            model.model.layers[0].mlp.compile(backend="aot_eager", fullgraph=True)
        _assert_equal_steps(model, own)
    torch.compiler.reset()
    halley_transformers.disable()


def test_expert_ids_of_other_ranks_are_skipped() -> None:
    """Transformers' AllReduceEP marks experts of other ranks with ids past the module's own."""
    experts = make_model("mixtral").model.layers[0].mlp.experts
    halley_transformers.enable(strategy="sequential")
    run = find_extension_point().experts.ExpertsInterface()["halley"]
    x_TD = torch.randn(3, 32)
    idx_TK = torch.tensor([[0, 8], [8, 8], [3, 1]])
    weights_TK = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.25, 0.75]])
    y_TD = run(experts, x_TD, idx_TK, weights_TK)
    halley_transformers.disable()

    own = Experts(up_LGD=experts.gate_up_proj, down_LDF=experts.down_proj)
    routing = Routing(
        topk_idx_TK=idx_TK.masked_fill(idx_TK == 8, DROPPED), topk_weights_TK=weights_TK
    )
    torch.testing.assert_close(y_TD, moe_reference(x_TD, routing, own))


def test_experts_with_another_activation_have_a_reason() -> None:
    experts = make_model("mixtral", hidden_act="gelu").model.layers[0].mlp.experts
    reason = "the experts' activation is GELUActivation"
    assert transformers_experts.find_unsupported(experts) == reason


def test_transposed_weights_are_read_as_views() -> None:
    experts = make_model("mixtral").model.layers[0].mlp.experts
    expected = transformers_experts.read_experts(experts, lambda rows, ids: rows).stacked
    assert expected is not None
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.transpose(1, 2).contiguous())
    experts.down_proj = nn.Parameter(experts.down_proj.transpose(1, 2).contiguous())
    experts.is_transposed = True
    found = transformers_experts.read_experts(experts, lambda rows, ids: rows).stacked
    assert found is not None
    assert torch.equal(found.up_LGD, expected.up_LGD)
    assert torch.equal(found.down_LDF, expected.down_LDF)
    assert found.up_LGD._base is experts.gate_up_proj


def _load_chunked(rank: int, num_ranks: int, folder: Path, strict: bool) -> str:
    with disabled_afterwards():
        try:
            load_sharded(folder, MESH, strategy="chunked", strict=strict)
        except (ValueError, UserWarning) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("strict", [False, True])
def test_named_strategy_that_cannot_run_experts_is_reported_at_load(strict, tmp_path, run_ranks):
    save_model("gpt_oss", tmp_path, num_hidden_layers=1)
    problem = f"strategy (chunked) cannot run experts of this kind: {GATE}"
    first, second = run_ranks(_load_chunked, 2, tmp_path, strict)
    if strict:
        assert first == second == f"ValueError: {problem}"
    else:
        fallback = "the framework's own expert code runs between dispatch and combine"
        assert (first, second) == (f"UserWarning: {problem}; {fallback}", "")


def _load_unknown(
    rank: int, num_ranks: int, folder: Path, expected: Any, strict: bool
) -> list[str]:
    """Load a model whose experts lack an attribute that Halley reads; return the messages."""
    kind = transformers.models.mixtral.modeling_mixtral.MixtralExperts
    original = kind.__init__

    def without_attribute(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.is_transposed

    with pytest.MonkeyPatch.context() as patch, disabled_afterwards(), messages() as found:
        patch.setattr(kind, "__init__", without_attribute)
        model = load_sharded(folder, MESH, strategy="sequential", strict=strict)
        for module in model.modules():
            if hasattr(module, "is_concatenated"):
                module.is_transposed = False  # Transformers' own forward needs it
        if KIND == "ep_implementation":  # older versions divide the gradients twice
            compare_step(model, expected, MESH, tolerance=1e-5)
        found += halley_transformers.describe(model).values()
    return found[:2]


@pytest.mark.skipif(KIND == "experts_function", reason="Transformers has no all-to-all there")
@pytest.mark.parametrize("strict", [False, True])
def test_unknown_experts_are_left_to_transformers(strict, tmp_path, run_ranks) -> None:
    expected = save_model("mixtral", tmp_path, num_hidden_layers=1)
    problem = "experts module MixtralExperts must be one that transformers' experts interface runs"
    first, second = run_ranks(_load_unknown, 2, tmp_path, expected, strict)
    if strict:
        assert first == second == [problem]
    else:
        assert second == [f"transformers: {problem}"]
        assert first == [f"transformers: {problem}", f"{problem}; transformers runs it"]


def _enable_wrongly(rank: int, num_ranks: int) -> list[str]:
    """Call ``enable`` with models and a group that it cannot use; return the errors."""
    errors: list[str] = []
    for family, changes in (
        ("mixtral", {"num_local_experts": 3, "intermediate_size": 16}),
        ("llama", {}),
    ):
        sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64}
        kind: Any = transformers.CONFIG_MAPPING[family]
        model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **changes))
        with pytest.raises(ValueError, match="must") as caught:
            halley_transformers.enable(model)
        errors.append(str(caught.value))
    group: Any = torch.distributed.new_group([0])
    if rank == 0:
        with pytest.raises(ValueError, match="must") as caught:
            halley_transformers.enable(make_model("mixtral"), group=group)
        errors.append(str(caught.value))
    return errors


def test_models_and_groups_that_do_not_fit_are_errors(run_ranks: RunRanks) -> None:
    assert run_ranks(_enable_wrongly, 2)[0] == [
        "num_experts (3) must be divisible by ep_size (2)",
        "model (LlamaForCausalLM) must have experts to spread",
        "group (1 ranks) must be all 2 ranks: copies of experts need transformers 5.19 or newer",
    ]
