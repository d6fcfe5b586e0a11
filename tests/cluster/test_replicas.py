"""`localllm serve --replicas 2` as a user runs it: Ray on loopback, real models, real clients, processes killed.

One server is started for the file, and again by the tests that end it. Ray's start takes 15 s on an idle machine
and minutes on a busy one, so time-outs are generous; none of them is a measurement.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from localllm.plan.memory import BLOCK_SIZE
from localllm.routing import REPORT_S

pytest.importorskip("ray", reason='Ray is not installed: pip install "localllm[cluster]"')

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 600.0
MOST_PATIENT = "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"
KEY = "k" * 32
STORY = "Once upon a time, there was a little girl named Lily. She loved to play in the park with her friends. "


FAILING, SLOW = 1.875, 1.75  # temperatures of requests with which an engine fails, or takes 20 ms for a step
CHANGED_ENGINE = f"""
import importlib.abc, importlib.machinery, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "localllm.runtime.engine":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            step = module.Engine.step
            def changed_step(self):
                temperatures = {{sequence.request.params.temperature for sequence in self.scheduler.running}}
                if {FAILING} in temperatures:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                if {SLOW} in temperatures:
                    time.sleep(0.02)
                return step(self)
            module.Engine.step = changed_step
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@dataclass
class Running:
    """A front with its replicas."""

    url: str
    process: psutil.Process
    log: Path

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=120, headers={"authorization": f"Bearer {KEY}"})

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def replicas(self) -> list[psutil.Process]:
        """The processes of replicas, which Ray names by their deployment."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):
                if process.cmdline() and process.cmdline()[0].startswith("ray::ServeReplica:localllm"):
                    found.append(process)
        return found

    def state(self) -> list[dict[str, Any]]:
        with self.client() as client:
            return client.get("/localllm/ps").json()["models"]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Running]:
    """The server; its folder has the home, the keys and the logs, and changes its engines."""
    (folder / "keys").write_text(KEY + "\n")
    (folder / "sitecustomize.py").write_text(CHANGED_ENGINE)
    log = folder / f"serve{len(list(folder.glob('serve*.log')))}.log"
    command = [sys.executable, "-m", "localllm", "serve", "--port", "0", "--api-key-file", str(folder / "keys")]
    environment = os.environ | {"LOCALLLM_HOME": str(folder / "home"), "PYTHONPATH": str(folder)}
    # Ray passes by a replica that does not say at once how many requests it has, as on a busy machine.
    environment |= dict.fromkeys(("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", MOST_PATIENT), "5")
    with open(log, "w") as out:
        process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out, env=environment)
    try:
        url = wait_for(lambda: address_in(log, process), START_S)
        yield Running(url, psutil.Process(process.pid), log)
    finally:
        with suppress(psutil.NoSuchProcess):  # the test has killed it
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            _, left = psutil.wait_procs(family, 120)
            for each in left:
                each.kill()
            assert not left, f"{left} outlived the server"
            assert "Traceback" not in log.read_text() and "Ray instance" not in log.read_text()
        process.wait(120)


def address_in(log: Path, process: "subprocess.Popen[Any]") -> str | None:
    assert process.poll() is None, log.read_text()
    lines = [line for line in log.read_text().splitlines() if line.startswith("listening on ")]
    return lines[0].removeprefix("listening on ") if lines else None


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("replicas"), "demo", "--replicas", "2..3") as running:
        yield running


def complete(client: httpx2.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    return client.post("/v1/completions", json=body).raise_for_status().json()


def test_nothing_listens_beyond_loopback(server: Running) -> None:
    addresses = {}
    for process in server.family():
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    addresses[each.laddr.ip, each.laddr.port] = process.name()
    assert len(addresses) > 8  # Ray's own and the server's were found at all
    beyond = {at: name for at, name in addresses.items() if at[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")}
    assert not beyond


def test_requests_need_the_key_and_ray_its_token(server: Running) -> None:
    assert httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 401
    gcs = next(process for process in server.family() if "gcs_server" in process.name())
    port = next(each.laddr.port for each in gcs.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    code = f"import ray; ray.init('127.0.0.1:{port}', _node_ip_address='127.0.0.1')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0 and "token" in result.stderr.lower()


def test_official_clients(server: Running) -> None:
    import anthropic
    import ollama
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        pieces = list(
            client.completions.create(model="demo", prompt=STORY, max_tokens=12, temperature=0, stream=True)
        )
        whole = client.completions.create(model="demo", prompt=STORY, max_tokens=12, temperature=0)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="x")
    with anthropic.Anthropic(base_url=server.url, api_key=KEY) as claude:
        asked = [{"role": "user", "content": "Tell me a story"}]
        message = claude.messages.create(model="demo", max_tokens=8, messages=asked)
        assert 0 < message.usage.output_tokens <= 8
    with ollama.Client(server.url, headers={"authorization": f"Bearer {KEY}"}) as llama:
        parts = list(llama.generate("demo", STORY, stream=True, options={"num_predict": 8, "temperature": 0}))
        assert parts[-1].done and "".join(part.response for part in parts)
        assert [model.model for model in llama.ps().models]
    assert "status=499" not in server.log.read_text()  # which none of these streams had


def test_all_replicas_are_listed_and_measured(server: Running) -> None:
    assert {model["replica"] for model in server.state()} == {"1", "2"}
    with server.client() as client:
        text = client.get("/metrics").text
        assert client.get("/health").json()["replicas"] == 2
        assert len(client.get("/localllm/top").json()["models"]) == 2
    for replica in ("1", "2"):
        assert f'localllm_running{{replica="{replica}",model="demo"}}' in text


def test_prefix_router_finds_as_much_as_one_server(server: Running) -> None:
    """Interleaved conversations: at least 0.9 of the cached tokens that one server can find, which are all but the
    last turn's, in whole blocks."""
    chats = {number: f"Story {number}. {STORY}" for number in range(6)}
    lengths, found, possible = dict.fromkeys(chats, 0), 0, 0  # in tokens
    with server.client() as client:
        for turn in range(5):
            for number, text in chats.items():
                usage = complete(client, text)["usage"]
                if turn:
                    found += usage["prompt_tokens_details"]["cached_tokens"]
                    possible += lengths[number] // BLOCK_SIZE * BLOCK_SIZE
                lengths[number] = usage["prompt_tokens"]
                chats[number] = f"{text} Then {turn} friends came. {STORY[:60]}"
    assert found >= 0.9 * possible > 0


