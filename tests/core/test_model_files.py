"""Models from files of Hugging Face and from sizes; the files in ``configs`` have public sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from halley.cli.checks import split_names
from halley.cli.main import main
from halley.core.models import find_model, load_config


CONFIGS = Path(__file__).parent / "configs"
QWEN3 = json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text())


NAMES = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "olmoe"]


@pytest.mark.parametrize("name", NAMES)
def test_file_gives_the_sizes_of_the_named_model(name: str) -> None:
    read, known = find_model(str(CONFIGS / name)), find_model(name)
    balance = read.moe.router.balance_coefficient
    router = replace(known.moe.router, balance_coefficient=balance)
    moe = replace(known.moe, router=router)
    assert read == replace(known, qk_norm="none", hf_family="", moe=moe)


def test_model_without_a_name_in_halley() -> None:
    """GLM-4.5-Air has one dense layer, one shared expert and a sigmoid router."""
    model = find_model(str(CONFIGS / "glm-4.5-air" / "config.json"))
    assert (model.num_layers, model.num_moe_layers) == (46, 45)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.intermediate_size) == (128, 8, 1408)
    assert (model.moe.shared_intermediate_size, model.moe.router.kind) == (1408, "sigmoid")


def test_transformers_5_nests_the_rotary_base(tmp_path: Path) -> None:
    table = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**table, "rope_parameters": {"rope_theta": 5e5}}))
    run = load_config(None, overrides=[f"model={path}"])
    assert run.model.rope_theta == 5e5


def test_sizes_in_a_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    names = split_names("tiny, E=8,K=2,D=64,F=128, E=4,K=1,D=32,F=64", option="models")
    assert names == ["tiny", "E=8,K=2,D=64,F=128", "E=4,K=1,D=32,F=64"]
    model = find_model(names[1])
    assert (model.moe.num_experts, model.moe.top_k, model.hidden_size) == (8, 2, 64)
    command = f"bench layer --nproc 1 --device cpu --samples 1 --tokens 8 --models {names[2]}"
    assert main(command.split()) == 0
    assert '"model": "E=4,K=1,D=32,F=64"' in capsys.readouterr().out


WRONG = [
    ({"num_experts": None}, "must be of a Mixture-of-Experts model, with the key num_local_"),
    ({"hidden_act": "relu"}, "must have hidden_act silu, and has 'relu'"),
    ({"hidden_size": "2048"}, r"hidden_size \('2048'\) must be of type int"),
    ({"num_attention_heads": [4]}, r"num_heads \(\[4\]\) must be of type int"),
    ({"n_shared_experts": "9"}, r"moe.shared_intermediate_size \('9'\) must be of type int"),
    ({"num_experts_per_tok": 200}, r"top_k \(200\) must be between 1 and num_experts \(128\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_file_is_an_error(change: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | change))
    with pytest.raises(ValueError, match=rf"^model \(.*\).*{message}"):
        find_model(str(tmp_path))
