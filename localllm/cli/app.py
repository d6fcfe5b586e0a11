"""The program `localllm`: its commands, and what becomes of their errors. Imports no torch."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from localllm import __version__
from localllm.cli.batch import batch
from localllm.cli.bench import bench
from localllm.cli.chats import chats
from localllm.cli.completion import completion
from localllm.cli.create import create
from localllm.cli.diff import diff
from localllm.cli.doctor import doctor
from localllm.cli.embed import embed
from localllm.cli.exits import run_with_exit_code
from localllm.cli.flags import with_quiet_flag
from localllm.cli.models import list_models, show
from localllm.cli.plan import plan
from localllm.cli.ps import ps, stop
from localllm.cli.pull import pull
from localllm.cli.quantize import quantize
from localllm.cli.replay import replay
from localllm.cli.run import run
from localllm.cli.serve import serve
from localllm.cli.store import cp, rm, verify
from localllm.cli.template import template
from localllm.cli.top import top
from localllm.errors import UsageError

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}
# Typer's completion would need its own main(), which makes a broken pipe exit 1; see completion.py.
app = typer.Typer(name="localllm", add_completion=False, rich_markup_mode=None, context_settings=CONTEXT_SETTINGS)
COMMANDS = {
    "run": run,
    "chats": chats,
    "serve": serve,
    "embed": embed,
    "ps": ps,
    "top": top,
    "stop": stop,
    "replay": replay,
    "pull": pull,
    "list": list_models,
    "show": show,
    "plan": plan,
    "bench": bench,
    "quantize": quantize,
    "diff": diff,
    "batch": batch,
    "rm": rm,
    "verify": verify,
    "cp": cp,
    "create": create,
    "template": template,
    "doctor": doctor,
    "completion": completion,
}
for name, command in COMMANDS.items():
    app.command(name)(with_quiet_flag(command))


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
    """Run open-weight language models on the machine in front of you."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and give its exit code; every error becomes one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_exit_code(lambda: invoke(words))


def invoke(arguments: list[str]) -> int:
    """Raises UsageError for an unknown flag or a missing argument, and what the command raises."""
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
