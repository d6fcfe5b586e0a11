"""Signals, closed streams and job control."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from localllm.cli import exits
from tests.cli.conftest import LAUNCHER
from tests.cli.test_repl import CTRL_C, Terminal

SLOWLY = "slowly " * 500
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTRL_Z = "\x1a"
RUN = f"{shlex.quote(sys.executable)} {shlex.quote(str(LAUNCHER))} run"


@contextmanager
def under_way(*arguments, **options):
    """Start the program, and wait until its answer begins."""
    command = [sys.executable, LAUNCHER, "run", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.read(4) == b"1:sl"
        yield process


def in_bash(command, **options):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, **options)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_the_program_silently_and_keeps_the_output(model, number):
    """Without a terminal, Ctrl-C causes an exit code, since there is no interactive loop to end."""
    with under_way(model, SLOWLY, start_new_session=True) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (130 if number == signal.SIGINT else -number, b"")
    assert len(out) < 3000


@pytest.mark.slow
def test_shells_see_128_and_the_number(model):
    command = f"{RUN} {model} '{SLOWLY}' > /dev/null & sleep 1.5; kill $!; wait $!; echo $?"
    assert in_bash(command, stdin=subprocess.DEVNULL).stdout == "143\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up_and_a_second_one_kills_at_once(number):
    """Runs in its own process, which the signal kills."""
    check = f"""
import os, time
from localllm.cli.exits import run_with_exit_code

def act():
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(1000)
    finally:
        print("put away", flush=True)
        os.kill(os.getpid(), {int(number)})
        time.sleep(1000)

run_with_exit_code(act)
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "put away\n", "")


def test_a_second_ctrl_c_ends_what_the_first_waits_for():
    check = """
import os, signal, time
from localllm.cli.exits import run_with_exit_code

def act():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)

run_with_exit_code(act)
"""
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_handlers_are_those_of_before_when_a_command_has_ended():
    before = [signal.getsignal(number) for number in exits.TERMINATION_SIGNALS]
    assert exits.run_with_exit_code(lambda: 5) == 5
    assert [signal.getsignal(number) for number in exits.TERMINATION_SIGNALS] == before


def test_nohup_lets_the_answer_go_on(model):
    nohup = subprocess.Popen(
        ["nohup", sys.executable, LAUNCHER, "run", model, "slowly " * 3],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with nohup as process:
        assert process.stdout.read(4) == b"1:sl"
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, b"owly slowly slowly ", b"")


@pytest.mark.slow
def test_time_spent_stopped_counts_as_a_gap(model):
    """The gap is reported, since the user did wait that long for the token."""
    # A group of its own, whose parent is in the same session: others ignore SIGTSTP.
    with under_way(model, "slowly " * 9, "--verbose", process_group=0) as process:
        process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, ("1:" + "slowly " * 9).encode()[4:])
    e2e_s = float(re.search(r"^E2E +([\d.]+) s$", err.decode(), re.MULTILINE)[1])
    assert e2e_s >= 1.5 + 64 * 0.02 - 0.01  # one wait for a token may pass while it is stopped


def test_ctrl_c_in_a_terminal_ends_the_loop_of_a_script(model):
    """After exit code 130, bash would continue with the next iteration."""
    script = f"for round in 1 2 3; do {RUN} {model} '{SLOWLY}'; done; echo went on"
    shell = Terminal("-c", script, program=("/bin/bash",))
    try:
        shell.see("1:sl")
        shell.type(CTRL_C)
        assert shell.leave() == -signal.SIGINT
    finally:
        shell.close()


@pytest.mark.slow
def test_jobs_of_a_shell(model):
    """Ctrl-Z stops the program and fg resumes it, a background job needs no terminal, and Ctrl-C ends a loop."""
    shell = Terminal("--norc", "--noprofile", "-i", program=("/bin/bash",), HISTFILE="")
    try:
        shell.type(f"PS1='> '; stty -echo; run() {{ {RUN} {model} \"$@\"; }}; echo rea''dy\r")
        shell.see("ready\n")
        shell.type(f"{RUN} {model} '{'slowly ' * 9}'\r")
        shell.see("1:sl")
        shell.type(CTRL_Z)
        shell.see("Stopped")
        shell.type("echo code=$?\r")
        shell.see("code=148\n")
        shell.type("fg; echo code=$?\r")
        shell.see("owly")
        shell.see("code=0\n")
        shell.type(f"{RUN} {model} background & wait $!; echo code=$?\r")
        assert "1:background" in shell.see("code=0\n")
        shell.type(f"{RUN} {model} '{SLOWLY}' &\r")
        shell.see("1:sl")
        shell.type("kill -INT $!; wait $!; jobs\r")
        shell.see("Exit 130")  # nobody typed Ctrl-C: it would be "Interrupt" if it had died of the signal
        shell.type(f"for i in 1 2 3; do run '{SLOWLY}'; done; echo code=$?\r")
        shell.see("1:sl")
        shell.type(CTRL_C)
        shell.type("echo code=$?\r")
        shell.see("code=130\n")
        shell.type("exit\r")
        assert shell.leave() == 130 or shell.process.returncode == 0
    finally:
        shell.close()


@pytest.mark.quick_every(5)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", ["--version", "list", "completion bash", "run --help"])
def test_a_full_disk_is_one_line_for_every_command(arguments):
    done = in_bash(f"{shlex.quote(sys.executable)} {LAUNCHER} {arguments} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no space left on device") and done.stderr.count("\n") == 1


def test_a_full_disk_under_stderr_does_not_disturb_the_answer(base):
    done = in_bash(f"{RUN} {base} hello --verbose 2> /dev/full", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "raw:hello")


def test_all_three_streams_may_be_closed(model, tmp_path):
    paper = tmp_path / "receipt.json"
    done = in_bash(f"{RUN} {model} hello <&- >&- 2>&-; echo $?")
    assert done.stdout == "2\n"
    done = in_bash(f"{RUN} {model} hello --receipt {paper} <&- > /dev/null 2>&-; echo $?")
    assert (done.stdout, json.loads(paper.read_text())["answer"]["text"]) == ("0\n", "1:hello")


@pytest.mark.slow
def test_a_reader_that_is_gone_before_the_model_is_loaded_is_no_error():
    program = f"{shlex.quote(sys.executable)} -m localllm"
    done = in_bash(f"{program} run demo hi --local --max-tokens 9 < /dev/null | true; echo ${{PIPESTATUS[@]}}")
    assert (done.stdout, done.stderr) == ("0 0\n", "")
    done = in_bash(f'{program} run demo hi --local < /dev/null | head -c 5; echo " ${{PIPESTATUS[@]}}"')
    assert (done.stdout, done.stderr) == ("Hello 0 0\n", "")
