"""Manual pages: `localllm.1` and one for each command, generated from the text of `--help` and docs/cli.md.
`tools/cli_docs.py` writes them into man, which the wheel includes."""

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
    """Content of each manual page."""
    program: Any = typer.main.get_command(app)
    contents = {FOLDER / "localllm.1": program_page(program)}
    for name, command in program.commands.items():
        contents[FOLDER / f"localllm-{name}.1"] = command_page(name, command)
    return contents


def program_page(program: Any) -> str:
    """Page of the program, with settings and exit codes from docs/cli.md."""
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


def command_page(name: str, command: Any) -> str:
    summary, _, rest = command.help.partition("\n\n")
    arguments = [argument(p) for p in command.params if p.param_type_name == "argument"]
    return page(
        f"localllm-{name}",
        " ".join(summary.split()).rstrip("."),
        [
            ("SYNOPSIS", "\n".join([rf".B localllm {name}", ".RI [ options ]", *arguments])),
            *([("DESCRIPTION", "\n.PP\n".join(map(text, rest.split("\n\n"))))] if rest else []),
            ("OPTIONS", options(command)),
            ("SEE ALSO", ".BR localllm (1)"),
        ],
    )


def page(name: str, summary: str, sections: list[tuple[str, str]]) -> str:
    head = f'.TH {plain(name.upper())} 1 "" "localllm {__version__}" "localllm"'
    body = "\n".join(f".SH {title}\n{content}" for title, content in sections)
    return f"{head}\n.SH NAME\n{plain(name)} \\- {text(summary[:1].lower() + summary[1:])}\n{body}\n"


def argument(parameter: Any) -> str:
    name = plain(parameter.metavar.removesuffix("..."))
    dots = r"\~.\|.\|." if parameter.nargs == -1 else ""
    return f".I {name}{dots}" if parameter.required else f".RI [ {name}{dots} ]"


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
    """Names in the order of their declaration; Typer's names of `--help` have no fixed order."""
    names = [*option.opts, *option.secondary_opts]
    return sorted(names, key=len) if option.name == "help" else names


def table(heading: str) -> str:
    """Table of docs/cli.md below a heading, as one paragraph for each row."""
    content = PAGE.read_text(encoding="utf-8").split(heading + "\n")[1].split("\n## ")[0]
    rows = [(key, value) for key, value in ROW.findall(content) if key.isdecimal() or "`" in key]
    return "\n".join(f".TP\n{text(key)}\n{text(value)}" for key, value in rows)


def text(markdown: str) -> str:
    """Prose as roff: code becomes bold, links become their text."""
    prose = LINK.sub(r"\1", " ".join(markdown.split()))
    parts = [bold(part) if i % 2 else plain(part) for i, part in enumerate(CODE.split(prose))]
    line = "".join(parts)
    return rf"\&{line}" if line[:1] in (".", "'") else line


def bold(literal: str) -> str:
    return rf"\fB{plain(literal)}\fR"


def plain(literal: str) -> str:
    """Text with everything escaped that roff would interpret; dashes stay ASCII, so that flags can be copied."""
    for mark, safe in (
        ("\\", r"\e"),
        ("-", r"\-"),
        ("'", r"\(aq"),
        ("^", r"\(ha"),
        ("~", r"\(ti"),
        ("`", r"\(ga"),
    ):
        literal = literal.replace(mark, safe)
    return literal
