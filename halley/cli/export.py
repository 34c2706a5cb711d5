"""``halley export``: a trained model for other programs."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from halley.train.hf_export import export_run


def export(
    run: Annotated[Path, typer.Argument(help="Output folder of halley train.")],
    output: Annotated[Path, typer.Option(help="A folder that is empty or not there yet.")],
) -> int:
    """Write the newest checkpoint of a run as safetensors, with the names of Hugging Face.

    Works for the families mixtral, qwen2_moe, qwen3_moe and olmoe, in one process.
    """
    written = export_run(run, output)
    typer.echo(json.dumps({"output": str(output)} | dataclasses.asdict(written)))
    return 0