def stream(server: Running, lines: list[str], prompt: str) -> None:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 600,
        "temperature": SLOW,
        "stream": True,
        "ignore_eos": True,
    }
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines += (line for line in answer.iter_lines() if line)


def test_a_client_that_leaves_frees_its_blocks(server: Running) -> None:
    body = {
        "model": "demo",
        "prompt": STORY,
        "max_tokens": 600,
        "temperature": SLOW,
        "stream": True,
        "ignore_eos": True,
    }
    with server.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data:")
            wait_for(lambda: sum(model["running"] for model in server.state()) == 1, 60)
        wait_for(lambda: sum(model["running"] for model in server.state()) == 0, 60)
        text = client.get("/metrics").text  # it did not just run to its end
    cancelled = [line for line in text.splitlines() if 'finish_reason="cancelled"' in line]
    assert sum(float(line.split()[-1]) for line in cancelled) == 1


def test_a_killed_replica_ends_its_stream_with_an_error_and_nothing_else(server: Running) -> None:
    answers: list[list[str]] = [[], []]
    threads = [
        threading.Thread(target=stream, args=(server, lines, f"Number {number}. {STORY}"))
        for number, lines in enumerate(answers)
    ]
    for running, thread in enumerate(threads):  # the second begins otherwise, and finds the first replica busy
        wait_for(lambda running=running: sum(model["running"] for model in server.state()) == running, 120)
        thread.start()
    wait_for(lambda: sorted(model["running"] for model in server.state()) == [1, 1], 120)
    victim = server.replicas()[0]
    victim.send_signal(signal.SIGKILL)
    with server.client() as client:  # while one is missing
        texts = {complete(client, "Once upon a time")["choices"][0]["text"] for _ in range(20)}
    for thread in threads:
        thread.join(300)
    ends = sorted(lines[-1] for lines in answers)
    assert ends[0] == "data: [DONE]", ends
    assert "the replica has ended" in json.loads(ends[1].removeprefix("data: "))["error"]["message"]
    assert len(texts) == 1
    wait_for(lambda: len(server.state()) == 2, START_S)  # it is started again


