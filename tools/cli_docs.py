"""`python tools/cli_docs.py` writes the commands' help into docs/cli.md; a test fails when it is stale."""

import re
import sys
from pathlib import Path

import typer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.cli.app import app  # noqa: E402 (this tree, installed or not)

PAGE = ROOT / "docs" / "cli.md"
SECTION = re.compile(r"(<!-- help: (?P<command>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def help_of(command: str) -> str:
    """What `--help` prints in a terminal of 80 columns; `command` begins with `localllm`."""
    context = typer.main.get_command(app).make_context("localllm", [], resilient_parsing=True, terminal_width=80)
    for word in command.split()[1:]:
        found = context.command.get_command(context, word)  # type: ignore[attr-defined]
        context = found.make_context(word, [], parent=context, resilient_parsing=True)
    return context.get_help()


def render(page: str) -> str:
    """The page with fresh help in each marked section."""
    return SECTION.sub(lambda m: f"{m[1]}```text\n{help_of(m['command'])}\n```\n{m[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
