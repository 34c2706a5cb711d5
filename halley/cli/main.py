"""The ``halley`` command: run a subcommand, or a script, and print an error as one line."""

import contextlib
import difflib
import os
import runpy
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer
from typer import Argument, Option

from halley.cli import balance, bench, doctor, generate, plan, plan_layout, tokenize, train, tune
from halley.cli.ranks import COMMAND, NprocOption, launch_ranks
from halley.core.validation import check_package
from halley.distributed.launcher import READER_GONE, USER_ERROR, tell_failure
from halley.distributed.mesh import is_launched
from halley.strategies.registry import STRATEGIES, check_strategy
from halley.tools.timer import installed_version


INTERRUPTED = 130  # the shell's convention: 128 plus the number of SIGINT
_KINDS = {"int_parsing": "an integer", "float_parsing": "a number"}  # by pydantic's type of error
_MIN_SIMILARITY = 0.8  # least difflib ratio for a suggestion: no --seed for --nonsense


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python script and its arguments, which ``halley run`` returns and ``main`` then runs."""

    path: Path
    arguments: list[str]

    def run(self) -> int:
        """Run the script in this process; return its exit code 0 or 1, or raise its ``SystemExit``.

        Tracebacks begin in the script. Ranks with the same error print it once.
        """
        sys.argv = [str(self.path), *self.arguments]
        sys.path.insert(0, str(self.path.resolve().parent))
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except SystemExit as error:
            if not is_launched() or isinstance(error.code, int | None):
                raise
            tell_failure(str(error.code), error=error)
        except Exception as error:
            first = error.__traceback__
            while first is not None and first.tb_frame.f_code.co_filename != str(self.path):
                first = first.tb_next
            error.__traceback__ = first or error.__traceback__
            if is_launched():
                text = "".join(traceback.format_exception_only(error))
                tell_failure(text, error=error, details="".join(traceback.format_exception(error)))
            else:
                sys.excepthook(type(error), error, error.__traceback__)
        else:
            return 0
        return 1


def check_script(path: Path) -> None:
    """Raise ``ValueError`` if a file cannot be read or is not valid Python."""
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL byte in a path is a ValueError
        problem = getattr(error, "strerror", None) or error
        raise ValueError(f"script ({path}) must be a readable file: {problem}") from error
    try:
        # Hide warnings of this check: Python gives them again when the script runs.
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"script ({path}) must be Python: {error}") from error


def run(
    script: Annotated[
        Path, Argument(help="Python file to run. All words after it are its arguments.")
    ],
    arguments: Annotated[list[str] | None, Argument(metavar="...", hidden=True)] = None,
    strategy: Annotated[
        str, Option(help=f"Strategy that runs the routed experts: {', '.join(STRATEGIES)}.")
    ] = "auto",
    strict: Annotated[
        bool,
        Option(
            "--strict",
            help="Raise an error if Halley cannot run the experts of a layer. By default, "
            "transformers runs them.",
        ),
    ] = False,
    nproc: NprocOption = 1,
) -> int | Script:
    """Run a Python script that uses transformers; Halley runs the experts of its models.

    These are models that the script loads with expert parallelism and without another experts
    implementation.

    Options of halley must come before the script. With torchrun, the command is
    `torchrun --nproc-per-node 8 -m halley.cli run train.py`.
    """
    check_script(script)
    check_strategy(strategy)
    check_package("transformers", extra="hf", option="halley run")
    launch_ranks(nproc, device="auto")
    # Imported here, because the import of transformers takes seconds.
    from halley.integrations.transformers import enable

    description = enable(strategy=strategy, strict=strict)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"halley: {description}", err=True)
    return Script(path=script, arguments=arguments or [])


app = typer.Typer(
    name="halley",
    help="Train Mixture-of-Experts models with communication that overlaps computation. "
    "Every command accepts --debug, which prints the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # markdown joins the lines of a paragraph
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"halley {installed_version('halley-moe') or 'unknown'}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accept the options before a subcommand, such as ``--version``."""


