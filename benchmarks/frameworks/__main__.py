"""Start the jobs, compare them, write a line for each variant and print a table."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.frameworks.job import Job, Variant
from halley.tools.timer import Row, results_path, summarise, time_keys, to_float, write_rows


ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-2  # of losses and gradient norms in bfloat16
LAYERS = {"qwen3-30b-a3b": 4, "mixtral-8x7b": 2}
MAX_LOAD = 1.25  # of the most loaded rank, as a multiple of the mean
SWIGLU = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
# The first is the reference. MinimalAsyncEP needs full checkpointing, and with it the host waits
# for nothing, so torchtitan's CUDA graphs and fused SwiGLU are its best setting.
VARIANTS = {
    "torchtitan": {
        "standard": Variant(experts="standard"),
        "minimal_async_ep": Variant(
            experts="minimal_async_ep", checkpointing="full", cuda_graphs=True, overrides=(SWIGLU,)
        ),
        "minimal_async_ep-no-graphs": Variant(
            experts="minimal_async_ep", checkpointing="full", overrides=(SWIGLU,)
        ),
        "halley": Variant(experts="halley"),
        "halley-graphs": Variant(experts="halley", cuda_graphs=True, max_load=MAX_LOAD),
        "standard-selective": Variant(experts="standard", checkpointing="selective"),
        "halley-selective": Variant(experts="halley", checkpointing="selective"),
        "halley-saved": Variant(experts="halley", checkpointing="selective+halley"),
        "standard-full": Variant(experts="standard", checkpointing="full"),
        "halley-full": Variant(experts="halley", checkpointing="full"),
        "standard-eager": Variant(experts="standard", compiled=False),
        "halley-eager": Variant(experts="halley", compiled=False),
    },
    "transformers": {
        "all_to_all": Variant(experts="all_to_all", compiled=False),
        "all_to_all-compiled": Variant(experts="all_to_all"),
        "halley-graphs": Variant(experts="halley", cuda_graphs=True, max_load=MAX_LOAD),
        "halley": Variant(experts="halley", compiled=False),
        "halley-compiled": Variant(experts="halley"),
    },
}
DEFAULT = {
    "torchtitan": "standard,minimal_async_ep,halley,halley-graphs",
    "transformers": ",".join(VARIANTS["transformers"]),
}
ON_CPU = DEFAULT | {"torchtitan": "standard,halley"}  # other kernels of torchtitan need a GPU


def main() -> None:
    words = parse_arguments()
    rows: list[Row] = []
    for framework in words.frameworks.split(","):
        default = ON_CPU if words.device == "cpu" else DEFAULT
        names = (words.variants or default[framework]).split(",")
        variants = {name: VARIANTS[framework][name] for name in names}
        for model in words.models.split(","):
            rows += measure(framework, model, variants, words)
            save(rows, Path(words.folder))
    sys.stdout.write("\n".join([*table(rows), ""]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks")
    parser.add_argument("folder", help="of results, such as benchmarks/results")
    parser.add_argument("--frameworks", default="torchtitan,transformers")
    parser.add_argument("--models", default=",".join(LAYERS))
    parser.add_argument("--variants", default="", help="default: the best settings of each")
    parser.add_argument("--layers", type=int, default=0, help="0: 4 of Qwen3, 2 of Mixtral")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of 4096 a rank")
    parser.add_argument("--strategy", default="fused", help="of Halley")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of a job")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--commit", help="to write into the lines")
    words = parser.parse_args()
    known = {"models": LAYERS, "frameworks": VARIANTS}
    for option, allowed in known.items():
        if wrong := set(getattr(words, option).split(",")) - allowed.keys():
            parser.error(f"{option} ({', '.join(wrong)}) must be among {', '.join(allowed)}")
    for framework in words.frameworks.split(","):
        allowed = VARIANTS[framework]
        if wrong := set(filter(None, words.variants.split(","))) - allowed.keys():
            parser.error(f"variants ({', '.join(wrong)}) must be among {', '.join(allowed)}")
    return words


def measure(
    framework: str, model: str, variants: dict[str, Variant], words: argparse.Namespace
) -> list[Row]:
    """Run the jobs of a framework and a model; return a line for each variant."""
    together = framework == "transformers"
    groups = [variants] if together else [{name: each} for name, each in variants.items()]
    results: dict[str, dict[str, Any]] = {}
    for group in groups:
        with tempfile.TemporaryDirectory(prefix="halley-frameworks-") as folder:
            job = Job(
                model=model,
                num_layers=words.layers or LAYERS[model],
                variants=group,
                output=str(Path(folder) / "result.json"),
                strategy=words.strategy,
                seq_len=64 if words.smoke else 4096,
                batch_size=words.batch_size,
                num_samples=words.samples,
                on_cpu=words.device == "cpu",
                tiny=words.smoke,
                commit=words.commit,
            )
            results |= run(framework, job, num_ranks=words.nproc, timeout_s=words.timeout)
    return make_rows(framework, job, variants, results)


def run(framework: str, job: Job, *, num_ranks: int, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run a job; return the measurements of its variants, or the error that ended it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", f"benchmarks.frameworks.{framework}_job"]
    begin, error = time.monotonic(), ""
    process = subprocess.Popen(
        [*command, json.dumps(dataclasses.asdict(job))],
        cwd=ROOT, env=os.environ | ({"TRITON_INTERPRET": "1"} if job.on_cpu else {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        error = f"no result after {timeout_s:.0f} s"
    names = ", ".join(job.variants)
    sys.stderr.write(f"{framework} {job.model} {names}: {time.monotonic() - begin:.0f} s\n")
    if process.returncode == 0 and not error:
        result = json.loads(Path(job.output).read_text(encoding="ascii"))
        sys.stderr.write(json.dumps(result["variants"]) + "\n")  # in case a later job is stopped
        return {name: each | result["machine"] for name, each in result["variants"].items()}
    sys.stderr.write(output)
    lines = [line for line in output.splitlines() if "Error: " in line]
    error = error or (lines or ["no message"])[0][:300]
    return {name: {"error": error} for name in job.variants}


def make_rows(
    framework: str, job: Job, variants: dict[str, Variant], results: dict[str, dict[str, Any]]
) -> list[Row]:
    """Return lines; a variant whose values differ from those of the first has no time."""
    size = job.config()
    reference = results[next(iter(variants))]
    rows: list[Row] = []
    for name, variant in variants.items():
        found = {"error": None, **results[name]}
        row: Row = {
            "case": "framework", "framework": framework, "model": size.name,
            "num_layers": size.num_layers, "vocab_size": size.vocab_size,
            "num_tokens": job.seq_len * job.batch_size, "seq_len": job.seq_len, "tp_size": 1,
            "num_nodes": 1, "skew": "router", "dtype": "bfloat16", "passes": "none",
            "direction": "step", "variant": name, **dataclasses.asdict(variant),
            "strategy": job.strategy if variant.experts == "halley" else variant.experts,
            "median_us": None, "p10_us": None, "p90_us": None, "samples": 0, "floor_us": None,
            "max_rel_err": None, "bit_equal": None, "peak_mib": None,
            "used_mib": None, "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", ""), "loss": None,
        }  # fmt: skip
        if found["error"] is None and "error" in reference:
            found = {"error": "the first variant, which is the reference, failed"}
        if found["error"] is None:
            samples_us, losses = found.pop("samples_us"), found.pop("losses")
            error = differ(losses, found["gradient_norm"], reference)
            row |= {"loss": losses[-1], "max_rel_err": error}
            row["bit_equal"] = has_bits_of_plain(name, variants, results)
            if error <= TOLERANCE:
                row |= time_keys(summarise(samples_us))
        rows.append(row | found)
    return rows


def has_bits_of_plain(
    name: str, variants: dict[str, Variant], results: dict[str, dict[str, Any]]
) -> bool | None:
    """Return whether a variant with CUDA graphs has the bits of the same one without, if it ran."""
    plain = dataclasses.replace(variants[name], cuda_graphs=False, max_load=0.0)
    own = results[name]
    for other, variant in variants.items():
        found = results[other]
        if other != name and variant == plain and "error" not in found:
            return all(own[key] == found[key] for key in ("losses", "gradient_norm"))
    return None


def differ(losses: list[float], norm: float, reference: dict[str, Any]) -> float:
    """Return the largest relative difference of the first and last loss and of the norm."""
    first, *_, last = reference["losses"]
    pairs = [(losses[0], first), (losses[-1], last), (norm, reference["gradient_norm"])]
    return max(abs(value - other) / abs(other) for value, other in pairs)


def save(rows: list[Row], folder: Path) -> None:
    """Write the lines, and keep those of frameworks and models that this run did not measure."""
    machine = next((row for row in rows if "gpu" in row), None)
    if machine is None:
        return
    keys = ("gpu", "num_gpus", "ep_size", "torch", "triton", "nccl", "commit", "date")
    rows = [{**{key: machine[key] for key in keys}, **row} for row in rows]
    path = results_path(folder, rows[0])
    old = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    measured = {(row["framework"], row["model"]) for row in rows}
    kept = [row for row in map(json.loads, old) if (row["framework"], row["model"]) not in measured]
    write_rows(kept + rows, folder)


def table(rows: list[Row]) -> list[str]:
    """Return a table for people; speed is relative to the framework's fastest own variant."""
    lines = ["| framework | model, layers | variant | step, ms | speed | peak GiB | loss | error |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    best: dict[tuple[object, object], float] = {}
    for row in rows:
        if row["median_us"] and row["experts"] != "halley":
            key, median = (row["framework"], row["model"]), to_float(row["median_us"])
            best[key] = min(median, best.get(key, median))
    for row in rows:
        step = speed = "-"
        if row["median_us"]:
            times = [to_float(row[f"{key}_us"]) for key in ("median", "p10", "p90")]
            step = "{:.1f} ({:.1f} to {:.1f})".format(*(each / 1e3 for each in times))
            own = best.get((row["framework"], row["model"]))
            speed = f"{own / times[0]:.2f}" if own else "-"
        peak = f"{to_float(row['peak_mib']) / 1024:.1f}" if row["peak_mib"] else "-"
        cells = [row["framework"], f"{row['model']}, {row['num_layers']}", row["variant"]]
        error = row["error"] or f"{to_float(row['max_rel_err']):.1e}"
        loss = f"{to_float(row['loss']):.4f}" if row["loss"] else "-"
        cells += [step, speed, peak, loss, error]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    main()
