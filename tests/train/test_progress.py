"""Reports of a run: valid JSON lines, TensorBoard events that read back, truncated lines."""

import io
import json
import math
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from halley.core.config import RunConfig, TrainConfig
from halley.core.models import find_model
from halley.train.progress import Metrics, Reporter, drop_later_steps, say


def _config(**changes: object) -> RunConfig:
    train = TrainConfig(num_steps=5, log_every=2, **changes)  # type: ignore[arg-type]
    return RunConfig(model=find_model("tiny"), train=train)


def _metrics(step: int, **changes: float | None) -> Metrics:
    metrics: Metrics = {
        "step": step,
        "loss": 4.0 / step,
        "router_loss": 0.01,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "step_s": 0.5,
        "tokens_per_s": 12345.6,
        "mfu": 0.25,
        "exposed_share": 0.125,
    }
    return metrics | changes


def _report(path: Path | None, *, is_terminal: bool, config: RunConfig | None = None) -> str:
    """Report steps 3 to 5 and return the text that a person sees."""
    environment = {"TERM": "xterm" if is_terminal else "dumb"}
    console = Console(
        file=io.StringIO(), force_terminal=is_terminal, width=80, _environ=environment
    )
    reporter = Reporter(config or _config(), console=console, metrics=path)
    say(console, "[tiny] " + "one line, however long it is; " * 4)
    with reporter.running(2):
        for step in (3, 4, 5):
            reporter.report(_metrics(step))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_step_is_a_line_of_json_beside_a_log_or_a_bar(tmp_path: Path, is_terminal: bool):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(_metrics(2)) + "\n")
    shown = _report(path, is_terminal=is_terminal)
    lines = path.read_text(encoding="ascii").splitlines()
    assert [json.loads(line) for line in lines] == [_metrics(step) for step in (2, 3, 4, 5)]
    if is_terminal:
        assert all(text in shown for text in ("5/5", "loss 0.800  12.3k tok/s  mfu", "exposed 12%"))
        assert "step 4/5" not in shown
        return
    assert shown.splitlines() == [
        "[tiny] " + ("one line, however long it is; " * 4),
        "step 4/5  loss 1.0000  12,346 tokens/s  mfu 25.0%  exposed communication 12.5%",
        "step 5/5  loss 0.8000  12,346 tokens/s  mfu 25.0%  exposed communication 12.5%",
    ]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    reporter = Reporter(_config(), console=Console(quiet=True), metrics=None)
    with reporter.running(0):
        reporter.report(_metrics(1))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_finite_is_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = io.StringIO()
    reporter = Reporter(_config(), console=Console(file=log), metrics=path)
    with reporter.running(0):
        unknown = {"mfu": None, "exposed_share": None}
        reporter.report(_metrics(2, loss=math.nan, grad_norm=math.inf, **unknown))
    want = _metrics(2, loss=None, grad_norm=None, **unknown)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == want
    assert log.getvalue() == "step 2/5  loss nan  12,346 tokens/s  exposed communication -\n"


def test_the_evaluation_loss_is_a_line_of_its_own(tmp_path: Path):
    log = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    reporter = Reporter(_config(), console=Console(file=log), metrics=path)
    with reporter.running(0):
        reporter.report(_metrics(1, eval_loss=2.0))  # log_every is 2
    assert json.loads(path.read_text()) == _metrics(1, eval_loss=2.0)
    assert log.getvalue() == "step 1/5  eval_loss 2.0000\n"


def test_an_error_leaves_what_was_reported(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    console = Console(file=io.StringIO(), force_terminal=True)
    reporter = Reporter(_config(), console=console, metrics=path)

    def fail() -> None:
        with reporter.running(0):
            reporter.report(_metrics(1))
            raise RuntimeError("rank 0 lost rank 1")

    with pytest.raises(RuntimeError, match="lost rank 1"):
        fail()
    assert json.loads(path.read_text()) == _metrics(1)
    with pytest.raises(ValueError, match="closed file"):
        reporter.report(_metrics(2))


# TensorBoard's protocol files call functions that numpy 2 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_scalars_back(tmp_path: Path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError
    )
    _report(tmp_path / "metrics.jsonl", is_terminal=False, config=_config(tensorboard=True))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(_metrics(1)) - {"step"}
    assert names <= set(events.Tags()["scalars"])
    for name in names:
        got = [(event.step, event.value) for event in events.Scalars(name)]
        want = [(step, pytest.approx(_metrics(step)[name], rel=1e-6)) for step in (3, 4, 5)]
        assert got == want


def _read_wandb(folder: Path) -> list[dict[str, object]]:
    """Return the rows in a file of an offline run: LevelDB's log format, protobuf messages."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("offline-run-*/run-*.wandb")
    content, position = path.read_bytes(), 7  # after the file's header
    assert len(content) < 32768  # one block, so no message is divided
    rows: list[dict[str, object]] = []
    while position < len(content):
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        record = messages.Record.FromString(content[position + 7 : position + 7 + size])
        position += 7 + size
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def test_wandb_has_the_metrics_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two starts of one run, offline: both have its id, and a metric that is None is left out."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = _config(wandb=True)
    metrics = tmp_path / "metrics.jsonl"
    _report(metrics, is_terminal=False, config=config)
    wandb.teardown()  # the end of a process does this: it waits until the file is complete
    first = _read_wandb(tmp_path / "wandb")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    shutil.rmtree(file.parent)
    reporter = Reporter(config, console=Console(quiet=True), metrics=metrics)
    with reporter.running(5):
        reporter.report(_metrics(6, mfu=None, eval_loss=1.25))
        reporter.report(_metrics(4))  # W&B drops a step below its own count
    wandb.teardown()
    rows = [{key: row[key] for key in _metrics(1)} for row in first]
    assert rows == [_metrics(step) for step in (3, 4, 5)]
    row, repeated = _read_wandb(tmp_path / "wandb")
    assert (row["step"], row["eval_loss"], "mfu" in row) == (6, 1.25, False)
    assert (repeated["step"], repeated["loss"]) == (4, 1.0)
    (again,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert again.name == file.name


def test_an_error_of_wandb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All ranks raise it, so it must not have a type that only W&B's package can unpickle."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    rule = r"train\.wandb \(true\): wandb cannot start: .*API key must have 40\+ characters"
    with pytest.raises(RuntimeError, match=f"^{rule}"):
        Reporter(_config(wandb=True), console=Console(), metrics=tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "torn", ["", '{"step": 4, "lo', '{"step": 2}', "\0\0\0\0", "{}\n", "\n", "[2]\n", "\xff"]
)
def test_later_and_torn_lines_move_to_a_file_of_their_own(tmp_path: Path, torn: str):
    path = tmp_path / "metrics.jsonl"
    drop_later_steps(path, step=2)  # at the first start of a run there is no file
    assert not list(tmp_path.iterdir())
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) + "\n" for step in (1, 2, 3, 4)]
    path.write_text("".join(lines) + torn, encoding="latin-1")
    drop_later_steps(path, step=2)
    assert path.read_text() == "".join(lines[:2])
    drop_later_steps(path, step=0)
    assert path.read_text() == ""
    discarded = (tmp_path / "metrics.discarded.jsonl").read_text(encoding="latin-1")
    assert discarded == "".join(lines[2:]) + torn + "".join(lines[:2])
