"""The front with replicas in this process: retries, errors of streams, cancelling, merged answers. Without Ray."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
import torch
from starlette.types import Message, Receive, Scope, Send

from localllm.api.events import error_to_json
from localllm.cluster import ray_node, service
from localllm.cluster.forwarded import MAX_PIECES, PIECE, ForwardedRequest, bound_name, prefix_names, read_request
from localllm.cluster.front import BODY, START, Failures, ReplicaAnswer, create_front, merge_metrics, no_replica
from localllm.cluster.ray_node import FrontEntry
from localllm.cluster.replica import Replica
from localllm.errors import EngineFailed, LocalLLMError, ReplicaLost, UsageError
from localllm.request import PREFIX_NAMES
from localllm.routing import Router
from localllm.runtime.kv_cache.prefix_journal import PrefixJournal
from localllm.server.access import make_access_policy

SSE, NDJSON = b"text/event-stream", b"application/x-ndjson"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def answering(*chunks: bytes, kind: bytes = SSE, status: int = 200, wait: asyncio.Event | None = None) -> App:
    """An application that sends these chunks, and then waits or ends."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": START, "status": status, "headers": [(b"content-type", kind)]})
        for chunk in chunks:
            await send({"type": BODY, "body": chunk, "more_body": True})
        if wait:
            while (await receive())["type"] != "http.disconnect":
                pass
            wait.set()
        await send({"type": BODY, "body": b"", "more_body": False})

    return app


class LocalFleet:
    """Replicas of applications in this process; some end after a number of messages, as if they were killed."""

    def __init__(
        self, *apps: App, lost_after: dict[int, int] | None = None, replicas: Sequence[Replica] | None = None
    ):
        """replicas: of another front"""
        self.replicas = replicas or [self.make(index, app) for index, app in enumerate(apps)]
        self.cursors: dict[str, int] = {}
        self.lost_after = lost_after or {}
        self.router = Router[str]("prefix")
        self.forwarded: list[str] = []

    def make(self, index: int, app: App) -> Replica:
        replica = Replica.__new__(Replica)
        replica.app, replica.id, replica.number = app, f"id{index}", str(index + 1)  # type: ignore[assignment]
        replica.bound, replica.pool = PrefixJournal(), SimpleNamespace(loaded={})  # type: ignore[assignment]
        return replica

    async def answer(self, forwarded: ForwardedRequest) -> AsyncGenerator[Message]:
        loads = {replica.id: 0 for replica in self.replicas if replica.id not in forwarded.avoid}
        name = self.router.rank(forwarded.names, loads, is_bound=forwarded.is_bound)[0]
        self.router.sent(forwarded.names, name)
        self.forwarded.append(name)
        index, count = int(name[2:]), 0
        async with aclosing(self.replicas[index].answer(forwarded)) as batches:
            async for batch in batches:
                for message in batch:
                    if count == self.lost_after.get(index):
                        raise ReplicaLost("the replica has ended", "send the request again")
                    count += 1
                    yield message

    async def ask_all(self, forwarded: ForwardedRequest) -> list[ReplicaAnswer]:
        return [await replica.respond(forwarded) for replica in self.replicas]

    def bind(self, name: bytes, replica: str) -> None:
        self.router.add_owner([name], replica)

    def knows(self, name: bytes) -> bool:
        return bool(self.router.owners.get(name))

    async def learn(self) -> None:
        for replica in self.replicas:
            report = await replica.report(self.cursors)
            self.cursors[report.id] = report.cursor
            self.router.learn(report.id, report.held, report.evicted)


def post(fleet: LocalFleet, path: str, body: Any, **headers: str) -> httpx2.Response:
    return ask(fleet, "POST", path, json=body, headers=headers)


def ask(fleet: LocalFleet, method: str, path: str, **rest: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(create_front(fleet, make_access_policy("127.0.0.1")))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **rest)

    return asyncio.run(send())


CHUNK = b'data: {"n":1}\n\n'


def test_a_stream_passes_unchanged() -> None:
    fleet = LocalFleet(answering(CHUNK, CHUNK, b"data: [DONE]\n\n"))
    answer = post(fleet, "/v1/completions", {"prompt": "x"})
    assert answer.content == CHUNK * 2 + b"data: [DONE]\n\n"
    assert answer.headers["content-type"] == SSE.decode()


