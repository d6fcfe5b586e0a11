"""`localllm run`, `ps` and `stop` with a running server, each as a process: the same text, exit codes and streams
as without one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.cli.test_repl import Terminal
from tests.parallel.test_workers import running_worker

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # twenty processes, half of which import torch

GREEDY = ("--temperature", "0", "--max-tokens", "12")
LONG = ("Once upon a time", "--raw", "--ignore-eos", "--max-tokens", "900", "--temperature", "0")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def serve(home):
    """Start a server; return its process and URL."""
    started = []

    def start(*words):
        command = [sys.executable, "-m", "localllm", "serve", *words, "--port", "0"]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"LOCALLLM_HOME": str(home)}
        )
        started.append(process)
        return process, process.stderr.readline().removeprefix("listening on ").strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def url(serve):
    """URL of a server that has loaded demo."""
    return serve("demo", "--log-format", "off")[1]


@pytest.fixture
def localllm(url, home):
    """Run the program in the environment of a user with the running server."""

    def run(*words, host=url, **options):
        environment = os.environ | {"LOCALLLM_HOST": host, "LOCALLLM_HOME": str(home)}
        command = [sys.executable, "-m", "localllm", *words]
        given = {} if "input" in options else {"stdin": subprocess.DEVNULL}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, **given, **options
        )

    return run


def running(url):
    return sum(model["running"] for model in httpx2.get(f"{url}/localllm/ps").json()["models"])


def gone(url):
    end = time.monotonic() + 60
    while running(url):
        assert time.monotonic() < end, "the answer goes on"
        time.sleep(0.02)


def test_a_server_gives_the_same_answer_and_is_named_by_verbose(localllm, url):
    served = localllm("run", "demo", "Tell me a story", *GREEDY, "--verbose")
    local = localllm("run", "demo", "Tell me a story", *GREEDY, "--local", "--verbose")
    assert served.stdout == local.stdout != ""
    assert served.returncode == local.returncode == 0
    first, *rest = served.stderr.splitlines()
    assert first.startswith(f"using the server at {url} (localllm ") and "demo on cpu" in first
    assert local.stderr.startswith("device ")
    measured = {"load", "queue", "prefill", "TTFT", "ITL", "TPOT", "TPS", "E2E", "peak", "seed"}
    assert measured <= {line.split()[0] for line in rest}
    assert (
        localllm("run", "demo", "Tell me a story", *GREEDY).stderr
        == localllm("run", "demo", "Tell me a story", *GREEDY, "--local").stderr
    )


def test_it_imports_neither_torch_nor_the_flag_parser(url, home):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "localllm", "run", "demo", "Hello", *GREEDY],
        cwd=ROOT,
        env=os.environ | {"LOCALLLM_HOST": url, "LOCALLLM_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "localllm.client.model" in imported
    slow = {"torch", "typer", "pydantic", "huggingface_hub", "rich", "http.client", "ssl", "localllm.llm.llm"}
    slow |= {"textual", "localllm.tui.machine", "_hashlib", "encodings.idna"}
    assert not imported & slow


def test_the_json_object_and_the_receipt_are_the_same(localllm, tmp_path):
    asked = ("run", "demo", "Hello", *GREEDY, "--seed", "5", "--json", "--logprobs", "2", "--prompt-logprobs", "1")
    served, local = (json.loads(localllm(*asked, *more).stdout) for more in ((), ("--local",)))
    assert served.keys() == local.keys() and served["metrics"].keys() == local["metrics"].keys()
    for found in (served, local):
        del found["metrics"]
        del found["receipt"]["kernels"], found["receipt"]["setup"]["threads"]
    assert served == local
    paper = tmp_path / "paper.json"
    assert localllm("run", "demo", "Hello", *GREEDY, "--receipt", str(paper)).returncode == 0
    assert localllm("replay", str(paper)).returncode == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--fail-on-length",), 6),
        (("--regex", "(?=a)"), 2),
        (("--template-arg", "wings=2"), 2),
    ],
)
def test_codes_and_errors_are_the_same(localllm, words, code):
    served = localllm("run", "demo", "Say it", *GREEDY, *words)
    local = localllm("run", "demo", "Say it", *GREEDY, *words, "--local")
    assert (served.returncode, served.stdout, served.stderr) == (local.returncode, local.stdout, local.stderr)
    assert served.returncode == code


def test_a_prompt_that_is_piped_in_is_too_long_for_both(localllm):
    served, local = (localllm("run", "demo", "Sum up", *more, input="word " * 3000) for more in ((), ("--local",)))
    assert (served.returncode, served.stderr) == (local.returncode, local.stderr)
    assert served.returncode == 4


def test_flags_of_loading_load_the_model_locally(localllm, url):
    done = localllm("run", "demo", "Hello", *GREEDY, "--context", "128", "--verbose")
    assert done.returncode == 0 and "server" not in done.stderr
    refused = localllm("run", "demo", "Hello", "--context", "128", "--server", url)
    assert refused.returncode == 2 and "--context loads the model in this process" in refused.stderr


@contextmanager
def long_answer(url, home):
    """A process whose answer has begun."""
    with subprocess.Popen(
        [sys.executable, "-m", "localllm", "run", "demo", *LONG],
        cwd=ROOT,
        env=os.environ | {"LOCALLLM_HOST": url, "LOCALLLM_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout.read(1)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_answer_at_the_server(url, home, number):
    with long_answer(url, home) as process:
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -number)
        assert process.stderr.read() == b""
    gone(url)


def test_a_closed_pipe_cancels_the_answer_at_the_server(url, home):
    with long_answer(url, home) as process:
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
    gone(url)


def test_without_a_server_the_model_is_loaded_locally(localllm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    done = localllm("run", "demo", "Hello", *GREEDY, host=free)
    assert done.returncode == 0 and done.stdout and not done.stderr
    done = localllm("run", "demo", "Hello", *GREEDY, "--verbose", host=free)
    assert "loading the model in this process" in done.stderr
    for words in (("ps",), ("stop", "demo"), ("run", "demo", "Hello", "--server", free)):
        failed = localllm(*words, host=free)
        assert (failed.returncode, failed.stdout) == (7, "")
        assert failed.stderr.startswith(f"error: cannot reach a localllm server at http://{free} (")


def test_a_server_of_another_kind_is_not_asked(localllm):
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        try:
            host = f"127.0.0.1:{other.stdout.readline().split()[5]}"
            done = localllm("run", "demo", "Hello", *GREEDY, "--verbose", host=host)
            assert done.returncode == 0 and done.stdout
            assert f"the server at http://{host} is not localllm" in done.stderr
            assert localllm("ps", host=host).returncode == 7
        finally:
            other.kill()


def test_models_are_listed_loaded_on_demand_and_stopped(localllm, serve):
    process, url = serve("--keep-alive", "1m", "--max-models", "1", "--log-format", "json")
    header, *rows = localllm("ps", host=url).stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL", "RUNNING", "WAITING", "KV"]
    assert rows == []
    assert localllm("stop", "demo", host=url).returncode == 8
    done = localllm("run", "demo", "Hello", *GREEDY, "--server", url, "--verbose")
    assert done.returncode == 0 and done.stderr.startswith("using the server at ")
    [row] = localllm("ps", host=url).stdout.splitlines()[1:]
    assert row.split()[0] == "demo" and " in " in row
    state = json.loads(localllm("ps", "--json", host=url).stdout)
    assert [model["name"] for model in state["models"]] == ["demo"]
    assert 0 < state["models"][0]["until"] - time.time() <= 60
    stopped = localllm("stop", "demo", host=url)
    assert (stopped.returncode, stopped.stderr) == (0, "demo is unloaded\n")
    state = json.loads(localllm("ps", "--json", host=url).stdout)
    assert state["models"] == []
    assert [event["what"] for event in state["events"]] == ["loaded", "unloaded"]
    process.terminate()
    assert process.wait(60) == 0
    logged = [json.loads(line) for line in process.stderr]
    assert {line["event"] for line in logged} == {"request", "loaded", "unloaded"}


@pytest.mark.parametrize(
    "words", [("--keep-alive", "soon"), ("--max-models", "0"), ("demo", "demo"), ("--log-format", "xml")]
)
def test_serve_reports_errors_before_it_listens(localllm, words):
    done = localllm("serve", *words, "--port", "0")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "listening" not in done.stderr


def test_prompts_are_computed_by_another_process(localllm, serve):
    process, url = serve("demo", "--prefill", "1", "--decode", "1", "--force", "--device", "cpu")
    prompt = "Once upon a time there was a fox. " * 40
    done = localllm("run", "demo", prompt, *GREEDY, "--server", url)
    assert done.returncode == 0 and done.stdout.strip()
    metrics = httpx2.get(f"{url}/metrics").text
    [moved] = re.findall(r"^localllm_kv_prefill_to_decode_bytes_total.* (\S+)$", metrics, re.MULTILINE)
    assert float(moved) > 1e5
    counts = re.findall(r"^localllm_prefill_processes(?:_wanted)?{.* (\S+)$", metrics, re.MULTILINE)
    assert counts == ["1.0", "1.0"]
    process.terminate()
    assert process.wait(60) == 0


def test_prompts_are_computed_by_a_worker(localllm, serve, tmp_path):
    with running_worker(tmp_path, host="127.0.0.2") as (address, token, worker):
        flags = ("--prefill", address, "--token-file", str(token), "--force", "--device", "cpu")
        process, url = serve("demo", *flags)
        for _ in range(2):  # with the worker, then without it
            prompt = "Once upon a time there was a fox. " * 40
            done = localllm("run", "demo", prompt, *GREEDY, "--server", url)
            assert done.returncode == 0 and done.stdout.strip()
            metrics = httpx2.get(f"{url}/metrics").text
            for name in ("kv_prefill_to_decode", "kv_worker_to_host"):
                [moved] = re.findall(rf"^localllm_{name}_bytes_total.* (\S+)$", metrics, re.MULTILINE)
                assert float(moved) > 1e5
            worker.kill()
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("words", [["ps"], ["stop", "demo"]])
def test_another_server_version_is_reported(words, localllm):
    body = b'{"server": "localllm", "models": [{}], "loading": []}'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as other:
                other.recv(2**16)
                other.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        threading.Thread(target=answer, daemon=True).start()
        done = localllm(*words, host=f"127.0.0.1:{listener.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is another version of localllm; update the older" in done.stderr


def test_a_conversation_names_its_server(url):
    chat = Terminal("run", "demo", "--plain", program=(sys.executable, "-m", "localllm"), LOCALLLM_HOST=url)
    with closing(chat):
        chat.see(f"at {url}")
        chat.see(">>> ")
        chat.type("\x04")
        assert chat.leave() == 0
