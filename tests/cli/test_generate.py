"""``halley generate`` continues a prompt with a run's newest checkpoint, and names mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from halley.cli.main import main
from halley.core.config import RunConfig
from halley.core.types import Routing
from halley.moe.router import SoftmaxRouter
from halley.moe.transformer import MoETransformer
from halley.train.checkpoint import load_checkpoint
from halley.train.generation import Generator, Sampling, _choose_token
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    built,
    checkpoint_of,
    read_settings,
    train_here,
    train_on_ranks,
    truncate,
)
from tests.train.tokenizer_case import VOCABULARY, write_tokenizer


PROMPT = "expert tokén"  # 13 bytes
SIGMOID = [
    "model.moe.router.kind=sigmoid",
    "model.moe.router.num_groups=3",
    "model.moe.router.num_limited_groups=2",
    "model.moe.router.bias_update_rate=0.5",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Train three steps in this process, with a checkpoint after the last."""
    config = read_settings(tmp_path_factory.mktemp("run"), "train.num_steps=3")
    train_here(config)
    return config


def _generate(
    config: RunConfig, capsys: pytest.CaptureFixture[str], *options: str, prompt: str = PROMPT
) -> dict[str, Any]:
    """Return the JSON line of the command, which must print nothing else."""
    arguments = ["generate", config.output, "--prompt", prompt, "--json", "--device=cpu", *options]
    capsys.readouterr()  # leave out the lines of the training
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    return json.loads(line)


def _resumed_model(config: RunConfig) -> MoETransformer:
    """Return the model that training resumes from the checkpoint of step 3."""
    with built(config) as run:
        run.optimizer.resume(load_checkpoint(checkpoint_of(config, 3), run.state()))
    return run.model


@pytest.mark.parametrize("settings", [[], SIGMOID, ["train.dtype=bfloat16"]])
def test_greedy_text_of_a_run_of_two_ranks_is_the_argmax_of_its_model(
    run_ranks: RunRanks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
) -> None:
    """With 13 + 12 tokens, the context of 16 drops the first ones. Router biases are loaded."""
    config = read_settings(tmp_path, "train.num_steps=3", *settings)
    run_ranks(train_on_ranks, 2, config)
    got = _generate(config, capsys, "--temperature=0", "--tokens=12")
    model, context = _resumed_model(config), list(PROMPT.encode())
    for _ in range(12):
        logits_BSV = model(torch.tensor([context[-16:]])).logits_BSV
        context.append(int(logits_BSV[0, -1].argmax()))
    tokens = context[len(PROMPT.encode()) :]
    text = bytes(tokens).decode(errors="replace")
    assert got == {"prompt": PROMPT, "text": text, "tokens": tokens, "step": 3}
    # The most probable tokens of two models may be equal, but their logits differ.
    generator = Generator(Path(config.output), device=torch.device("cpu"))
    context_BS = torch.tensor([context[-16:]])
    assert torch.equal(generator.model(context_BS).logits_BSV, model(context_BS).logits_BSV)


def test_an_expert_drops_no_token_of_a_run_with_a_capacity(tmp_path: Path) -> None:
    """In training an expert accepts one of 16 tokens, the first one: the last would be dropped."""
    settings = ["model.moe.router.kind=switch", "model.moe.top_k=1"]
    settings += ["model.moe.router.capacity_factor=0.1", "train.num_steps=1"]
    config = read_settings(tmp_path, *settings)
    train_here(config)
    model = Generator(Path(config.output), device=torch.device("cpu")).model
    tokens_BS = torch.full((1, 16), 7)  # all go to one expert of the first layer
    seen: list[Routing] = []
    for layer in model.modules():
        if isinstance(layer, SoftmaxRouter):
            layer.register_forward_hook(lambda *call: seen.append(call[-1].routing))
    model(tokens_BS)
    assert len(seen) == 2
    for routing in seen:
        assert (routing.topk_idx_TK >= 0).all()
        assert (routing.topk_weights_TK > 0).all()


