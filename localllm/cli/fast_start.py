"""Parse command lines of `run`, `list`, `show` and `ps` without Typer, and print `localllm --help` from a file.

Typer takes longer to import than a warm server takes to answer: parsing here saves 100 of 176 ms of CPU time of
`run`, and 60 of 200 ms of `list`.
Flags come from `commands.json`, which `tools/cli_docs.py` generates from the commands. Only lines that need no
judgement are parsed here, to the values that Typer would give; all others, such as abbreviated flags and errors,
are left to it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMAND_TABLE = Path(__file__).with_name("commands.json")
VALUE_TYPES = {"str": str, "int": int, "float": float}
MAX_DIGITS = 15
MIN_HELP_COLUMNS = 80  # at least this wide, every terminal gets the same help page
SHORT_COMMANDS = ("list", "show", "ps")

COMMANDS = {
    "run": "run:run",
    "chats": "chats:chats",
    "serve": "serve:serve",
    "cluster": "cluster:cluster",
    "worker": "worker:worker",
    "embed": "embed:embed",
    "ps": "ps:ps",
    "top": "ps:top",
    "stop": "ps:stop",
    "replay": "replay:replay",
    "pull": "pull:pull",
    "list": "models:list_models",
    "show": "models:show",
    "plan": "plan:plan",
    "simulate": "simulate:simulate",
    "bench": "bench:bench",
    "quantize": "quantize:quantize",
    "diff": "diff:diff",
    "batch": "batch:batch",
    "rm": "store:rm",
    "verify": "pull:verify",
    "cache": "cache:cache",
    "cp": "store:cp",
    "create": "store:create",
    "template": "template:template",
    "doctor": "doctor:doctor",
    "completion": "completion:completion",
}
"""Function of each command, as MODULE:FUNCTION below `localllm.cli`."""


def find_command(name: str) -> Callable[..., None]:
    """Function of a command, imported when it is looked up, so that a command does not import the others. Raises
    UsageError for a setting that huggingface_hub cannot read."""
    module, _, function = COMMANDS[name].partition(":")
    try:
        return getattr(import_module(f"localllm.cli.{module}"), function)
    except ValueError as error:
        from localllm.cli.exits import invalid_hf_setting

        raise invalid_hf_setting(error) from error


def read_command_table() -> dict[str, Any]:
    """Commands with their arguments and options; `tools/cli_docs.py` describes the format."""
    return json.loads(COMMAND_TABLE.read_text(encoding="utf-8"))


def help_page(arguments: Sequence[str]) -> str | None:
    """Page of `localllm --help`; None for other arguments, or if a narrow terminal needs another layout."""
    if list(arguments) not in (["--help"], ["-h"]) or shutil.get_terminal_size().columns < MIN_HELP_COLUMNS:
        return None
    return read_command_table()["help"]


def parse_run_flags(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Values by field name that Typer would pass to `run`; None if Typer has to parse the line."""
    if arguments[:1] != ["run"] or len(arguments) < 2:
        return None
    parsed = parse_words(read_command_table()["commands"]["run"]["options"], arguments[1:])
    if parsed is None or not parsed[1]:
        return None
    flags, positional = parsed
    return flags | {"model": positional[0], "prompt": positional[1:] or ()}


def parse_short_command(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Values by field name that Typer would pass to a command of SHORT_COMMANDS; None for other commands, or if
    Typer has to parse the line."""
    if not arguments or arguments[0] not in SHORT_COMMANDS:
        return None
    command = read_command_table()["commands"][arguments[0]]
    names = [argument["metavar"].lower() for argument in command["arguments"]]
    parsed = parse_words(command["options"], arguments[1:])
    if parsed is None or len(parsed[1]) != len(names):
        return None
    flags, positional = parsed
    return flags | dict(zip(names, positional, strict=True))


def parse_words(options: dict[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], list[str]] | None:
    """Values of options by field name, and the other words; None if Typer has to parse them."""
    flags: dict[str, Any] = {
        option["field"]: () if option["multiple"] else option["default"]
        for option in options.values()
        if option["type"] != "other"
    }
    positional, rest = list[str](), list(reversed(words))
    while rest:
        word = rest.pop()
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, equals, text = word.partition("=")
        option = options.get(name)
        if option is None or option["type"] == "other":
            return None
        if option["type"] == "flag":
            if equals:
                return None
            flags[option["field"]] = option["flag_value"]
            continue
        if not equals:
            if not rest:
                return None
            text = rest.pop()
        if not is_unambiguous(text, option["type"]):
            return None
        value = VALUE_TYPES[option["type"]](text)
        flags[option["field"]] = [*flags[option["field"]], value] if option["multiple"] else value
    return flags, positional


def is_unambiguous(text: str, value_type: str) -> bool:
    """Whether Python and Typer certainly convert this text to the same value."""
    if value_type == "str":
        return not text.startswith("-")
    integer, point, fraction = text.removeprefix("-").partition(".")
    parts = (integer, fraction) if point and value_type == "float" else (integer + point + fraction,)
    return all(part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS for part in parts)
