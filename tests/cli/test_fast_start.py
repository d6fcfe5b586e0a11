"""The fast start parses a command line exactly as the library does, or leaves it to the library."""

import subprocess
import sys

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.cli.app import app, invoke
from localllm.cli.fast_start import (
    SHORT_COMMANDS,
    help_page,
    parse_run_flags,
    parse_short_command,
    read_command_table,
)
from localllm.cli.io import flag_name

OPTIONS = read_command_table()["commands"]["run"]["options"]
VALUES = st.one_of(
    st.sampled_from(
        ["1", "0", "-1", "0.5", "1e3", "-inf", "nan", "", "a b", "7=1.5", "--raw", "-h", "- 1", "٣", "1_0"]
    ),
    st.integers(-(10**18), 10**18).map(str),
    st.floats(allow_nan=False, width=32).map(str),
    st.text(max_size=6),
)
FLAGS = st.sampled_from([*OPTIONS, "--max-token", "--no-such", "-", "--"])
WORD = st.one_of(
    st.text(max_size=5),
    FLAGS,
    st.tuples(FLAGS, VALUES).map(lambda pair: f"{pair[0]}={pair[1]}"),
)
LINE = st.lists(st.one_of(WORD.map(lambda word: [word]), st.tuples(FLAGS, VALUES).map(list)), max_size=6)


def read_by_the_library(words, name="run"):
    """Arguments of the command as Typer parses them."""
    program = typer.main.get_command(app).make_context("localllm", [name, *words])
    command = program.command.get_command(program, name)
    return command.make_context(name, list(words), parent=program).params


@pytest.mark.slow
@settings(deadline=None)
@given(LINE)
def test_it_parses_as_the_library_does(parts):
    words = [word for part in parts for word in part]
    flags = parse_run_flags(["run", *words])
    if flags is not None:
        assert flags == read_by_the_library(words)


@pytest.mark.parametrize(
    "line",
    [
        "demo Hello there --temperature 0 --max-tokens 8",
        "demo --temperature=0.7 --seed=3 --json Hello --verbose",
        "demo --stop a --stop b --stop-id 3 --logit-bias 4=-inf --no-think --ignore-eos",
        "./folder",
    ],
)
def test_plain_lines_need_no_library(line):
    words = line.split()
    assert parse_run_flags(["run", *words]) == read_by_the_library(words)


@pytest.mark.parametrize(
    "line", ["", "run", "run --help", "run demo -h", "serve demo", "run demo --seed", "--version"]
)
def test_the_rest_is_left_to_the_library(line):
    assert parse_run_flags(line.split()) is None


@pytest.mark.parametrize(
    "line",
    ["list", "list --all --json", "show demo", "show --quant int8 demo --json", "ps", "ps --server=h:1 --quiet"],
)
def test_short_commands_are_parsed_as_the_library_does(line):
    name, *words = line.split()
    assert parse_short_command([name, *words]) == read_by_the_library(words, name)


@pytest.mark.parametrize("name", SHORT_COMMANDS)
@pytest.mark.parametrize("words", ["--help", "--al", "--json=yes", "a b", "--server", "--quant -1", "--no-such"])
def test_other_lines_of_short_commands_are_left_to_the_library(name, words):
    assert parse_short_command([name, *words.split()]) is None


@pytest.mark.parametrize("line", ["list", "show demo", "ps"])
def test_a_short_command_needs_no_parser(line):
    program = (
        "import sys; sys.argv[1:] = sys.argv[1].split(); from localllm.__main__ import main; main(); "
        "print([name for name in ('typer._adapters', 'pydantic') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, line], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_page_of_help_is_the_librarys(flag, capsys, monkeypatch):
    for columns in (79, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert invoke([flag]) == 0
        told = capsys.readouterr().out
        assert help_page([flag]) == (told if columns >= 80 else None)


def test_other_help_is_left_to_the_library():
    assert help_page(["run", "--help"]) is None
    assert help_page([]) is None


@pytest.mark.parametrize("command", ["run", "bench", "quantize"])
def test_errors_name_flags_as_they_are_typed(command):
    fields = {(o["field"], name) for name, o in read_command_table()["commands"][command]["options"].items()}
    for field in {field for field, _ in fields}:
        names = {name for other, name in fields if other == field}
        assert flag_name(field) in names or field in ("evaluation", "help"), field
