"""The manual: `localllm.1` and a page for each command, of the same words as `--help` and docs/cli.md.
`tools/cli_docs.py` writes it into man, from where the wheel takes it."""

import re
import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm import __version__  # noqa: E402 (this tree, installed or not)
from localllm.cli.app import CONTEXT_SETTINGS, app  # noqa: E402 (this tree, installed or not)
from localllm.cli.options import Panel, group_options  # noqa: E402

FOLDER = ROOT / "man"
PAGE = ROOT / "docs" / "cli.md"
ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def pages() -> dict[Path, str]:
    """Files and what belongs into them."""
    program: Any = typer.main.get_command(app)
    found = {FOLDER / "localllm.1": whole(program)}
    for name, command in program.commands.items():
        found[FOLDER / f"localllm-{name}.1"] = of_command(name, command)
    return found


def whole(program: Any) -> str:
    """The page of the program, with the settings and exit codes of docs/cli.md."""
    commands = [f".TP\n{bold(name)}\n{text(c.get_short_help_str(200))}" for name, c in program.commands.items()]
    others = ", ".join(rf".BR localllm\-{name} (1)" for name in program.commands).replace(", ", ",\n")
    return page(
        "localllm",
        "run open-weight language models on your own machine",
        [
            ("SYNOPSIS", ".B localllm\n.RI [ options ]\n.I command\n.RI [ arguments ]"),
            ("DESCRIPTION", text(program.help)),
            ("OPTIONS", options(program)),
            ("COMMANDS", "\n".join(commands)),
            ("EXIT STATUS", table("## Exit codes")),
            ("ENVIRONMENT", table("## Settings")),
            ("SEE ALSO", others),
        ],
    )


def of_command(name: str, command: Any) -> str:
    about, _, rest = command.help.partition("\n\n")
    places = [argument(p) for p in command.params if p.param_type_name == "argument"]
    return page(
        f"localllm-{name}",
        " ".join(about.split()).rstrip("."),
        [
            ("SYNOPSIS", "\n".join([rf".B localllm {name}", ".RI [ options ]", *places])),
            *([("DESCRIPTION", "\n.PP\n".join(map(text, rest.split("\n\n"))))] if rest else []),
            ("OPTIONS", options(command)),
            ("SEE ALSO", ".BR localllm (1)"),
        ],
    )


def page(name: str, about: str, sections: list[tuple[str, str]]) -> str:
    head = f'.TH {plain(name.upper())} 1 "" "localllm {__version__}" "localllm"'
    said = "\n".join(f".SH {title}\n{content}" for title, content in sections)
    return f"{head}\n.SH NAME\n{plain(name)} \\- {text(about[:1].lower() + about[1:])}\n{said}\n"


def argument(place: Any) -> str:
    name = plain(place.metavar.removesuffix("..."))
    several = r"\~.\|.\|." if place.nargs == -1 else ""
    return f".I {name}{several}" if place.required else f".RI [ {name}{several} ]"


def options(command: Any) -> str:
    """Options with their help, with a subsection for each panel."""
    context = typer.Context(command, help_option_names=CONTEXT_SETTINGS["help_option_names"])
    paragraphs = []
    for panel, group in group_options(command.get_params(context)).items():
        if panel is not Panel.OPTIONS:
            paragraphs.append(f".SS {panel}")
        for option in group:
            value = "" if option.is_flag else rf" \fI{plain(option.metavar or 'VALUE')}\fR"
            names = ", ".join(bold(name) + value for name in names_of(option))
            paragraphs.append(f".TP\n{names}\n{text(option.help)}")
    return "\n".join(paragraphs)


def names_of(option: Any) -> list[str]:
    """As they are declared; those of help come in any order."""
    names = [*option.opts, *option.secondary_opts]
    return sorted(names, key=len) if option.name == "help" else names


def table(heading: str) -> str:
    """Of docs/cli.md, below that heading: each row a paragraph under its first cell."""
    content = PAGE.read_text(encoding="utf-8").split(heading + "\n")[1].split("\n## ")[0]
    rows = [(names, about) for names, about in ROW.findall(content) if names.isdecimal() or "`" in names]
    return "\n".join(f".TP\n{text(names)}\n{text(about)}" for names, about in rows)


def text(words: str) -> str:
    """Lines of prose; what stands between backticks is bold, of links the words remain."""
    words = LINK.sub(r"\1", " ".join(words.split()))
    parts = [bold(part) if i % 2 else plain(part) for i, part in enumerate(CODE.split(words))]
    line = "".join(parts)
    return rf"\&{line}" if line[:1] in (".", "'") else line


def bold(words: str) -> str:
    return rf"\fB{plain(words)}\fR"


def plain(words: str) -> str:
    """As it is to be read: no backslash is a command, and a dash is the one that can be copied into a shell."""
    for mark, safe in (
        ("\\", r"\e"),
        ("-", r"\-"),
        ("'", r"\(aq"),
        ("^", r"\(ha"),
        ("~", r"\(ti"),
        ("`", r"\(ga"),
    ):
        words = words.replace(mark, safe)
    return words
