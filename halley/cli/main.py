"""The commands of ``halley``, and how their errors reach the user: one line, no traceback."""

import contextlib
import difflib
import os
import sys
import traceback
import warnings
from typing import TextIO, cast

import typer

from halley.cli import bench, bench_graph, doctor, export, plan, run, trace, train, tune
from halley.cli.ranks import COMMAND
from halley.distributed.failures import tell_failure
from halley.distributed.launcher import READER_GONE, USER_ERROR
from halley.distributed.world import is_launched


INTERRUPTED = 130  # as a shell has it: 128 and SIGINT's number
_KINDS = {"int_parsing": "an integer", "float_parsing": "a number"}
_NEAR = 0.8  # of difflib: options as far apart as --seed and --nonsense are no suggestion

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
        _check_words(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(arguments, prog_name="halley", standalone_mode=False)
        _flush_output()  # here, and not when the interpreter ends: a full disk is a failure
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich makes the one of the other
        _drop_output()
        return READER_GONE
    except Exception as error:
        if _is_of_stdout(error):
            _drop_output()
        return _report(error, details=traceback.format_exc() if debug else "")
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


def _check_words(arguments: list[str]) -> None:
    """Refuse arguments that no option takes; those of a script are not checked.

    Raises:
        ValueError: an argument is empty, has a NUL byte, or bytes that are not UTF-8.
    """
    if arguments[:1] == ["run"]:
        return
    for before, word in zip(["", *arguments], arguments, strict=False):
        option, equals, value = word.partition("=")
        if not word or (option.startswith("--") and equals and not value):
            name = option or (before if before.startswith("--") else "argument")
            raise ValueError(f"{name} () must not be empty")
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"argument ({word!r}) must be UTF-8 without NUL bytes")


def _report(error: Exception, *, details: str) -> int:
    """Tell the user the error in one line, after ``details``; return the exit code."""
    usage = _usage_text(error)
    if usage is not None or isinstance(error, ValueError):
        text = str(error) if usage is None else usage
        if text:  # none where the help was shown for want of a command
            tell_failure(text, is_mistake=True, error=error, details=details)
        return USER_ERROR
    tell_failure(str(error) or type(error).__name__, error=error, details=details)
    return 1


def _usage_text(error: Exception) -> str | None:
    """Return what is wrong with the command line, or None where the error is another one."""
    # The class lives in click or in typer, by version.
    text = getattr(error, "format_message", None)
    if not callable(text):
        return None
    name: str | None = getattr(error, "option_name", None)
    known: list[str] | None = getattr(error, "possibilities", None)
    if name is not None and known is not None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        return f"No such option: {name}" + (f", did you mean {near[0]}" if near else "")
    options = getattr(getattr(error, "param", None), "opts", [])
    details = getattr(error.__cause__, "errors", None)  # of pydantic, which typer converts with
    if options and callable(details):
        first = cast(list[dict[str, str]], details())[0]
        if kind := _KINDS.get(first["type"]):
            return f"{options[0]} ({first['input']}) must be {kind}"
    return str(text())


def _is_of_stdout(error: Exception) -> bool:
    """Return whether flushing standard output fails, as on a full disk."""
    try:
        _flush_output()
    except OSError:
        return isinstance(error, OSError)
    return False


def _flush_output() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None if closed
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would fail to flush when it exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no descriptor of its own
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


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
