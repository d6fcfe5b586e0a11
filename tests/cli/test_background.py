"""The background server, through the command as a user types it: start, find, crash, idle time and stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress

import httpx2
import pytest

from localllm.client.background import BackgroundFiles, find_server, is_locked
from tests.cli.test_repl import Terminal

pytestmark = pytest.mark.slow  # processes that import torch

COMMAND = (sys.executable, "-m", "localllm")
GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    yield home
    if server := find_server(home):
        os.kill(server.pid, signal.SIGKILL)


@pytest.fixture
def environment(home):
    return {k: v for k, v in os.environ.items() if k not in ("LOCALLLM_HOST", "LOCALLLM_API_KEY")} | {
        "LOCALLLM_HOME": str(home)
    }


@pytest.fixture
def localllm(environment):
    def run(*words, **settings):
        return subprocess.run(
            [*COMMAND, *words],
            env=environment | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def kill(server):
    os.kill(server.pid, signal.SIGKILL)


def test_a_server_is_started_listed_and_stopped(localllm, home):
    started = localllm("serve", "--background", "demo", "--port", "0")
    assert started.returncode == 0, started.stderr
    server = find_server(home)
    assert started.stdout == server.url + "\n"
    assert f"process {server.pid}, log in {server.log}" in started.stderr
    assert os.getsid(server.pid) == server.pid
    assert "demo loaded" in server.log.read_text()
    folder = BackgroundFiles.of(home).folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}

    listed = localllm("ps")
    assert listed.stdout.splitlines()[1].startswith("demo ")
    assert f"process {server.pid}" in listed.stderr and str(server.log) in listed.stderr
    answered = localllm("run", "demo", "hi", *GREEDY, "--verbose")
    assert answered.returncode == 0 and f"using the server at {server.url}" in answered.stderr

    again = localllm("serve", "--background", "--port", "0")
    assert (again.returncode, again.stdout) == (2, "")
    assert "already" in again.stderr and "--stop" in again.stderr
    assert localllm("serve", "--stop").returncode == 0
    assert not is_locked(BackgroundFiles.of(home)) and not BackgroundFiles.of(home).record.exists()
    none = localllm("serve", "--stop")
    assert none.returncode == 7 and "no background server is running" in none.stderr


def test_run_starts_a_server_once_and_again_after_a_crash(localllm, home):
    local = localllm("run", "demo", "hi", *GREEDY, "--local")
    first = localllm("run", "demo", "hi", *GREEDY, LOCALLLM_BACKGROUND="5m")
    assert (first.returncode, first.stdout, first.stderr) == (0, local.stdout, local.stderr)
    server = find_server(home)
    second = localllm("run", "demo", "hi", *GREEDY, "--verbose", LOCALLLM_BACKGROUND="5m")
    assert second.stdout == local.stdout and second.stderr.startswith(f"using the server at {server.url} ")
    assert find_server(home) == server

    kill(server)
    wait_for(lambda: not is_locked(BackgroundFiles.of(home)))
    assert BackgroundFiles.of(home).record.exists() and find_server(home) is None
    third = localllm("run", "demo", "hi", *GREEDY, "--verbose", LOCALLLM_BACKGROUND="5m")
    assert third.stdout == local.stdout and "started a server at" in third.stderr
    assert find_server(home).pid != server.pid


def test_two_first_runs_share_a_server(environment, home):
    runs = [
        subprocess.Popen(
            [*COMMAND, "run", "demo", "hi", *GREEDY, "--verbose"],
            env=environment | {"LOCALLLM_BACKGROUND": "5m"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert results[0][0] == results[1][0] != ""
    url = find_server(home).url
    assert all(f"using the server at {url} " in err for _, err in results)
    assert sum("started a server" in err for _, err in results) == 1
    assert not BackgroundFiles.of(home).previous_log.exists()


def test_it_ends_when_idle_and_not_before(localllm, home):
    assert localllm("run", "demo", "hi", *GREEDY, LOCALLLM_BACKGROUND="8s").returncode == 0
    server = find_server(home)
    for _ in range(12):  # in this process, as another may take seconds to start
        time.sleep(1)
        httpx2.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}).raise_for_status()
    assert find_server(home) == server
    wait_for(lambda: not is_locked(BackgroundFiles.of(home)))
    assert not BackgroundFiles.of(home).record.exists()
    assert "no request for 8.00 s; shutting down" in server.log.read_text()


def test_a_conversation_survives_the_end_of_its_server(environment, home):
    settings = {name: environment[name] for name in ("LOCALLLM_HOME",)} | {"LOCALLLM_BACKGROUND": "5m"}
    chat = Terminal("run", "demo", "--plain", "--max-tokens", "6", program=COMMAND, **settings)
    with closing(chat):
        chat.see(">>> ")
        server = find_server(home)
        kill(server)
        wait_for(lambda: find_server(home) is None)
        chat.type("hello\r")
        wait_for(lambda: (found := find_server(home)) and found.pid != server.pid)
        chat.see("the answer was cut")
        chat.see(">>> ")
        chat.type("\x04")
        assert chat.leave() == 0


def test_the_error_of_the_start_and_its_exit_code_are_those_of_the_command(localllm, home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = localllm("serve", "--background", "--port", str(port))
        foreground = localllm("serve", "--port", str(port))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == foreground.stderr and f"cannot listen on port {port}" in refused.stderr
    unknown = localllm("serve", "--background", "nosuch", "--port", "0")
    assert unknown.returncode == 8 and "no model is called nosuch" in unknown.stderr
    assert not is_locked(BackgroundFiles.of(home))


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_without_a_writable_home_the_model_is_loaded_in_the_process(localllm, tmp_path, kind):
    if kind == "file":
        (tmp_path / "file").write_text("")
        home = tmp_path / "file" / "home"
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        home = tmp_path / "locked"
        home.mkdir(mode=0o500)
    done = localllm("run", "demo", "hi", *GREEDY, LOCALLLM_BACKGROUND="5m", LOCALLLM_HOME=str(home))
    assert done.returncode == 0 and done.stdout
    assert done.stderr.startswith("no background server: ") and "loading the model in this process" in done.stderr
    failed = localllm("serve", "--background", "--port", "0", LOCALLLM_HOME=str(home))
    assert failed.returncode in (1, 3) and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [("--context", "128"), ("--local",), ("--no-draft",)])
def test_flags_of_an_own_process_start_no_server(localllm, home, words):
    done = localllm("run", "demo", "hi", *GREEDY, *words, "--verbose", LOCALLLM_BACKGROUND="5m")
    assert done.returncode == 0 and done.stdout
    assert f"LOCALLLM_BACKGROUND has no effect with {words[0]}; loading the model in this process" in done.stderr
    assert not BackgroundFiles.of(home).folder.exists()


@pytest.mark.parametrize(("setting", "code"), [("off", 0), ("0", 0), ("soon", 2), ("0.5s", 2), ("-1", 2)])
def test_values_of_the_setting(localllm, home, setting, code):
    done = localllm("run", "demo", "hi", *GREEDY, LOCALLLM_BACKGROUND=setting)
    assert done.returncode == code and ("LOCALLLM_BACKGROUND is" in done.stderr) == bool(code)
    assert not BackgroundFiles.of(home).folder.exists()


def test_a_record_counts_only_with_the_lock_and_from_this_user(home):
    files = BackgroundFiles.of(home)
    files.folder.mkdir(parents=True)
    files.record.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
    files.record.chmod(0o600)
    files.lock.touch(mode=0o600)
    assert find_server(home) is None
    program = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(files.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline()
        assert find_server(home).url == "http://127.0.0.1:1"
        files.record.chmod(0o666)
        assert find_server(home) is None
        files.record.chmod(0o600)
        files.lock.chmod(0o666)
        assert find_server(home) is None
    finally:
        with suppress(OSError):
            holder.communicate(b"\n")
    files.lock.chmod(0o600)
    assert find_server(home) is None
    files.record.unlink()
