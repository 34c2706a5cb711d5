"""Examples, figures and snippets run; documents name what exists and equal results and formulas."""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from halley.cli.main import app
from halley.core.models import find_model
from halley.core.placement import ExpertPlacement
from halley.distributed.mesh import build_groups
from halley.fused.config import KernelConfig
from halley.fused.kernels.layout import make_layout
from halley.planner.expert_balance import max_over_mean, plan_placement, rank_loads
from halley.tools.skew import zipf_load
from tests.rank_pool import RunRanks


ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BENCH_MODELS = ["mixtral-8x7b", "phi-3.5-moe", "qwen2-moe", "qwen3-30b-a3b", "deepseek-v3"]
FIGURES = sorted((ROOT / "docs" / "figures").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, capsys, monkeypatch) -> None:
    # On a CPU, because these tests run kernels in Triton's interpreter.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert "experts" in capsys.readouterr().out


def _compare(rank: int, num_ranks: int) -> list[str]:
    compare = runpy.run_path(str(ROOT / "examples" / "02_fused_layer.py"))["compare"]
    return compare(build_groups(0, device_type="cpu"), torch.device("cpu"))


def test_fused_example_on_two_ranks(run_ranks: RunRanks) -> None:
    for lines in run_ranks(_compare, 2):
        assert "fused equals unfused bit for bit: True" in lines
        assert any("(2, 64, 256)" in line for line in lines)


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_figure_is_drawn(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", [str(path), str(picture)])
    runpy.run_path(str(path), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("name", BENCH_MODELS)
def test_sizes_of_the_fused_buffers_are_as_documented(name: str) -> None:
    """The formulas of docs/comet.md give its table (four ranks, bfloat16, MiB) and the layout."""
    num_ranks, num_tokens, model = 4, 8192, find_model(name)
    experts, top_k, hidden = model.moe.num_experts, model.moe.top_k, model.hidden_size
    layout = make_layout(
        num_ranks=num_ranks,
        num_experts=experts,
        top_k=top_k,
        max_tokens=num_tokens,
        block_m=KernelConfig().block_m,
    )
    num_local = experts // num_ranks
    num_blocks = -(-num_tokens // (256 // (1 << (top_k - 1).bit_length())))
    counts = 2 * num_local + min(8, 1 << (num_local - 1).bit_length())
    record = 16 + _aligned(counts * num_blocks) + 2 * _aligned(num_tokens * top_k)
    flags = 3 * _aligned(num_ranks) + 64 * num_ranks + _aligned(2 * num_ranks)
    words = flags + 2 * num_ranks * record
    assert words == layout.routing_words

    row = 2 * hidden
    send_buffers, combine_buffer = 2 * num_tokens * row, num_ranks * num_tokens * row
    symmetric = (send_buffers, combine_buffer, 4 * num_ranks * num_tokens * top_k, 4 * words)
    sizes = (*symmetric, sum(symmetric))
    cells = [name, hidden, experts, top_k, *(f"{size / 2**20:.1f}" for size in sizes)]
    document = (ROOT / "docs" / "comet.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(map(str, cells))} |" in document


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("name", BENCH_MODELS)
def test_plans_are_as_documented(name: str, num_ranks: int) -> None:
    """The loads and expert sizes in docs/balance.md equal the results of the planner."""
    model = find_model(name)
    experts, top_k, hidden = model.moe.num_experts, model.moe.top_k, model.hidden_size
    counts = zipf_load(experts, exponent=1.2, top_k=top_k).tolist()
    plain = ExpertPlacement.plain(experts, num_ranks=num_ranks)
    plans = [plan_placement(counts, num_ranks=num_ranks, spare=spare) for spare in range(3)]
    ratios = [f"{max_over_mean(rank_loads(each, counts)):.2f}" for each in (plain, *plans)]
    document = (ROOT / "docs" / "balance.md").read_text(encoding="utf-8")
    cells = [name, f"{experts}, {top_k}", str(num_ranks), *ratios]
    assert f"| {' | '.join(cells)} |" in document
    mebibytes = 3 * hidden * model.moe.intermediate_size / 2**20
    assert f"| {name} | {2 * mebibytes:.1f} | {18 * mebibytes:.0f} |" in document


def _aligned(num_words: int) -> int:
    """Return the words of 4 bytes that a section takes: a multiple of 64 bytes."""
    return -(-num_words // 16) * 16


def test_tables_equal_the_result_files() -> None:
    documents = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["documents"]
    for path, text in documents().items():
        assert path.read_text(encoding="utf-8") == text, f"run python benchmarks/tables.py: {path}"


def _snippets(name: str) -> list[str]:
    """Return the Python code blocks of a document."""
    document = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)


def test_readme_has_the_tested_snippet_of_the_transformers_page() -> None:
    snippet = _snippets("README.md")[0]
    assert snippet == _snippets("docs/transformers.md")[0]
    assert len(snippet.splitlines()) <= 12


def test_layer_of_the_readme_runs() -> None:
    # The layer has 2 GB of weights, and the strategy "auto" measures it a dozen times: a minute on
    # a CPU. Smaller sizes run the same code.
    snippet = _snippets("README.md")[1]
    for size, smaller in ("2048", "64"), ("1408", "32"):
        assert size in snippet
        snippet = snippet.replace(size, smaller)
    names: dict[str, Any] = {}
    exec(snippet, names)
    layer, y = names["layer"], names["y"]
    assert y.shape == (512, 64)
    assert int(layer.expert_counts.sum()) == 512 * 4
    y.sum().backward()
    assert layer.aux_loss.isfinite()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


SNIPPETS = _snippets("docs/extending.md")
OF_A_RUN = ("checkpoints/", "previous-1/")  # files in the output folder of a run
# The changelog and the log may name files of earlier versions.
HISTORY = {"CHANGELOG.md", "docs/LOG.md"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
GUIDES = sorted({str(page.relative_to(ROOT)) for page in PAGES} - HISTORY)


def _find_missing(guide: str) -> list[str]:
    """Return the paths in backticks that exist neither in the repository nor in ``halley/``."""
    path = ROOT / guide
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    names = sorted(word for word in words if re.fullmatch(r"[\w-]+/[\w./-]*", word))
    names = [name for name in names if not name.startswith(OF_A_RUN)]
    folders = (ROOT, ROOT / "halley", path.parent)
    return [name for name in names if not any((folder / name).exists() for folder in folders)]


def test_headline_of_the_readme_is_that_of_the_committed_results() -> None:
    times_us: dict[str, list[float]] = {"sequential": [], "unfused": [], "fused": []}
    for line in (ROOT / "benchmarks/results/h200x4/layer.jsonl").read_text().splitlines():
        row = json.loads(line)
        case = row["num_tokens"], row["direction"]
        if row["strategy"] in times_us and case == (8192, "forward_backward"):
            times_us[row["strategy"]].append(row["median_us"])
    plain, kernels, fused = (math.prod(each) ** (1 / len(each)) for each in times_us.values())
    first = f"In the geometric mean of these five layers `fused` is {plain / fused:.2f} times as "
    first += f"fast as `sequential`: {plain / kernels:.2f} by its kernels, times "
    assert f"{first}{kernels / fused:.2f} by overlap." in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_names_files_that_exist(guide: str) -> None:
    assert _find_missing(guide) == []


def _find_wrong_options(command: str) -> list[str]:
    """Return the subcommand or the options of a ``halley`` command line that do not exist."""
    words = command.split()
    parsed: Any = typer.main.get_command(app)
    while hasattr(parsed, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in parsed.commands:
            return [name]
        parsed = parsed.commands[name]
    known = {option for parameter in parsed.params for option in parameter.opts}
    return [word for word in words if word.startswith("--") and word not in known]


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_names_commands_that_exist(guide: str) -> None:
    text = (ROOT / guide).read_text(encoding="utf-8")
    pattern = r"(?:^ {4}|^|`)(?:halley|torchrun [^\n`]*-m halley\.cli) ([a-z][^\n`#]*)"
    commands = re.findall(pattern, text, flags=re.MULTILINE)
    wrong = {each: found for each in commands if (found := _find_wrong_options(each))}
    assert wrong == {}


def test_unknown_option_of_a_document_is_found() -> None:
    assert _find_wrong_options("bench layer --no-such 3 --tokens 4") == ["--no-such"]
    assert _find_wrong_options("no-such --tokens 4") == ["no-such"]


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index: int, tmp_path: Path) -> None:
    path = tmp_path / f"snippet_{index}.py"  # a file, because Triton reads the source of kernels
    path.write_text(SNIPPETS[index], encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
