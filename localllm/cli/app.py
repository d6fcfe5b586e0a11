"""The program `localllm`: its commands, and what becomes of their errors. Imports no torch."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperGroup

from localllm import __version__
from localllm.cli import options
from localllm.cli.exits import invalid_hf_setting, run_with_exit_code
from localllm.cli.io import silence_stderr
from localllm.cli.options import PanelCommand
from localllm.errors import UsageError

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}

COMMANDS = {
    "run": "run:run",
    "chats": "chats:chats",
    "serve": "serve:serve",
    "embed": "embed:embed",
    "ps": "ps:ps",
    "top": "top:top",
    "stop": "ps:stop",
    "replay": "replay:replay",
    "pull": "pull:pull",
    "list": "models:list_models",
    "show": "models:show",
    "plan": "plan:plan",
    "bench": "bench:bench",
    "quantize": "quantize:quantize",
    "diff": "diff:diff",
    "batch": "batch:batch",
    "rm": "store:rm",
    "verify": "store:verify",
    "cp": "store:cp",
    "create": "create:create",
    "template": "template:template",
    "doctor": "doctor:doctor",
    "completion": "completion:completion",
}
"""Where the function of each command is, as module:function below `localllm.cli`."""


Quiet = Annotated[bool, options.switch("--quiet", text="Print only errors to stderr.", panel=options.Panel.OUTPUT)]


def with_quiet_flag(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--quiet` to a command."""

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
    """Typer command of each name, imported when it is looked up, so that one command does not load the others."""

    def __getitem__(self, name: str) -> Any:
        module, _, function = COMMANDS[name].partition(":")
        try:
            command = getattr(import_module(f"localllm.cli.{module}"), function)
        except ValueError as error:
            raise invalid_hf_setting(error) from error
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


# Typer's completion would need its own main(), which makes a broken pipe exit 1; see completion.py.
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
    """Run the program and give its exit code; every error becomes one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_exit_code(lambda: invoke(words))


def invoke(arguments: list[str]) -> int:
    """Raises UsageError for an unknown flag or a missing argument, and what the command raises."""
    if arguments[:1] == ["help"]:  # as many programs have it: `help`, `help run`
        arguments = [*arguments[1:], "--help"]
    try:
        command = typer.main.get_command(app)
        with command.make_context("localllm", arguments) as context:
            command.invoke(context)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:
        raise UsageError(format_usage_error(error)) from error


MESSAGE_REPLACEMENTS = (
    ("Input should be a valid integer, unable to parse string as an integer", "give a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "give a number"),
    ("Value error, ", ""),
)


def format_usage_error(error: typer.TyperException) -> str:
    """Typer's sentence in the shape of ours: a small letter, and the way out after a semicolon."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "localllm"
    message = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in MESSAGE_REPLACEMENTS:
        message = message.replace(theirs, ours)
    stop = "" if message.endswith("?") else ";"
    return f"{message[:1].lower()}{message[1:]}{stop} see `{command} --help`"