def test_the_seed_decides_the_text(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (_generate(run, capsys, "--tokens=20", "--seed=1") for _ in range(2))
    assert first == again
    assert 0 < len(first["tokens"]) <= 20
    assert _generate(run, capsys, "--tokens=20", "--seed=2")["text"] != first["text"]


def test_choices_are_limited_to_the_most_probable_tokens() -> None:
    """Probabilities are 0.1, 0.6, 0.3, so sums from the largest are 0.6, 0.9, 1."""
    logits_V = torch.tensor([0.1, 0.6, 0.3]).log()
    random = torch.Generator().manual_seed(0)

    def chosen(**options: Any) -> set[int]:
        sampling = Sampling(**{"temperature": 1.0, **options})
        return {_choose_token(logits_V, sampling, random=random) for _ in range(100)}

    assert chosen() == {0, 1, 2}
    assert chosen(temperature=1e-300) == chosen(temperature=0.0) == {1}
    assert chosen(top_k=1) == chosen(top_p=0.6) == {1}
    assert chosen(top_k=2) == chosen(top_p=0.61) == chosen(top_k=9, top_p=0.89) == {1, 2}


def test_plain_output_has_no_control_characters(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape sequence of a model that knows little could change the terminal."""
    options = ["--temperature=100", "--tokens=60", "--device=cpu"]
    assert main(["generate", run.output, "--prompt=x", *options]) == 0
    out = capsys.readouterr().out
    assert len(out) > 1
    assert all(letter.isprintable() or letter in "\n\t" for letter in out)


def test_a_run_with_a_tokenizer_reads_and_writes_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has 256 tokens, but only those of the tokenizer are chosen."""
    tokenizer = write_tokenizer(tmp_path)
    config = read_settings(tmp_path, "train.num_steps=3", f"data.tokenizer={tokenizer}")
    Path(str(config.data.path)).write_text("a b c a\n" * 100)
    train_here(config)
    got = _generate(config, capsys, "--tokens=8", "--temperature=2", prompt="a b")
    assert set(got["tokens"]) <= set(VOCABULARY.values())
    words = {token: word for word, token in VOCABULARY.items()}
    assert got["text"].split() == [words[token] for token in got["tokens"]]

    write_tokenizer(tmp_path, vocabulary={**VOCABULARY, "d": 9})
    assert main(["generate", config.output, "--prompt=a"]) == 2
    assert "must be unchanged since the run wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--prompt=", "--prompt () must not be empty"),
        ("--prompt=x --tokens=0", "tokens (0) must be at least 1"),
        ("--prompt=x --temperature=-0.1", "temperature (-0.1) must be finite and at least 0"),
        ("--prompt=x --temperature=nan", "temperature (nan) must be finite and at least 0"),
        ("--prompt=x --top-k=-1", "top-k (-1) must be at least 0"),
        ("--prompt=x --top-p=0", "top-p (0.0) must be above 0 and at most 1"),
        ("--prompt=x --seed=-1", "seed (-1) must be at least 0"),
        ("--prompt=x --device=tpu", "device (tpu) must be one of auto, cpu, cuda"),
    ],
)
def test_a_mistake_is_one_line(
    run: RunConfig, capsys: pytest.CaptureFixture[str], options: str, line: str
) -> None:
    assert main(["generate", run.output, *options.split()]) == 2
    assert capsys.readouterr() == ("", f"halley: error: {line}\n")


def test_a_run_without_a_whole_checkpoint_is_named(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["generate", str(folder), "--prompt=x"]
    assert main(arguments) == 2
    assert "must be the output folder of halley train" in capsys.readouterr().err
    shutil.copytree(run.output, folder)
    truncate(folder / "checkpoints" / "step-00000003")
    assert main(arguments) == 2
    assert "is damaged" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    assert main(arguments) == 2
    line = f"run ({folder}) must hold a whole checkpoint in checkpoints/"
    assert capsys.readouterr() == ("", f"halley: error: {line}\n")
