"""Commands with a run on two ranks: planned, trained, exported, refused; and profiled."""

import json
from pathlib import Path

import pytest

from halley.cli.main import main
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


SMALL = (
    "train.num_steps=2 train.batch_size=1 data.seq_len=16 device=cpu model.hidden_size=16 "
    "model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8 "
    "model.moe.intermediate_size=8 checkpoint.every_steps=1"
)


def _run(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command, its ranks as processes; return its code, output and errors."""
    code = main(command.split())
    out, err = capfd.readouterr()
    return code, out, err


def _train(output: Path, settings: str, *, nproc: int = 2) -> str:
    options = " ".join(f"--set {setting}" for setting in settings.split())
    return f"train --output {output} --nproc {nproc} {options}"


def test_train_on_two_ranks_then_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 plans the strategies in another process; both ranks run by the plan."""
    safetensors = pytest.importorskip("safetensors.torch")
    run, exported = tmp_path / "run", tmp_path / "hf"
    code, out, err = _run(_train(run, f"{SMALL} strategy=planned"), capfd)
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

    code, out, err = _run(f"export {run} --output {exported}", capfd)
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

    # A run refuses the checkpoint of another model before it builds its own.
    other = SMALL.replace("model.moe.intermediate_size=8", "model.moe.intermediate_size=16")
    code, out, err = _run(_train(run, other, nproc=1), capfd)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("halley: ")]
    assert line.startswith(
        "halley: error: model.moe.intermediate_size (16) must be 8, as in checkpoint "
        f"{run}/checkpoints/step-00000002 "
    )


def test_exposed_communication_is_unknown_where_waits_are_not_recorded(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    command = f"trace --nproc 2 --steps 1 --output {tmp_path} --strategies sequential,functional"
    sets = " ".join(f"--set={setting}" for setting in SMALL.split())
    out, _ = run_ranks(run_command, 2, main, "halley.cli.train", f"{command} {sets}")
    parts_us = json.loads(out.splitlines()[-1])
    sequential, functional = parts_us["sequential"], parts_us["functional"]
    waits = sum(us for name, us in sequential.items() if name.endswith(".wait"))
    assert sequential["exposed communication"] == pytest.approx(waits, rel=1e-3)
    assert functional["exposed communication"] is None
    assert functional["gradients.wait"] > 0.0  # one of several waits, so not the sum
    (line,) = [line for line in out.splitlines() if "exposed communication " in line]
    shown = [cell.strip() for cell in line.strip("│").split("│")]
    assert shown[2] == ""
    assert float(shown[1]) == pytest.approx(waits / 1e3, abs=0.01)