@pytest.mark.parametrize("lost_after", [0, 1, 2])
def test_what_has_sent_nothing_is_asked_again_elsewhere(lost_after: int) -> None:
    fleet = LocalFleet(answering(CHUNK), answering(CHUNK), lost_after={0: lost_after})
    answer = post(fleet, "/v1/completions", {"prompt": "x"})
    assert answer.status_code == 200 and answer.content == CHUNK
    assert fleet.forwarded == ["id0", "id1"] if lost_after else fleet.forwarded[-1] == "id1"


def test_what_is_no_stream_is_asked_again_whatever_the_replica_sent() -> None:
    app = answering(b'{"a":', b"1}", kind=b"application/json")
    fleet = LocalFleet(app, app, lost_after={0: 4})
    answer = post(fleet, "/v1/completions", {"prompt": "x"})
    assert answer.json() == {"a": 1} and fleet.forwarded == ["id0", "id1"]


def test_without_another_replica_the_status_says_so() -> None:
    fleet = LocalFleet(*[answering(CHUNK)] * 4, lost_after=dict.fromkeys(range(4), 1))
    answer = post(fleet, "/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503 and "the replica has ended" in answer.json()["error"]["message"]
    assert fleet.forwarded == ["id0", "id1", "id2"]


@pytest.mark.parametrize(
    ("path", "kind", "chunk", "last"),
    [
        ("/v1/completions", SSE, CHUNK, {"error": {"type": "api_error"}}),
        ("/v1/chat/completions", SSE, CHUNK, {"error": {"type": "api_error"}}),
        ("/v1/messages", SSE, CHUNK, {"type": "error", "error": {}}),
        ("/v1/responses", SSE, b'data: {"sequence_number":7}\n\n', {"type": "error", "sequence_number": 8}),
        ("/api/chat", NDJSON, b'{"message":{}}\n', {"error": ""}),
        ("/api/generate", NDJSON, b'{"response":""}\n', {"error": ""}),
        ("/localllm/answer", NDJSON, b'{"kind":"content"}\n', {"error": {}}),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error_of_its_api(
    path: str, kind: bytes, chunk: bytes, last: dict[str, Any]
) -> None:
    fleet = LocalFleet(*[answering(chunk, chunk, chunk, kind=kind)] * 2, lost_after={0: 4})
    answer = post(fleet, path, {"prompt": "x"})
    assert fleet.forwarded == ["id0"] and answer.content.startswith(chunk * 2)
    line = answer.content.removeprefix(chunk * 2).decode().strip().splitlines()[-1].removeprefix("data: ")
    error = json.loads(line)
    assert last.keys() <= error.keys() and "the replica has ended" in line
    assert b"DONE" not in answer.content
    assert error.get("sequence_number") == last.get("sequence_number")


def test_an_application_that_ends_in_the_middle_is_an_error() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": START, "status": 200, "headers": [(b"content-type", SSE)]})
        await send({"type": BODY, "body": CHUNK, "more_body": True})
        raise ValueError

    answer = post(LocalFleet(broken), "/v1/completions", {"prompt": "x"})
    assert answer.content.startswith(CHUNK) and b"did not complete" in answer.content


def test_a_client_that_leaves_is_seen_by_the_replica() -> None:
    async def run() -> None:
        left = asyncio.Event()
        front = create_front(LocalFleet(answering(CHUNK, wait=left)), make_access_policy("127.0.0.1"))
        sent: asyncio.Queue[Message] = asyncio.Queue()
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
        scope = httpx_scope("/v1/completions")
        task = asyncio.create_task(front(scope, incoming.get, sent.put))
        assert (await sent.get())["type"] == START and (await sent.get())["body"] == CHUNK
        incoming.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(60):
            await left.wait()
            await asyncio.wait([task])

    asyncio.run(run())


def httpx_scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"2")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }


def test_keys_are_checked_at_the_front() -> None:
    async def send(key: str) -> tuple[int, list[str]]:
        fleet = LocalFleet(answering(CHUNK))
        policy = make_access_policy("127.0.0.1", ["a" * 32])
        transport = httpx2.ASGITransport(create_front(fleet, policy))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json={}, headers=headers)
            return answer.status_code, fleet.forwarded

    assert asyncio.run(send("a" * 32)) == (200, ["id0"])
    assert asyncio.run(send("b" * 32)) == (401, [])


