"""``halley run``: a script of a framework, unchanged, with its experts run by Halley."""

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from halley.cli.checks import check_package
from halley.cli.ranks import hand_to_ranks
from halley.moe.strategy import check_strategy


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script to run when the command line has been read, as the interpreter would run it.

    Attributes:
        path: of the script.
        arguments: its own.
    """

    path: Path
    arguments: list[str]

    def run(self) -> int:
        """Run it in this process; what it raises, and its exit code, are its own."""
        sys.argv = [str(self.path), *self.arguments]
        sys.path.insert(0, str(self.path.resolve().parent))
        runpy.run_path(str(self.path), run_name="__main__")
        return 0


def run(
    script: Annotated[Path, typer.Argument(help="A Python file; what follows are its arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="...", hidden=True)] = None,
    strategy: Annotated[str, typer.Option(help="How routed experts run.")] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where experts would be left to the framework.")
    ] = False,
    nproc: Annotated[int, typer.Option(help="Ranks to start; 0 is one a GPU.")] = 1,
) -> int | Script:
    """Run a script of Hugging Face's transformers with its experts on Halley.

    Models that it loads with expert parallelism use Halley unless they name another implementation.

    Options of halley stand before the script. Under torchrun, write
    torchrun --nproc-per-node 8 -m halley.cli run train.py.
    """
    if not script.is_file():
        raise ValueError(f"script ({script}) must be a Python file")
    check_strategy(strategy)
    check_package("transformers", extra="hf", option="halley run")
    code = hand_to_ranks(nproc, device="auto")
    if code is not None:
        return code
    # Only here: no other command needs it.
    from halley.integrations.huggingface import register

    said = register(strategy, strict=strict, default=True)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"halley: {said}", err=True)
    return Script(path=script, arguments=arguments or [])
