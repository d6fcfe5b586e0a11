import re

from localllm.cli.fast_start import COMMANDS
from tools.cli_docs import PAGE, SECTION, render


def test_the_help_on_the_page_is_what_the_program_prints():
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "docs/cli.md is stale: run `python tools/cli_docs.py`"


def test_every_command_has_its_help_on_the_page():
    shown = {match["command"] for match in SECTION.finditer(PAGE.read_text(encoding="utf-8"))}
    assert shown == {"localllm", *(f"localllm {name}" for name in COMMANDS)}


def test_every_documented_exit_code_exists():
    table = PAGE.read_text(encoding="utf-8").split("## Exit codes")[1]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        129,
        130,
        143,
    ]