def test_uploads_are_refused() -> None:
    answer = ask(LocalFleet(answering(CHUNK)), "POST", "/api/blobs/sha256:00", content=b"x")
    assert answer.status_code == 501 and "--replicas" in answer.json()["error"]


def test_a_conversation_by_response_id_stays_where_the_response_is() -> None:
    body = b'{"id": "resp_0a1b", "object": "response"}'
    fleet = LocalFleet(*[answering(body, kind=b"application/json")] * 3)
    post(fleet, "/v1/responses", {"input": "x"})
    [first] = fleet.forwarded
    for _ in range(4):
        post(fleet, "/v1/responses", {"input": "y", "previous_response_id": "resp_0a1b"})
        ask(fleet, "GET", "/v1/responses/resp_0a1b")
    assert set(fleet.forwarded) == {first} and len(fleet.forwarded) == 9


def test_a_second_front_learns_where_a_response_and_a_slot_are() -> None:
    body = b'{"id": "resp_0a1b", "object": "response"}'
    first = LocalFleet(*[answering(body, kind=b"application/json")] * 3)
    post(first, "/completion", {"prompt": "x"})
    post(first, "/completion", {"prompt": "x", "id_slot": 5})
    post(first, "/v1/responses", {"input": "x"})
    assert first.forwarded == ["id0", "id1", "id2"]
    for path, fields, home in (
        ("/v1/responses", {"input": "y", "previous_response_id": "resp_0a1b"}, "id2"),
        ("/completion", {"prompt": "y", "id_slot": 5}, "id1"),
    ):
        second = LocalFleet(replicas=first.replicas)
        post(second, path, fields)
        assert second.forwarded == [home]


