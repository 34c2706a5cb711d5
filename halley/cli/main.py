"""The commands of ``halley``, and how their errors reach the user: one line, no traceback."""

import os
import sys
import traceback
import warnings
from typing import TextIO

import typer

from halley.cli import bench, bench_graph, doctor, export, plan, run, trace, train, tune
from halley.cli.ranks import COMMAND
from halley.moe.world import is_launched
from halley.train.launch import USER_ERROR


INTERRUPTED = 130  # as a shell has it: 128 and SIGINT's number
app = typer.Typer(
    name="halley",
    help="Train Mixture-of-Experts models with their communication behind computation. "
    "Any command takes --debug, which shows where an error came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.run)
bench.app.command("graph")(bench_graph.graph)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
app.command("trace")(trace.trace)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
# What stands behind the script is the script's, options too.
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0, 1 for a failure, 2 for a mistake of the user.

    130 is for an interrupt, of which the user is told once, not by each rank.

    Args:
        argv: arguments without the program's name; default those of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments, debug = _take_debug(list(words))
    COMMAND.set(tuple(words))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(arguments, prog_name="halley", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(error)
    if isinstance(code, run.Script):
        return code.run()  # out here: its warnings and errors are none of ours
    if code == INTERRUPTED and not is_launched():
        sys.stderr.write("halley: interrupted\n")
    return code if isinstance(code, int) else 0


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without --debug, and whether it was there; a script keeps its own."""
    words = (at for at, argument in enumerate(arguments) if argument != "--debug")
    first = next(words, len(arguments))
    end = first if arguments[first : first + 1] == ["run"] else len(arguments)
    own = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*own, *arguments[end:]], len(own) < end


def _report(error: Exception) -> int:
    """Print one line for the error; return the exit code.

    All ranks see the same mistake of a user, so the first one of a host tells it for all.
    """
    # Typer's own usage errors; the class lives in click or in typer, by version.
    usage = getattr(error, "format_message", None)
    rank = os.environ.get("RANK", "0")
    local_rank = os.environ.get("LOCAL_RANK", rank)
    if callable(usage) or isinstance(error, ValueError):
        text = str(usage()) if callable(usage) else str(error)
        if local_rank == "0" and text:  # none where the help was shown for want of a command
            sys.stderr.write(f"halley: error: {_one_line(text)}\n")
        return USER_ERROR
    where = f" on rank {rank}" if "RANK" in os.environ else ""
    text = str(error) or type(error).__name__
    sys.stderr.write(f"halley: failed{where}: {_one_line(text)}\n")
    return 1


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    sys.stderr.write(f"halley: warning: {_one_line(str(message))}\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