app.command("train")(train.run)
app.command("tokenize")(tokenize.tokenize)
app.add_typer(bench.app, name="bench")
plans = typer.Typer(
    help="Predict training steps and plan the placement of experts, without ranks or GPUs.",
    no_args_is_help=True,
)
plans.command("balance")(balance.balance)
plans.command("graph")(plan.graph)
plans.command("layout")(plan_layout.layout)
app.add_typer(plans, name="plan")
app.command("trace")(train.trace)
app.command("report")(bench.report)
app.command("export")(train.export)
app.command("generate")(generate.generate)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
# Interspersed arguments are off, so that all words after the script are arguments of the script.
app.command("run", context_settings={"allow_interspersed_args": False})(run)


def main(
    argv: list[str] | None = None, *, commands: typer.Typer = app, module: str = "halley.cli"
) -> int:
    """Run a command; return its exit code: 0, 1 (failure), 2 (user's mistake) or one listed below.

    The others are 130 for an interrupt, which only the process that started the ranks reports, 141
    for a closed output, and exit codes of a script, of ranks or of ``halley train``.

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
        # Flush here, so a full disk gives exit code 1. A flush at exit would only print the error.
        _flush_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # rich turns a BrokenPipeError into code 1
        if isinstance(error, SystemExit) and not error.code:  # typer has printed a shell completion
            return 0
        _discard_output()
        return READER_GONE
    except Exception as error:
        if isinstance(error, OSError):
            try:
                _flush_output()
            except OSError:  # for example a full disk
                _discard_output()
        return _report(error, details=traceback.format_exc() if debug else "")
    if isinstance(code, Script):
        return code.run()  # Outside of the try: Python reports errors and warnings of the script.
    if code == INTERRUPTED and not is_launched():
        sys.stderr.write("halley: interrupted\n")
    return code if isinstance(code, int) else 0


def _remove_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without --debug, and whether --debug was given to ``halley``.

    After ``run``, all arguments may belong to a script, so a --debug there is not removed.
    """
    command = next((word for word in arguments if word != "--debug"), "")
    end = arguments.index("run") if command == "run" else len(arguments)
    own = [word for word in arguments[:end] if word != "--debug"]
    return [*own, *arguments[end:]], len(own) < end


def _check_arguments(arguments: list[str]) -> None:
    """Raise ``ValueError`` if an argument of a command is empty, has a NUL byte, or is not UTF-8.

    ``--option=`` counts as empty. Arguments of ``run`` are not checked: a script may accept any.
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
    """Print ``details``, then the error of a command as one line; return exit code 1 or 2."""
    usage = _usage_text(error)
    is_mistake = usage is not None or isinstance(error, ValueError)
    text = str(error) or type(error).__name__ if usage is None else usage
    if text:  # Empty if typer has already printed the help.
        tell_failure(text, is_mistake=is_mistake, error=error, details=details)
    return USER_ERROR if is_mistake else 1


def _usage_text(error: Exception) -> str | None:
    # The class of usage errors is in click or in typer, depending on typer's version. So an error
    # is recognised by its method ``format_message``.
    text = getattr(error, "format_message", None)
    if not callable(text):
        return None
    name: str | None = getattr(error, "option_name", None)
    known: list[str] | None = getattr(error, "possibilities", None)
    if name is not None and known is not None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_MIN_SIMILARITY)
        return f"No such option: {name}" + (f", did you mean {near[0]}" if near else "")
    options = getattr(getattr(error, "param", None), "opts", [])
    details = getattr(error.__cause__, "errors", None)  # newer typer uses pydantic
    if options and callable(details):
        first = cast(list[dict[str, str]], details())[0]
        if kind := _KINDS.get(first["type"]):
            return f"{options[0]} ({first['input']}) must be {kind}"
    return str(text())


def _flush_output() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None if closed
        sys.stdout.flush()


def _discard_output() -> None:
    """Redirect standard output to the null device, because the flush at exit would fail again."""
    # Ignore a standard output that is closed or has no file descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"halley: warning: {' '.join(str(message).split())}\n")
