"""`--quiet`, and terminals without colours or cursor movement."""

import re
import subprocess
import sys

import pytest

from localllm.cli.fast_start import COMMANDS
from tests.cli.conftest import LAUNCHER
from tests.cli.test_repl import Terminal


def test_every_command_can_be_quiet(localllm):
    for name in COMMANDS:
        code, out, _ = localllm(name, "--help")
        assert code == 0 and "--quiet" in out, name


def test_notes_thoughts_and_calls_are_hidden(localllm, base, model):
    assert localllm("run", base, "hello")[2].startswith("note: ")
    assert localllm("run", base, "hello", "--quiet") == (0, "raw:hello", "")
    assert localllm("run", model, "thinking calling", "--quiet") == (0, "1:thinking calling", "")


def test_errors_are_printed_and_the_next_command_is_not_quiet(localllm, base):
    code, out, err = localllm("run", base, "fault", "--quiet")
    assert (code, out) == (7, "")
    assert err == "error: model.safetensors holds NaN; download it again\n"
    assert localllm("run", base, "hello")[2].startswith("note: ")


def test_the_fast_start_is_quiet_too(base):
    done = subprocess.run(
        [sys.executable, LAUNCHER, "run", base, "hello", "--quiet"], input=b"", capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"raw:hello", b"")


@pytest.mark.parametrize("command", ["run", "serve"])
def test_quiet_and_verbose_are_refused_together(localllm, model, command):
    code, out, err = localllm(command, model, "--quiet", "--verbose")
    assert (code, out) == (2, "")
    assert err == "error: --quiet and --verbose contradict each other; leave one of them out\n"


def escapes(text):
    return set(re.findall(r"\x1b\[[0-9;?]*[A-Za-z]", text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "colours", "moves"),
    [({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False)],
)
def test_colours_and_moves_are_for_terminals_that_have_them(environment, colours, moves):
    """Checked with the spinner that loading shows."""
    words = ("run", "demo", "hi", "--local", "--temperature", "0", "--max-tokens", "5")
    program = (sys.executable, "-m", "localllm")
    one = Terminal(*words, program=program, **{"NO_COLOR": "", "COLORTERM": ""} | environment)
    try:
        raw = one.raw_until("Hello", seconds=60)
        assert one.leave() == 0
    finally:
        one.close()
    found = escapes(raw)
    assert bool(found) is moves
    assert any(re.search(r"\[[0-9;]*(3[0-9]|38;5;\d+|9[0-7])m", escape) for escape in found) is colours
