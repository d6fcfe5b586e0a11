"""The program as a process: pipes, streams, signals and start-up."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import LAUNCHER


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["--version"], ["list"], ["show", "qwen3:4b"]]
)
def test_commands_without_a_model_do_not_import_torch(arguments):
    check = (
        "import sys; from localllm.cli.app import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'prompt_toolkit'} & set(sys.modules);"
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", check, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    after = os.times()
    assert after.children_user - before.children_user < 5  # 0.4 s on two idle cores


def test_ctrl_c_while_the_program_is_being_read_is_no_error():
    check = """
import sys
from localllm.__main__ import main

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "localllm.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_broken_pipe_ends_well(model):
    command = f"{sys.executable} {LAUNCHER} run {model} lines | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], input=b"", capture_output=True, timeout=200)
    assert done.stdout == b"a line\n0\n"
    assert done.stderr == b""


def test_a_reader_that_never_reads_ends_well_too(model):
    command = f"{sys.executable} {LAUNCHER} list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], input=b"", capture_output=True, timeout=200)
    assert (done.stdout, done.stderr) == (b"0\n", b"")


def test_a_closed_stdin_is_an_empty_one(model):
    run = f"{sys.executable} {LAUNCHER} run {model}"
    command = f"{run} hello <&-; {run} <&-; echo $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=200)
    assert done.stdout == b"1:hello2\n"
    assert done.stderr.startswith(b"error: the prompt is empty")


def test_a_closed_stdout_is_an_error_with_a_remedy(model):
    command = f"{sys.executable} {LAUNCHER} run {model} hello >&-"
    done = subprocess.run(["bash", "-c", command], input=b"", capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (
        2,
        b"error: stdout is closed; send the answer to a file or to /dev/null\n",
    )


def test_a_closed_stderr_does_not_disturb_the_answer(base):
    command = f"{sys.executable} {LAUNCHER} run {base} hello --verbose 2>&-"
    done = subprocess.run(["bash", "-c", command], input=b"", capture_output=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, b"raw:hello")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line(program, model):
    with open("/dev/full", "wb") as full:
        done = program("run", model, "hello", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"no space left" in done.stderr


def test_text_is_utf8_in_any_locale(program, model):
    done = program("run", model, input="grüße 🦊".encode(), env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.stdout.decode() == "1:grüße 🦊"


def test_control_characters_reach_a_pipe_untouched(program, model):
    assert program("run", model, "escape").stdout == "\x1b[31mred\x07 \x9b1m".encode()


@pytest.mark.slow
def test_ctrl_c_leaves_no_half_json(model, tmp_path):
    command = [sys.executable, LAUNCHER, "run", model, "slowly " * 500, "--json"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    begun = tmp_path / "begun"
    environment = os.environ | {"FAKE_ENGINE_BEGUN": str(begun)}
    with subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as process:
        while not begun.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("words", [[], ["show"], ["run"]])
def test_help_is_a_word_as_well_as_a_flag(words):
    by_word, by_flag = (
        subprocess.run([sys.executable, "-m", "localllm", *line], capture_output=True, text=True, timeout=200)
        for line in (["help", *words], [*words, "--help"])
    )
    assert (by_word.returncode, by_word.stdout) == (0, by_flag.stdout)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["rnu", "demo"], "there is no command rnu; did you mean run? see `localllm --help`"),
        (["help", "rnu"], "there is no command rnu; did you mean run? see `localllm --help`"),
        (["zzz"], "there is no command zzz; see `localllm --help`"),
        (["list", "--al"], "there is no option --al; did you mean --all, --help? see `localllm list --help`"),
        (["list", "one", "two"], "unexpected argument: one two; see `localllm list --help`"),
        (
            ["serve", "--port", "65536"],
            "invalid value for '--port': give at most 65535; see `localllm serve --help`",
        ),
        (
            ["run", "dmeo", "hi"],
            "no model is called dmeo; did you mean demo? `localllm list --all` shows the names",
        ),
    ],
)
def test_misspelt_words_are_errors_with_a_suggestion(real, line, message):
    assert real(*line) == (2 if line[0] != "run" else 8, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--stop-id", "-1"], "--stop-id and --logit-bias name the token -1"),
        (["--logit-bias", "x"], "--logit-bias 'x' is not ID=BIAS"),
        (["--top-p", "3"], "--top-p is 3.0"),
    ],
)
def test_errors_of_sampling_name_flags(real, flags, start):
    code, _, err = real("run", "demo", "hi", *flags)
    assert (code, err.startswith(f"error: {start}")) == (2, True), err