def test_a_second_front_learns_which_prompts_are_cached_and_which_are_evicted() -> None:
    numbers, journals = itertools.count(), [PrefixJournal(), PrefixJournal()]

    def caching(journal: PrefixJournal) -> App:
        """An application in whose prefix cache each prompt takes ten blocks."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            journal.record(PREFIX_NAMES.get().names, [next(numbers) for _ in range(10)])
            await answering(CHUNK)(scope, receive, send)

        return app

    first = LocalFleet(*map(caching, journals))
    for replica, journal in zip(first.replicas, journals, strict=True):
        replica.journals = lambda journal=journal: [journal]  # type: ignore[method-assign]
    chats = [{"prompt": name * PIECE * 3} for name in "abcd"]
    for chat in chats:
        post(first, "/v1/completions", chat)
    assert first.forwarded == ["id0", "id1", "id0", "id1"]
    second = LocalFleet(replicas=first.replicas)
    asyncio.run(second.learn())
    for chat in reversed(chats):
        post(second, "/v1/completions", chat)
    assert second.forwarded == ["id1", "id0", "id1", "id0"]
    journals[0].dropped(5)  # the block in the middle of the first prompt
    for fleet in (first, second):
        asyncio.run(fleet.learn())
        evicted = [(name, "id0") in fleet.router.evicted for name in prefix_names(chats[0], "")]
        assert evicted == [False, True, True]


def test_replicas_that_fail_are_avoided_for_a_while() -> None:
    now = [0.0]
    failures = Failures(lambda: now[0])
    for _ in range(3):
        assert failures.avoided() == set()
        failures.record("a", failed=True)
    failures.record("b", failed=True)
    assert failures.avoided() == {"a"}
    now[0] = 31.0
    assert failures.avoided() == set()
    failures.record("a", failed=True)
    assert failures.avoided() == {"a"}
    now[0] = 62.0
    failures.record("a", failed=False)
    failures.record("a", failed=True)
    assert failures.avoided() == set()


@pytest.mark.parametrize(
    ("path", "answers", "merged"),
    [
        ("/health", [{"loading": [], "models": ["m"]}] * 2, {"models": ["m"], "replicas": 2}),
        ("/localllm/ps", [{"loading": [], "models": [{"a": 1}]}], {"models": [{"a": 1, "replica": "1"}]}),
        ("/localllm/stop", [{"users": 1}, {"users": 2}], {"users": 3}),
        ("/localllm/ps", [], error_to_json(no_replica())),
        ("/localllm/ps", [None, None], {"error": "broken"}),
    ],
)
def test_the_state_is_that_of_all_replicas(path: str, answers: list[Any], merged: dict[str, Any]) -> None:
    """answers: of each; None if it fails"""

    def make(answer: Any) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = json.dumps({"error": "broken"} if answer is None else answer).encode()
            await send({"type": START, "status": 200 if answer else 500, "headers": []})
            await asyncio.sleep(0.01)  # so that the end travels alone
            await send({"type": BODY, "body": body})

        return app

    fleet = LocalFleet(*map(make, answers))
    answer = ask(fleet, "POST" if path.endswith("stop") else "GET", path)
    assert answer.status_code == (503 if not answers else 500 if None in answers else 200)
    assert answer.json().items() >= merged.items() and not fleet.forwarded


def test_a_replica_closes_its_port_and_fails_its_check_with_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    context = SimpleNamespace(rank=SimpleNamespace(rank=1), replica_id=SimpleNamespace(unique_id="id7"))
    ray = SimpleNamespace(serve=SimpleNamespace(get_replica_context=lambda: context))
    ports = SimpleNamespace(add_port_to_grpc_server=pytest.fail)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve._private.replica", ports)
    loaded = Mock(has_failed=False)
    monkeypatch.setattr(logging.getLogger("localllm.requests"), "level", logging.INFO)  # which is set
    setup: Any = Mock(build=lambda: ("app", Mock(loaded={"demo": loaded})))
    replica = Replica(setup, 1)
    assert (replica.app, replica.id, replica.number, replica.journals()) == ("app", "id7", "2", [])
    assert ports.add_port_to_grpc_server("server", "0.0.0.0:1") == 0
    replica.check_health()
    loaded.has_failed = True
    with pytest.raises(EngineFailed, match="the engine of a model has failed; Ray starts the replica again"):
        replica.check_health()
    del ports.add_port_to_grpc_server
    with pytest.raises(LocalLLMError, match=r'opens its ports in another way; install "localllm\[cluster\]"'):
        Replica(setup, 1)


def test_metrics_get_a_label_and_stay_grouped() -> None:
    def text(value: int) -> bytes:
        return (
            f'# HELP a_total A.\n# TYPE a_total counter\na_total{{model="x,y}}"}} {value}.0\n'
            f"# HELP b B.\n# TYPE b gauge\nb {value}.0\n"
        ).encode()

    merged = merge_metrics({"1": text(1), "2": text(2)}).decode()
    assert merged.splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="1",model="x,y}"} 1.0',
        'a_total{replica="2",model="x,y}"} 2.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{replica="1"} 1.0',
        'b{replica="2"} 2.0',
    ]


def test_names_of_longer_conversations_begin_with_those_of_shorter_ones() -> None:
    messages = [{"role": "user", "content": "x" * 300}]
    longer = [*messages, {"role": "assistant", "content": "y" * 300}, {"role": "user", "content": "z"}]
    short, long = (prefix_names({"model": "m", "messages": each}, "") for each in (messages, longer))
    assert len(short) == 2 and long[:2] == short and len(long) == 5
    assert prefix_names({"messages": messages}, "another key")[0] != short[0]
    assert not set(prefix_names({"model": "n", "messages": messages}, "")) & set(short)
    assert len(prefix_names({"prompt": "x" * 10**6}, "")) == MAX_PIECES
    assert prefix_names({"prompt": "x" * (PIECE // 2)}, "") == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"prompt": 1}', b"[" * 100_000, b'{"messages": {"a": null}}']
)
def test_any_body_reaches_the_replica(body: bytes) -> None:
    scope = httpx_scope("/v1/completions")
    forwarded = asyncio.run(read_request(scope, body, "", ""))
    assert forwarded.body == body and not forwarded.is_bound


def test_slots_are_those_of_a_client() -> None:
    assert bound_name("/completion", {"id_slot": 3}, "a") == bound_name("/slots/3", {}, "a")
    assert bound_name("/completion", {"id_slot": 3}, "b") != bound_name("/slots/3", {}, "a")
    assert bound_name("/completion", {"id_slot": -1}, "a") is None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the service asks a cluster, with one front; other functions do nothing."""
    found: Any = Mock(models=["demo"], fronts=[FrontEntry("http://10.0.0.1:1", ["demo"])])
    found.cluster_resources.return_value = {"GPU": 2.0}
    found.serve.status.return_value.applications = {}
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setattr(service, "fronts_of", lambda ray: found.fronts)
    monkeypatch.setattr(service, "connect", lambda node: found)
    monkeypatch.setattr(service.time, "sleep", lambda seconds: found.waited())
    for name in ("require_ray", "own_node", "watch", "add_front", "remove_front"):
        monkeypatch.setattr(service, name, getattr(found, name))
    return found


