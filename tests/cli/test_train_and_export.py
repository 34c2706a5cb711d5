"""A run on two ranks from the command line: planned, trained, exported, and refused."""

import json
import sys
from pathlib import Path

import pytest

from halley.cli.main import main


SMALL = (
    "train.num_steps=2 train.batch_size=1 data.seq_len=16 device=cpu model.hidden_size=16 "
    "model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8 "
    "model.moe.intermediate_size=8 checkpoint.every_steps=1"
)


def _run(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run a command, its ranks as processes; return its code, output and errors."""
    argv = command.split()
    monkeypatch.setattr(sys, "argv", ["halley", *argv])  # what the ranks are started with
    code = main(argv)
    out, err = capfd.readouterr()
    return code, out, err


def _train(output: Path, settings: str) -> str:
    options = " ".join(f"--set {setting}" for setting in settings.split())
    return f"train --output {output} --nproc 2 {options}"


def test_train_on_two_ranks_then_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Rank 0 plans the strategies in another process; both ranks run by the plan."""
    safetensors = pytest.importorskip("safetensors.torch")
    run, exported = tmp_path / "run", tmp_path / "hf"
    code, out, err = _run(_train(run, f"{SMALL} strategy=planned"), monkeypatch, capfd)
    assert code == 0, err
    assert err.count("planned: ") == 1
    assert "not fused: its kernels are interpreted on a CPU" in err
    assert "strategy sequential, " in err or "strategy chunked, " in err
    (line,) = out.splitlines()
    metrics = json.loads(line)
    assert metrics["step"] == 2
    assert 5.0 < metrics["loss"] < 6.0  # ln 256 = 5.55 for a model that knows nothing
    assert json.loads((run / "config.json").read_text())["model"]["hidden_size"] == 16
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]

    code, out, err = _run(f"export {run} --output {exported}", monkeypatch, capfd)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["step"], told["family"]) == (2, "qwen3_moe")
    assert told["files"] == ["config.json", "model.safetensors"]
    tensors = safetensors.load_file(exported / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == told["num_bytes"]
    # The experts of both ranks are there, and they differ.
    gates = [tensors[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(8)]
    assert [tuple(gate.shape) for gate in gates] == [(8, 16)] * 8
    assert len({gate.sum().item() for gate in gates}) == 8

    # The ranks refuse the checkpoint of another model before they build theirs.
    other = SMALL.replace("model.moe.intermediate_size=8", "model.moe.intermediate_size=16")
    code, out, err = _run(_train(run, other), monkeypatch, capfd)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("halley: ")]
    assert line.startswith(
        "halley: error: model.moe.intermediate_size (16) must be 8, as in checkpoint "
        f"{run}/checkpoints/step-00000002 "
    )