def counter(server: Running, name: str) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_request_leaves_a_replica_that_hangs(server: Running) -> None:
    """Of two conversations, the replica that hangs has one in its cache, which is sent there first."""
    wait_for(lambda: len(server.replicas()) == len(server.state()) == 2, START_S)
    chats = [f"{name} was a girl. {STORY * 3}" for name in ("Anna", "Ben")]
    lost = counter(server, "localllm_front_lost_total")
    with server.client() as client:
        for chat in chats * 2:
            complete(client, chat)
        victim = server.replicas()[0]
        victim.send_signal(signal.SIGSTOP)
        answers = list[dict[str, Any]]()
        threads = [
            threading.Thread(target=lambda chat=chat: answers.append(complete(client, chat))) for chat in chats
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        finally:
            victim.send_signal(signal.SIGCONT)
    assert len(answers) == 2 and counter(server, "localllm_front_lost_total") == lost + 1


def test_rolling_restart_under_load_loses_no_request(server: Running) -> None:
    before = {process.pid for process in server.replicas()}
    assert len(before) == 2
    stop, statuses = threading.Event(), list[int]()

    def load() -> None:
        with server.client() as client:
            while not stop.is_set():
                body = {"model": "demo", "prompt": STORY, "max_tokens": 8, "temperature": 0}
                statuses.append(client.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.process.send_signal(signal.SIGHUP)
    try:
        wait_for(lambda: "all replicas are restarted" in server.log.read_text(), START_S)
        wait_for(
            lambda: len(server.replicas()) == 2 and before.isdisjoint(p.pid for p in server.replicas()), START_S
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert len(statuses) > 20 and set(statuses) == {200}


@pytest.mark.filterwarnings("ignore")  # of Ray's own fields
def test_a_router_with_waiting_requests_does_not_prevent_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.config import RequestRouterConfig

    from localllm.cluster import request_router

    router: Any = request_router.LocalRequestRouter.__new__(request_router.LocalRequestRouter)
    router.waiting = threading.Lock()  # cannot be pickled, as the futures of a live one
    monkeypatch.setattr(request_router, "current", router)
    path: Any = "localllm.cluster.request_router.LocalRequestRouter"
    assert RequestRouterConfig(request_router_class=path).get_serialized_request_router_cls()


def test_sigkill_of_the_front_ends_ray(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--replicas", "1") as running:
        family = running.family()
        running.process.kill()
        _, left = psutil.wait_procs(family[1:], 120)
        assert len(family) > 5 and not left


def test_a_failed_engine_is_replaced_and_without_ray_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--replicas", "2") as running:
        before = {process.pid for process in running.replicas()}
        with running.client() as client:
            body = {
                "model": "demo",
                "prompt": STORY,
                "max_tokens": 300,
                "temperature": FAILING,
                "ignore_eos": True,
            }
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 500 and "the GPU failed" in answer.text
            wait_for(lambda: len({p.pid for p in running.replicas()} - before) == 1, START_S)
            wait_for(lambda: len(running.state()) == 2, START_S)
            assert complete(client, STORY)["choices"]
        family = running.family()
        for process in family:
            if process.name() in ("gcs_server", "raylet"):
                process.kill()
        _, left = psutil.wait_procs(family[1:], 120)
        wait_for(lambda: running.process.status() == psutil.STATUS_ZOMBIE, 120)
        assert not left
        assert running.log.read_text().splitlines()[-1] == (
            "error: Ray has ended on this machine; start this server again"
        )


def localllm(folder: Path, *arguments: str) -> str:
    """Output of a command."""
    environment = os.environ | {"LOCALLLM_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "localllm", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_fronts_of_a_cluster_know_the_same_and_outlive_each_other(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    localllm(tmp_path, "cluster", "start", "--port", str(port))
    try:
        with serving(tmp_path, "demo", "--replicas", "2", "--cluster") as first:
            with serving(tmp_path, "--cluster") as second:
                assert json.loads(localllm(tmp_path, "cluster", "status", "--json"))["fronts"] == [
                    {"url": each.url, "models": ["demo"]} for each in (first, second)
                ]
                check_conversations(first, second)
                first.process.kill()
                with second.client() as client:
                    assert all(complete(client, f"{number}")["choices"] for number in range(10))
            assert "replicas continue" not in second.log.read_text()
        fronts = json.loads(localllm(tmp_path, "cluster", "status", "--json"))["fronts"]
        assert not fronts
    finally:
        localllm(tmp_path, "cluster", "stop")


def check_conversations(first: Running, second: Running) -> None:
    """A conversation whose turns go to two fronts in turn finds its beginning, and a response the one before."""
    chats = {name: f"{name} was a girl. {STORY * 2}" for name in ("Anna", "Eve", "Lily", "Mia")}
    found, possible, lengths = 0, 0, dict.fromkeys(chats, 0)
    with first.client() as one, second.client() as two:
        for turn in range(4):
            for name, text in chats.items():
                usage = complete((one, two)[turn % 2], text)["usage"]
                found += usage["prompt_tokens_details"]["cached_tokens"]
                possible += lengths[name] // BLOCK_SIZE * BLOCK_SIZE
                lengths[name] = usage["prompt_tokens"]
                chats[name] = f"{text} Then {turn} friends came. {STORY[:60]}"
            time.sleep(3 * REPORT_S)  # as a person reads the answer
        for _ in range(3):
            body = {"model": "demo", "input": STORY, "max_output_tokens": 4}
            response = one.post("/v1/responses", json=body).raise_for_status().json()
            body["previous_response_id"] = response["id"]
            two.post("/v1/responses", json=body).raise_for_status()
    assert found >= 0.75 * possible > 0  # a report may come late on a busy machine


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", "--replicas", "2"]
    environment = os.environ | {"LOCALLLM_HOME": str(tmp_path)}
    command += ["--context", "999999999"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    error = result.stderr.strip().splitlines()[-1]
    assert result.returncode not in (0, 1) and error.startswith("error: ") and "Traceback" not in result.stderr
