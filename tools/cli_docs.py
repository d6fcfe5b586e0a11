"""`python tools/cli_docs.py` writes the commands' help into docs/cli.md, their words for the Tab key into
localllm/cli/words.json, the schemas of their JSON into docs/schemas, and the manual into man. A test fails where
one of them is stale."""

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
from localllm.cli.complete import COMMAND_TABLE  # noqa: E402
from tools import json_docs, man_docs  # noqa: E402

PAGE = ROOT / "docs" / "cli.md"
WIDTH = 78  # columns of what `--help` prints in terminals of 80 and more
SECTION = re.compile(r"(<!-- help: (?P<command>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def help_of(command: str, width: int = 80) -> str:
    """The page of `--help`, as wide as this; `command` begins with `localllm`."""
    context = typer.main.get_command(app).make_context(
        "localllm", [], resilient_parsing=True, terminal_width=width
    )
    for word in command.split()[1:]:
        found = context.command.get_command(context, word)  # type: ignore[attr-defined]
        context = found.make_context(word, [], parent=context, resilient_parsing=True)
    return context.get_help()


def render(page: str) -> str:
    """The page with fresh help in each marked section."""
    return SECTION.sub(lambda m: f"{m[1]}```text\n{help_of(m['command'])}\n```\n{m[3]}", page)


def words() -> str:
    """The commands with their arguments and flags, as `cli/complete.py` reads them."""
    program: Any = typer.main.get_command(app)
    commands = {
        name: {
            "help": command.get_short_help_str(100),
            "arguments": [argument(p) for p in command.params if p.param_type_name == "argument"],
            "options": options(command),
        }
        for name, command in program.commands.items()
    }
    content = {"help": help_of("localllm", WIDTH) + "\n", "options": options(program), "commands": commands}
    return json.dumps(content, indent=1, default=str) + "\n"


def argument(place: Any) -> str:
    """As the help calls it, with dots where several may be given."""
    return place.metavar if place.nargs == 1 else place.metavar.removesuffix("...") + "..."


def options(command: Any) -> dict[str, Any]:
    """Each name of a flag, with what a shell shows of it and what `cli/fast_start.py` reads it by."""
    context = typer.Context(command)
    return {
        name: {
            "value": None if option.is_flag else option.metavar or "VALUE",
            "help": option.help,
            "field": option.name,
            "type": "flag" if option.is_flag and option.name != "help" else kind(option),
            "many": option.multiple,
            "means": option.is_flag and name in option.opts,
            "default": option.get_default(context),
        }
        for option in command.get_params(context)
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }


def kind(option: Any) -> str:
    """Of one value; `other` is what only the library reads."""
    annotation = option.type_descriptor.annotation
    return next((t.__name__ for t in (str, int, float) if annotation in (t, list[t])), "other")


def fill(folder: Path, wanted: Mapping[Path, str]) -> None:
    """With these files, all of one ending, and no others of it."""
    folder.mkdir(exist_ok=True)
    endings = {file.suffix for file in wanted}
    for file in folder.iterdir():
        if file.suffix in endings and file not in wanted:
            file.unlink()
    for file, content in wanted.items():
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    COMMAND_TABLE.write_text(words(), encoding="utf-8")
    fill(json_docs.FOLDER, json_docs.schemas())
    fill(man_docs.FOLDER, man_docs.pages())
