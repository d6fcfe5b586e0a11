"""The front of several replicas: an ASGI application that reads a request, has a replica answer it, and passes on
what the replica's application sends.

Access control, limits and the log are the server's own middleware, before it. APIs, streams and errors are the
replica's. The front adds what only it can: a request without output when its replica ends is sent to another one;
a stream that has begun ends with an error in the form of its API, never as if it were complete; requests for the
state of the server are sent to all replicas, and their answers merged.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from localllm.api.anthropic import responses as anthropic
from localllm.api.events import error_to_json
from localllm.api.ollama import responses as ollama
from localllm.api.openai.responses import error_object
from localllm.cluster.forwarded import ForwardedRequest, read_request, response_name
from localllm.errors import Busy, LocalLLMError, NotSupported, ReplicaLost
from localllm.metrics import Metrics
from localllm.request import CACHE_SCOPE, CLIENT
from localllm.routing import REPORT_S
from localllm.server.access import AccessPolicy
from localllm.server.app import assemble
from localllm.server.guard import UNAUTHENTICATED, UNLIMITED_PATHS, ConnectionLimits
from localllm.server.prometheus import CONTENT_TYPE, E2E_BUCKETS_S
from localllm.server.request_stats import current_request_stats
from localllm.server.routing import JsonObject
from localllm.server.streaming import EVENT_STREAM, NDJSON, ndjson_line, run_until_disconnect, sse_event

START, BODY = "http.response.start", "http.response.body"
REPLICA, END = "localllm.replica", "localllm.end"
"""Messages besides those of ASGI: the first one names the replica (`id`, `number`); the last one follows the end
of the application, with `stats` for the log."""

LEAVE_S = 0.05  # in which an answer may end whose client has left, as many do on the last text, before its end
MAX_ATTEMPTS = 3  # replicas that a request is sent to, one after the other
MAX_FAILURES = 3  # in a row, after which a replica gets no requests for a while if others are left
AVOID_S = 30.0
IDLE_REPORT_S = 10.0  # between reports to a front without requests
MERGED_PATHS = ("/localllm/ps", "/localllm/top", "/health")
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')
METRIC_SAMPLE = re.compile(rb"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


@dataclass(frozen=True)
class ReplicaAnswer:
    """The answer of one replica to a request that is sent to all."""

    id: str
    number: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class ReplicaReport:
    """Changes of a replica's prefix caches since its last report to a front, by names of `forwarded`."""

    id: str
    cursor: int  # for its next report
    held: Sequence[Hashable]
    evicted: Sequence[Hashable]


class Fleet(Protocol):
    """The replicas, as a front sees them."""

    def answer(self, forwarded: ForwardedRequest) -> AsyncGenerator[Message]:
        """Have one replica answer: messages as described at REPLICA. Closing it cancels the request. Raises
        ReplicaLost if the replica ends before END, and Busy if there is none."""
        ...

    async def ask_all(self, forwarded: ForwardedRequest) -> list[ReplicaAnswer]:
        """Have each replica answer, ordered by number; those that end meanwhile are left out."""
        ...

    def bind(self, name: bytes, replica: str) -> None:
        """Send requests that need this name to this replica."""
        ...

    def knows(self, name: bytes) -> bool:
        """Whether a replica is known to have what this name names."""
        ...

    async def learn(self) -> None:
        """Ask each replica what it holds by now. Raises nothing if some do not answer."""
        ...


@dataclass
class Failures:
    """Which replicas fail again and again, as a sick one does that answers fast and so attracts requests."""

    clock: Callable[[], float] = time.monotonic
    in_a_row: dict[str, int] = field(default_factory=dict[str, int])
    until: dict[str, float] = field(default_factory=dict[str, float])

    def record(self, replica: str, *, failed: bool) -> None:
        if not failed:
            self.in_a_row.pop(replica, None)
            return
        self.in_a_row[replica] = self.in_a_row.get(replica, 0) + 1
        if self.in_a_row[replica] >= MAX_FAILURES:
            self.until[replica] = self.clock() + AVOID_S

    def avoided(self) -> set[str]:
        """Replicas to avoid now; after AVOID_S one failure is enough to avoid one again."""
        now = self.clock()
        for replica in [replica for replica, until in self.until.items() if until <= now]:
            del self.until[replica]
            self.in_a_row[replica] = MAX_FAILURES - 1
        return set(self.until)


