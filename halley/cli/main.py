"""Define the ``halley`` command, run a subcommand, and print an error as one line."""

import contextlib
import difflib
import os
import sys
import traceback
import warnings
from typing import TextIO, cast

import typer

from halley.cli import bench, doctor, plan, run, trace, train, tune
from halley.cli.ranks import COMMAND
from halley.distributed.failures import tell_failure
from halley.distributed.launcher import READER_GONE, USER_ERROR
from halley.distributed.mesh import is_launched


INTERRUPTED = 130  # the shell's convention: 128 plus the number of SIGINT
_KINDS = {"int_parsing": "an integer", "float_parsing": "a number"}  # pydantic's names of errors
_MIN_SIMILARITY = 0.8  # difflib ratio: do not suggest --seed for --nonsense

app = typer.Typer(
    name="halley",
    help="Train Mixture-of-Experts models with communication that overlaps computation. "
    "Every command accepts --debug, which prints the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it joins the lines of a paragraph, unlike the default
)
app.command("train")(train.run)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
app.command("trace")(trace.trace)
app.command("export")(train.export)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
# Without interspersed arguments, all words after the script's path are arguments of the script.
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)


def main(
    argv: list[str] | None = None, *, commands: typer.Typer = app, module: str = "halley.cli"
) -> int:
    """Run one command and return its exit code.

    The code is 0 for success, 1 for a failure, 2 for a mistake of the user, and 130 for an
    interrupt. Only the process that started the ranks reports an interrupt.

    Args:
        argv: arguments without the program's name; None takes those of this process.
        commands: the subcommands, and the program's name.
        module: Python module that the launcher runs on each rank with the same arguments.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments, debug = _remove_debug(list(words))
    COMMAND.set((module, *words))
    try:
        _check_arguments(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = commands(arguments, prog_name=commands.info.name, standalone_mode=False)
        # A full disk must give exit code 1. The flush at exit would only print a message.
        _flush_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich turns a BrokenPipeError into a SystemExit
        _discard_output()
        return READER_GONE
    except Exception as error:
        if not _can_flush() and isinstance(error, OSError):
            _discard_output()
        return _report(error, details=traceback.format_exc() if debug else "")
    if isinstance(code, run.Script):
        return code.run()  # Outside of the try: Python reports errors and warnings of a script.
    if code == INTERRUPTED and not is_launched():
        sys.stderr.write("halley: interrupted\n")
    return code if isinstance(code, int) else 0


def _remove_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without --debug, and whether --debug was given.

    After ``run``, all arguments may belong to a script, so a --debug there is not removed.
    """
    is_word = [argument != "--debug" for argument in arguments]
    first = is_word.index(True) if any(is_word) else len(arguments)
    end = first if arguments[first : first + 1] == ["run"] else len(arguments)
    own = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*own, *arguments[end:]], len(own) < end


def _check_arguments(arguments: list[str]) -> None:
    """Raise ``ValueError`` if an argument is empty, has a NUL byte, or is not UTF-8.

    The arguments of ``run`` are not checked, because a script may accept any of these.
    """
    if arguments[:1] == ["run"]:
        return
    for previous, word in zip(["", *arguments], arguments, strict=False):
        option, equals, value = word.partition("=")
        if not word or (option.startswith("--") and equals and not value):
            name = option or (previous if previous.startswith("--") else "argument")
            raise ValueError(f"{name} () must not be empty")
        # Python decodes bytes that are not UTF-8 as lone surrogates.
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"argument ({word!r}) must be UTF-8 without NUL bytes")


def _report(error: Exception, *, details: str) -> int:
    """Print ``details``, then the error as one line; return the exit code."""
    usage = _usage_text(error)
    if usage is not None or isinstance(error, ValueError):
        text = str(error) if usage is None else usage
        if text:  # Empty if typer has already printed the help.
            tell_failure(text, is_mistake=True, error=error, details=details)
        return USER_ERROR
    tell_failure(str(error) or type(error).__name__, error=error, details=details)
    return 1


def _usage_text(error: Exception) -> str | None:
    """Return the message of a usage error, or None for any other error."""
    # Usage errors are recognised by their methods: the class is in click or in typer, depending on
    # typer's version.
    text = getattr(error, "format_message", None)
    if not callable(text):
        return None
    name: str | None = getattr(error, "option_name", None)
    known: list[str] | None = getattr(error, "possibilities", None)
    if name is not None and known is not None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_MIN_SIMILARITY)
        return f"No such option: {name}" + (f", did you mean {near[0]}" if near else "")
    options = getattr(getattr(error, "param", None), "opts", [])
    details = getattr(error.__cause__, "errors", None)  # typer converts values with pydantic
    if options and callable(details):
        first = cast(list[dict[str, str]], details())[0]
        if kind := _KINDS.get(first["type"]):
            return f"{options[0]} ({first['input']}) must be {kind}"
    return str(text())


def _can_flush() -> bool:
    try:
        _flush_output()
    except OSError:  # for example a full disk
        return False
    return True


def _flush_output() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None if closed
        sys.stdout.flush()


def _discard_output() -> None:
    """Send buffered output to the null device, because its flush at exit would fail again."""
    # Standard output may be closed, or may have no file descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
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
    """Print a warning as one line, without the place in the code."""
    sys.stderr.write(f"halley: warning: {' '.join(str(message).split())}\n")