def test_a_cluster_has_one_server_with_replicas(cluster: Any) -> None:
    notices, options = list[str](), service.ReplicaOptions(3, 3, cluster=True, device="auto")

    def serve() -> None:
        with service.running_replicas(cluster, options, Path(), "http://0.0.0.0:9", notices.append):
            pass

    with pytest.raises(UsageError, match=r"is served at http://10\.0\.0\.1:1 already; leave out MODEL"):
        serve()
    assert cluster.shutdown.call_count == 1
    cluster.waited.side_effect = cluster.fronts.clear  # the other one has ended
    with pytest.raises(UsageError, match="3 replicas need 3 GPUs, and there are 2; use fewer --replicas"):
        serve()
    with (
        pytest.raises(UsageError, match="no server is running in this cluster; start the first server with MODEL"),
        service.attached_front(Path(), "", notices.append),
    ):
        pass
    assert not cluster.add_front.called and not notices
    service.leave_cluster(cluster, cluster.serve, notices.append)
    cluster.fronts.append(FrontEntry("http://b", ["demo"]))
    service.leave_cluster(cluster, cluster.serve, notices.append)
    assert cluster.serve.delete.call_count == 1  # with the last front
    assert notices == ["the replicas continue, as they are served at http://b too"]


@pytest.mark.parametrize(
    ("raised", "message", "code"),
    [
        ("x\nlocalllm.errors.DoesNotFit: 9 GB are needed; use less", "9 GB are needed; use less; or use fewer", 3),
        ("actor died\n  at line 7\n", "the replicas did not start: at line 7; see Ray's log", 1),
        ("", "the replicas did not start: RuntimeError; see Ray's log", 1),
    ],
)
def test_why_replicas_did_not_start(cluster: Any, raised: str, message: str, code: int) -> None:
    replicas = service.ReplicaService(cluster, cluster, service.ReplicaOptions(1, 1), has_gpu=False)
    cause = replicas.cause_of(RuntimeError(raised))
    assert str(cause).startswith(message) and cause.exit_code == code


