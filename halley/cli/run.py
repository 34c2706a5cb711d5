"""``halley run``: run the experts of an unchanged Hugging Face script with Halley."""

import os
import runpy
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from halley.cli.checks import check_package
from halley.cli.ranks import NprocOption, launch_ranks
from halley.distributed.failures import tell_failure
from halley.distributed.mesh import is_launched
from halley.strategies.registry import STRATEGIES, check_strategy


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python script with its arguments, which runs after the command line has been parsed."""

    path: Path
    arguments: list[str]

    def run(self) -> int:
        """Run the script in this process; return the exit code that ``python script.py`` has.

        Tracebacks begin in the script. If ``halley`` started several ranks, ranks with the same
        error print it once.
        """
        sys.argv = [str(self.path), *self.arguments]
        sys.path.insert(0, str(self.path.resolve().parent))
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except SystemExit as error:
            if not is_launched() or isinstance(error.code, int | None):
                raise
            tell_failure(str(error.code), error=error)
            return 1
        except Exception as error:
            error.__traceback__ = _frames_of(self.path, error.__traceback__)
            if not is_launched():
                sys.excepthook(type(error), error, error.__traceback__)
                return 1
            text = "".join(traceback.format_exception_only(error))
            tell_failure(text, error=error, details="".join(traceback.format_exception(error)))
            return 1
        return 0


def _frames_of(path: Path, frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the script on."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename != str(path):
        first = first.tb_next
    return first or frames


def check_script(path: Path) -> None:
    """Raise ``ValueError`` if a file cannot be read or is not valid Python."""
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL byte in a path is a ValueError
        problem = getattr(error, "strerror", None) or error
        raise ValueError(f"script ({path}) must be a readable file: {problem}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run of the script repeats these warnings
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"script ({path}) must be Python: {error}") from error


def run(
    script: Annotated[
        Path, typer.Argument(help="Python file to run. All words after it are its arguments.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="...", hidden=True)] = None,
    strategy: Annotated[
        str, typer.Option(help=f"Strategy that runs the routed experts: {', '.join(STRATEGIES)}.")
    ] = "auto",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Raise an error if Halley cannot run the experts of a layer. By default, "
            "transformers runs them.",
        ),
    ] = False,
    nproc: NprocOption = 1,
) -> int | Script:
    """Run a Python script that uses transformers; Halley runs the experts of its models.

    Halley runs the experts of models that the script loads with expert parallelism and without
    another experts implementation.

    Options of halley must come before the script. With torchrun, the command is
    `torchrun --nproc-per-node 8 -m halley.cli run train.py`.
    """
    check_script(script)
    check_strategy(strategy)
    check_package("transformers", extra="hf", option="halley run")
    code = launch_ranks(nproc, device="auto")
    if code is not None:
        return code
    # Imported here, because the import of transformers takes seconds.
    from halley.integrations.transformers import enable

    description = enable(strategy=strategy, strict=strict)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"halley: {description}", err=True)
    return Script(path=script, arguments=arguments or [])
