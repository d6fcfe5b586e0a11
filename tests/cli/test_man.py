"""The manual pages match the program, are well-formed and render."""

import shutil
import subprocess

import pytest

from localllm.cli.fast_start import COMMANDS
from tools.man_docs import FOLDER, pages, text


def test_the_manual_matches_help_and_documentation():
    stale = "the manual is stale: run `python tools/cli_docs.py`"
    assert {file: file.read_text(encoding="utf-8") for file in FOLDER.glob("*")} == pages(), stale


def test_every_command_has_a_page_and_the_program_one_with_settings_and_exit_codes():
    assert {file.stem for file in pages()} == {"localllm", *(f"localllm-{name}" for name in COMMANDS)}
    whole = (FOLDER / "localllm.1").read_text(encoding="utf-8")
    assert whole.index("no such model") > whole.index(".SH EXIT STATUS")
    assert whole.index(r"\fBLOCALLLM_HOST\fR") > whole.index(".SH ENVIRONMENT")


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed here")
def test_groff_gives_no_warnings():
    for file in FOLDER.glob("*.1"):
        done = subprocess.run(["groff", "-ww", "-man", "-Tutf8", "-z", file], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), file.name


@pytest.mark.skipif(not shutil.which("man"), reason="man is not installed here")
def test_man_shows_flags_that_can_be_copied():
    done = subprocess.run(["man", "-l", FOLDER / "localllm-run.1"], capture_output=True, text=True, check=True)
    assert "--temperature X" in done.stdout
    assert "[PROMPT ...]" in done.stdout


@pytest.mark.parametrize(
    ("words", "roff"),
    [
        (r"a \ and `--flag`", r"a \e and \fB\-\-flag\fR"),
        (".PP is no request", r"\&.PP is no request"),
        ("'quoted'", r"\(aqquoted\(aq"),
        ("see [there](page.md#part)", "see there"),
    ],
)
def test_no_line_is_parsed_as_a_roff_command(words, roff):
    assert text(words) == roff