class FrontMetrics:
    """Metrics that a front counts itself; replicas count answers and tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.retried = Counter(
            "localllm_front_retried",
            "Requests that were sent to another replica, as theirs had ended before it sent anything.",
            registry=self.registry,
        )
        self.lost = Counter(
            "localllm_front_lost", "Answers whose replica ended before they were complete.", registry=self.registry
        )
        self.requests = Histogram(
            "localllm_front_request_seconds",
            "HTTP request until the last byte of the response, at the front.",
            ("status",),
            buckets=E2E_BUCKETS_S,
            registry=self.registry,
        )

    def request_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        self.requests.labels(status).observe(seconds)

    def answer_ended(
        self, model: str, reason: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int, key: str
    ) -> None:
        """Count nothing, as the replica does."""

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Front:
    """The application behind the middleware."""

    def __init__(self, fleet: Fleet, metrics: FrontMetrics):
        self.fleet = fleet
        self.metrics = metrics
        self.failures = Failures()
        self.has_requests = asyncio.Event()
        self.learning: asyncio.Task[None] | None = None

    async def keep_learning(self) -> None:
        """Poll the contents of the replicas' prefix caches in the background, so that all fronts route alike."""
        while True:
            await self.fleet.learn()
            self.has_requests.clear()
            await asyncio.sleep(REPORT_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.has_requests.wait(), IDLE_REPORT_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises LocalLLMError if no replica could, before anything is sent."""
        if scope["method"] == "POST" and UNLIMITED_PATHS.fullmatch(scope["path"]):
            message = "a server with several replicas accepts no uploads"
            raise NotSupported(message, "send them to a `localllm serve` without --replicas")
        self.has_requests.set()
        if self.learning is None:
            self.learning = asyncio.create_task(self.keep_learning())
        body = await Request(scope, receive).body()
        forwarded = await read_request(scope, body, CACHE_SCOPE.get(), CLIENT.get())
        if self.is_merged(scope):
            response = await run_until_disconnect(Request(scope, receive), self.merge(forwarded))
            await response(scope, receive, send)
            return
        relay = Relay(forwarded, send)
        try:
            await run_until_disconnect(Request(scope, receive), self.forward(forwarded, relay), LEAVE_S)
        except ClientDisconnect:
            if not relay.has_sent:
                raise  # for the log; as with any stream, what had begun just ends

    def is_merged(self, scope: Scope) -> bool:
        path, method = scope["path"], scope["method"]
        if path == "/localllm/stop":
            return method == "POST"
        return method in ("GET", "HEAD") and path in (*MERGED_PATHS, "/metrics")

    async def merge(self, forwarded: ForwardedRequest) -> Response:
        """Ask all replicas, and answer for all of them."""
        answers = await self.fleet.ask_all(forwarded)
        if not answers:
            raise no_replica()
        good = [answer for answer in answers if answer.status == 200]
        path = forwarded.scope["path"]
        if path == "/metrics":
            text = merge_metrics({answer.number: answer.body for answer in good}) + self.metrics.exposition()
            return Response(text, media_type=CONTENT_TYPE)
        if not good:
            return Response(answers[0].body, answers[0].status, media_type="application/json")
        if path == "/health" and UNAUTHENTICATED in forwarded.scope:
            return JSONResponse({"status": "ok"})
        return JSONResponse(merge_state(path, [(answer.number, answer.json()) for answer in good]))

    async def forward(self, forwarded: ForwardedRequest, relay: "Relay") -> None:
        """Pass on the answer of a replica, of another one if it ends before it has sent anything."""
        if forwarded.is_bound and not self.fleet.knows(forwarded.names[-1]):
            await self.fleet.learn()  # it may have come through another front
        retries = 1 if forwarded.scope["method"] == "DELETE" else MAX_ATTEMPTS
        tried: set[str] = set()
        for attempt in range(1, retries + 1):
            forwarded.avoid = tried | self.failures.avoided()
            relay.begin()
            try:
                async with aclosing(self.fleet.answer(forwarded)) as messages:
                    async for message in messages:
                        await relay.pass_on(message)
                        if message["type"] == END:
                            break  # what Ray has to say after it takes time
                relay.check_complete()
            except ReplicaLost as error:
                if relay.is_complete:
                    await relay.flush()
                    return
                replica = relay.replica or forwarded.chosen
                self.failures.record(replica, failed=True)
                self.metrics.lost.inc()
                tried.add(replica)
                if relay.has_sent:
                    await relay.fail(error)
                    return
                if attempt == retries or forwarded.is_bound:
                    raise
                self.metrics.retried.inc()
                continue
            self.failures.record(relay.replica, failed=relay.status >= 500 and relay.status not in (501, 503, 507))
            if relay.response_id:
                self.fleet.bind(response_name(relay.response_id), relay.replica)
            await relay.flush()
            return


class Relay:
    """Passes one answer on to the client.

    What is no stream is held until it is complete: until then, another replica may be asked instead. The last
    message is held until all else is done, as the server takes what follows it for the client's departure.
    """

    def __init__(self, forwarded: ForwardedRequest, send: Send):
        self.forwarded = forwarded
        self.send = send
        self.has_sent = False
        self.begin()

    def begin(self) -> None:
        """Reset the state before the answer of a replica, possibly after another replica has failed."""
        self.replica = ""
        self.held: list[Message] = []
        self.status = 0
        self.content_type = ""
        self.response_id = ""  # of OpenAI's Responses API
        self.is_complete = False
        self.last = b""  # chunk that was sent

    async def pass_on(self, message: Message) -> None:
        kind = message["type"]
        if kind == REPLICA:
            self.replica = message["id"]
            if stats := current_request_stats():
                stats.replica = message["number"]
        elif kind == END:
            self.response_id = message["response_id"]
            if stats := current_request_stats():
                stats.add_summary(message["stats"])
        elif kind == START:
            headers = {name.lower(): value for name, value in message["headers"]}
            self.status = message["status"]
            self.content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            self.held.append(message)
        else:
            self.last = message.get("body") or self.last
            self.is_complete = not message.get("more_body", False)
            self.held.append(message)
            if not self.is_complete and self.content_type in (EVENT_STREAM, NDJSON):
                await self.flush()

    async def flush(self) -> None:
        """Send what is held."""
        held, self.held = self.held, []
        self.has_sent = True
        for each in held:
            await self.send(each)

    def check_complete(self) -> None:
        """Raise ReplicaLost if the application has ended without the end of its answer."""
        if not self.is_complete:
            raise ReplicaLost("the replica did not complete its answer", "send the request again")

    async def fail(self, error: LocalLLMError) -> None:
        """End a stream with an error in the form of its API. Of what is no stream, nothing has been sent."""
        if stats := current_request_stats():
            stats.error = str(error)
        body = stream_error(error, self.forwarded.scope["path"], self.content_type, self.last)
        await self.send({"type": BODY, "body": body, "more_body": False})


def stream_error(error: LocalLLMError, path: str, content_type: str, last: bytes) -> bytes:
    """The error with which a stream ends, as the API of this path writes it. last: chunk of the stream"""
    if content_type == NDJSON:
        own = path.startswith("/localllm/")
        return ndjson_line(error_to_json(error) if own else ollama.error_object(error))
    if path.startswith("/v1/messages"):
        return sse_event(anthropic.error_object(error, ""), "error")
    if path.startswith("/v1/responses"):
        numbers = SEQUENCE_NUMBER.findall(last)
        fields = {"code": "server_error", "message": str(error), "param": None}
        number = int(numbers[-1]) + 1 if numbers else 0
        return sse_event({"type": "error", "sequence_number": number} | fields, "error")
    return sse_event(error_object(error))


def no_replica() -> Busy:
    return Busy("no replica is ready", "wait until one has started; `localllm ps` lists them")


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Metrics of all replicas in Prometheus' text format, each sample with the label `replica`, and each metric's
    samples together, as the format requires. texts: by number of the replica"""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # comments and samples
    for number, text in texts.items():
        label = f'replica="{number}"'.encode()
        family: tuple[list[bytes], list[bytes]] = ([], [])
        for line in text.splitlines():
            if line.startswith(b"#"):
                name = line.split(b" ")[2]
                family = families.setdefault(name, ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif match := METRIC_SAMPLE.fullmatch(line):
                labels = b",".join(filter(None, (label, match["labels"])))
                family[1].append(match["name"] + b"{" + labels + b"} " + match["value"])
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return b"\n".join(lines) + b"\n" if lines else b""


def merge_state(path: str, answers: Sequence[tuple[str, JsonObject]]) -> JsonObject:
    """The answer of all replicas to `/localllm/ps`, `top`, `stop` or `/health`. answers: with the number of the
    replica, at least one"""
    objects = [answer for _, answer in answers]
    merged = dict(objects[0])
    if path == "/localllm/stop":
        return {"users": sum(each["users"] for each in objects)}
    merged["loading"] = [name for each in objects for name in each["loading"]]
    if path == "/health":
        models = list(dict.fromkeys(name for each in objects for name in each["models"]))
        return merged | {"models": models, "replicas": len(objects)}
    merged["models"] = [model | {"replica": number} for number, each in answers for model in each["models"]]
    if "events" in merged:
        merged["events"] = sorted((event for each in objects for event in each["events"]), key=event_time)
    if "free_bytes" in merged:  # of the machine with the least
        devices = {device for each in objects for device in each["free_bytes"]}
        merged["free_bytes"] = {
            device: min(each["free_bytes"][device] for each in objects if device in each["free_bytes"])
            for device in sorted(devices)
        }
    return merged


def event_time(event: JsonObject) -> float:
    return event["at"]


def create_front(
    fleet: Fleet,
    access: AccessPolicy,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
    *,
    log_prompts: bool = False,
) -> Starlette:
    """Build the application of a front, with the middleware of every server. log_prompts: as in `create_app`"""
    metrics = FrontMetrics()
    front = Front(fleet, metrics)
    return assemble([Route("/{path:path}", front)], metrics, access, limits, log_prompts=log_prompts)
