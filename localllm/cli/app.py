"""The command line `localllm`: its commands, and usage errors. Does not import torch."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperGroup

from localllm import __version__
from localllm.cli import options
from localllm.cli.exits import run_with_exit_code
from localllm.cli.fast_start import COMMANDS, find_command
from localllm.cli.io import silence_stderr
from localllm.cli.options import PanelCommand
from localllm.errors import UsageError

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}

Quiet = Annotated[bool, options.switch("--quiet", text="Print only errors to stderr.", panel=options.Panel.OUTPUT)]


def with_quiet_flag(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an additional option `--quiet`."""

    @wraps(command)
    def run(*arguments: Any, quiet: bool = False, **flags: Any) -> None:
        with silence_stderr(flags | {"quiet": quiet}):
            command(*arguments, **flags)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    flag = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])  # type: ignore[attr-defined]
    run.__annotations__ = hints | {"quiet": Quiet}
    return run


class LazyCommands(Mapping[str, Any]):
    """Typer commands by name; each is imported when it is looked up, so that a command does not import the
    others."""

    def __getitem__(self, name: str) -> Any:
        command = find_command(name)
        single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT_SETTINGS)
        single.command(name, cls=PanelCommand)(with_quiet_flag(command))
        return typer.main.get_command(single)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(dict[str, Any], LazyCommands())


# Typer's own completion is off: completion.py says why.
app = typer.Typer(
    name="localllm", cls=LazyGroup, add_completion=False, rich_markup_mode=None, context_settings=CONTEXT_SETTINGS
)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"localllm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def localllm(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run open-weight language models on your own machine."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its exit code; an error is one line on
    stderr."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_exit_code(lambda: invoke(line))


def invoke(arguments: list[str]) -> int:
    """Run a command and return its exit code. Raises UsageError for an unknown flag or a missing argument, and
    what the command raises."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        command = typer.main.get_command(app)
        with command.make_context("localllm", arguments) as context:
            command.invoke(context)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:
        raise UsageError(format_usage_error(error, arguments)) from error


MESSAGE_REPLACEMENTS = (
    (r"Input should be a valid integer, unable to parse string as an integer", "give a whole number"),
    (r"Input should be a valid number, unable to parse string as a number", "give a number"),
    (r"Input should be less than or equal to (\S+)", r"give at most \1"),
    (r"Input should be greater than or equal to (\S+)", r"give at least \1"),
    (r"Value error, ", ""),
    (r"^No such (option: |command )'?([^' ]+)'?", r"There is no \1\2"),
    (r"^There is no option: ", "There is no option "),
    (r"^Got unexpected extra argument\(s\) \((.*)\)", r"Unexpected argument: \1"),
    (r"^Got unexpected extra arguments? \((.*)\)", r"Unexpected argument: \1"),
    (r" \(Possible options: (.*)\)", r"; did you mean \1?"),
    (r"\. Did you mean '?([^']+)'?\?", r"; did you mean \1?"),
)


def format_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Typer's message in the form of all errors: in lower case, with the remedy after a semicolon."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else " ".join(["localllm", *arguments[:1]])
    message = " ".join(error.format_message().split()).rstrip(".")
    for pattern, replacement in MESSAGE_REPLACEMENTS:
        message = re.sub(pattern, replacement, message)
    separator = "" if message.endswith("?") else ";"
    return f"{message[:1].lower()}{message[1:]}{separator} see `{command} --help`"
