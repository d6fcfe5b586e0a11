"""Generates the help pages in docs/cli.md, localllm/cli/commands.json for the fast start and the Tab key, the JSON
schemas in docs/schemas and the manual in man from the commands. Tests fail if one of them is stale.

Usage: python tools/cli_docs.py
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.cli.app import app  # noqa: E402 (this tree, installed or not)
from localllm.cli.fast_start import COMMAND_TABLE  # noqa: E402
from tools import json_docs, man_docs  # noqa: E402

PAGE = ROOT / "docs" / "cli.md"
HELP_COLUMNS = 78  # width of help pages in terminals of 80 columns and more
SECTION = re.compile(r"(<!-- help: (?P<command>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    COMMAND_TABLE.write_text(command_table(), encoding="utf-8")
    write_folder(json_docs.FOLDER, json_docs.schemas())
    write_folder(man_docs.FOLDER, man_docs.pages())


def render(page: str) -> str:
    """docs/cli.md with current help in each marked section."""
    return SECTION.sub(lambda m: f"{m[1]}```text\n{help_text(m['command'])}\n```\n{m[3]}", page)


def help_text(command: str, columns: int = 80) -> str:
    """Help page of a command such as `localllm run`."""
    context = typer.main.get_command(app).make_context(
        "localllm", [], resilient_parsing=True, terminal_width=columns
    )
    for name in command.split()[1:]:
        subcommand = context.command.get_command(context, name)  # type: ignore[attr-defined]
        context = subcommand.make_context(name, [], parent=context, resilient_parsing=True)
    return context.get_help()


def command_table() -> str:
    """Content of commands.json: the help page, and each command's help, arguments and options."""
    program: Any = typer.main.get_command(app)
    commands = {
        name: {
            "help": command.get_short_help_str(100),
            "arguments": [argument_entry(p, command) for p in command.params if p.param_type_name == "argument"],
            "options": option_entries(command),
        }
        for name, command in program.commands.items()
    }
    table = {
        "help": help_text("localllm", HELP_COLUMNS) + "\n",
        "options": option_entries(program),
        "commands": commands,
    }
    return json.dumps(table, indent=1, default=str) + "\n"


def argument_entry(argument: Any, command: Any) -> dict[str, Any]:
    """multiple: more than one may be given; choices: values that the Tab key offers."""
    return {
        "metavar": argument.metavar.removesuffix("..."),
        "multiple": argument.nargs != 1,
        "choices": choices_of(argument, typer.Context(command)),
    }


def option_entries(command: Any) -> dict[str, Any]:
    """Options by flag. metavar: None if it takes no value; field: parameter name; type: of a value, `flag`, or
    `other` if only Typer can parse it; flag_value: what the flag sets; choices: values that the Tab key offers."""
    context = typer.Context(command)
    return {
        name: {
            "metavar": None if option.is_flag else option.metavar or "VALUE",
            "help": option.help,
            "field": option.name,
            "type": "flag" if option.is_flag and option.name != "help" else value_type(option),
            "multiple": option.multiple,
            "flag_value": option.is_flag and name in option.opts,
            "default": option.get_default(context),
            "choices": [] if option.is_flag else choices_of(option, context),
        }
        for option in command.get_params(context)
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }


def value_type(option: Any) -> str:
    annotation = option.type_descriptor.annotation
    return next((t.__name__ for t in (str, int, float) if annotation in (t, list[t])), "other")


def choices_of(parameter: Any, context: Any) -> list[str]:
    return [item.value for item in parameter.shell_complete(context, "")]


def write_folder(folder: Path, contents: Mapping[Path, str]) -> None:
    """Write these files, and delete other files of the same extensions."""
    folder.mkdir(exist_ok=True)
    suffixes = {file.suffix for file in contents}
    for file in folder.iterdir():
        if file.suffix in suffixes and file not in contents:
            file.unlink()
    for file, content in contents.items():
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