def test_a_restart_that_fails_is_told_and_only_one_runs(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = service.ReplicaService(cluster, cluster, service.ReplicaOptions(1, 1), has_gpu=False)
    notices, refused = queue.SimpleQueue[str](), threading.Event()

    def deploy() -> None:
        assert refused.wait(60)
        raise LocalLLMError("the cache is too small")

    monkeypatch.setattr(replicas, "deploy", deploy)
    replicas.restart(notices.put)
    assert notices.get(timeout=60) == "restarting the replicas, one after the other"
    replicas.restart(notices.put)
    assert notices.get(timeout=60) == "the replicas are being restarted already"
    refused.set()
    assert notices.get(timeout=60) == "error: the replicas are not restarted: the cache is too small"
    assert replicas.restarting.acquire(timeout=60)  # so that another restart is possible


def test_the_ray_that_something_else_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="this machine is in no cluster; run `localllm cluster start`"):
        ray_node.own_node(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    foreign = ray_node.own_node(tmp_path)
    assert foreign.is_foreign and foreign.is_running and foreign.address == "10.0.0.1:6379"
    assert "RAY_AUTH_TOKEN_PATH" not in foreign.environment()  # which is set already
    init = Mock(side_effect=RuntimeError("no token\nat gcs.cc"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setattr(ray_node.os, "environ", os.environ.copy())
    with pytest.raises(LocalLLMError, match=r"cannot connect to Ray at 10\.0\.0\.1:6379: no token; start"):
        ray_node.connect(foreign)
    for code, stderr, reason in ((1, "x\nbusy\n", "busy"), (2, "", "no output"), (0, "", None)):
        drained = Mock(return_value=SimpleNamespace(returncode=code, stdout="", stderr=stderr))
        monkeypatch.setattr(ray_node.subprocess, "run", drained)
        expected = pytest.raises(LocalLLMError, match=f"does not drain the machine: {reason}")
        with expected if reason else contextlib.nullcontext():
            ray_node.drain_machine(foreign, "abc")
        command = drained.call_args.args[0]
        assert "--address=10.0.0.1:6379" in command and command[command.index("--node-id") + 1] == "abc"
    assert ray_node.address_towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"cannot be reached .*; give --host ADDRESS"):
        ray_node.address_towards("255.255.255.255", 9)


def test_ray_gets_a_token_and_every_port_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(command: list[str], env: dict[str, str], **options: Any) -> None:
        token = Path(env["RAY_AUTH_TOKEN_PATH"])
        assert (
            env["RAY_AUTH_MODE"] == "token" and len(token.read_text()) >= 32 and token.stat().st_mode & 0o77 == 0
        )
        flags = dict(word.removeprefix("--").split("=") for word in command if "=" in word)
        assert flags["node-ip-address"] == "127.0.0.1" and flags["include-dashboard"] == "false"
        ports = [flags[name] for name in (*ray_node.PORT_FLAGS, "port", "ray-client-server-port")]
        ports += [env[name] for name in ray_node.METRIC_PORTS]
        assert len({*ports}) == len(ports)
        raise Started

    monkeypatch.setattr(ray_node.subprocess, "Popen", start)
    with pytest.raises(Started):
        ray_node.launch_node(pytest.fail)


@pytest.mark.parametrize(
    ("log", "attempts"),
    [("Exception: The current node timed out during startup. This ", 3), ("ValueError: port", 1)],
)
def test_ray_is_started_again_if_it_was_too_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, attempts: int
) -> None:
    (tmp_path / "log").write_text(f"starting\n{log}\n")
    notices, started = list[str](), list[Path]()

    def launch(notify: Callable[[str], object], **options: Any) -> None:
        started.append(tmp_path)
        ray_node.wait_for_start(Mock(poll=lambda: 1), tmp_path / "log", notify)

    monkeypatch.setattr(ray_node, "require_ray", lambda: None)
    monkeypatch.setattr(ray_node, "launch_node", launch)
    with pytest.raises(LocalLLMError, match=f"Ray has ended: {re.escape(log.strip())}"):
        ray_node.start_node(notices.append)
    assert (len(started), len(notices)) == (attempts, attempts - 1)


def test_the_last_gpus_compute_the_prompts_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "require_ray", lambda: None)
    monkeypatch.setattr(service, "resolve_device", torch.device)
    monkeypatch.setattr(service, "count_gpus", lambda: 8)
    supervisors = list[Mock]()

    def start(devices: list[str]) -> Mock:
        supervisors.append(Mock(devices=devices, sockets=[Path(device) for device in devices]))
        return supervisors[-1]

    monkeypatch.setattr(service, "PrefillSupervisor", start)
    options = service.ReplicaOptions(6, 6, device="cuda", prefill=2)
    with service.running_prefill(["a", "b"], options) as sockets:
        assert sockets == {name: [Path("cuda:6"), Path("cuda:7")] for name in "ab"}
        assert not any(supervisor.close.called for supervisor in supervisors)
    assert all(supervisor.close.called for supervisor in supervisors)
    options = service.ReplicaOptions(3, 3, device="cuda", gpus=2, prefill=3)
    message = "3 engines and 3 for prompts need 9 GPUs, and there are 8; use fewer --prefill or --decode"
    with pytest.raises(UsageError, match=message), service.running_prefill(["a"], options):
        pass


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from localllm.cli.fast_start import COMMANDS, find_command
from localllm.cluster import front, ray_node, replica, service
for name in COMMANDS:
    find_command(name)
from localllm.__main__ import main
sys.argv = ["localllm", "serve", "demo", "--port", "0", "--replicas", "2"]
sys.exit(main())
"""


def test_without_ray_all_modules_are_imported_and_replicas_are_refused() -> None:
    command = [sys.executable, "-c", WITHOUT_RAY]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1] == (
        'error: replicas need Ray, which is not installed; run `pip install "localllm[cluster]"`'
    )
