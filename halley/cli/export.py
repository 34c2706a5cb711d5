"""``halley export``: write a trained model for Hugging Face's transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from halley.train.hf_export import export_run


def export(
    run: Annotated[Path, typer.Argument(help="Output folder of halley train.")],
    output: Annotated[Path, typer.Option(help="A folder that is empty or does not exist.")],
) -> int:
    """Write the newest checkpoint of a run as safetensors with Hugging Face's tensor names.

    It supports the model families mixtral, qwen2_moe, qwen3_moe and olmoe, and runs in one process.
    """
    written = export_run(run, output)
    typer.echo(json.dumps({"output": str(output)} | dataclasses.asdict(written)))
    return 0
