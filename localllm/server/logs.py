"""The request log: one line per event on stderr, as logfmt (`key=value`) or JSON, and its middleware.

Values that clients send, such as paths, are escaped to printable ASCII, so that no client can forge a line.
Prompts are logged only with --log-prompts. Built on the standard library's `logging` with one formatter:
structlog's logfmt renderer escapes line feeds alone, so that every value would have to be escaped before it.
"""

import json
import logging
import re
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.api.body import IGNORED_FIELDS, IgnoredFields
from localllm.server.request_stats import CURRENT_REQUEST, RequestCounter, RequestStats

log = logging.getLogger("localllm.requests")
CLIENT_CLOSED_STATUS = 499  # the client disconnected, as in the logs of nginx
MAX_VALUE_LEN = 256  # characters
IGNORED_HEADER = "X-Localllm-Ignored"
TEMPLATE_HEADER = "X-Localllm-Template"  # name of the chat template used instead of a missing one
CHANGES_ANSWER_SUFFIX = ";changes-answer"
UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9_.\[\]-]")
MAX_HEADER_NAME_LEN = 80  # characters of a field name in a header
MAX_CLIENTS = 1024  # whose reported fields are remembered
OWN_PREFIX = "/localllm/"  # routes of localllm's own client, for which an unknown field is an error
QUIET_ROUTES = frozenset(("/metrics", "/ui/{name:path}"))  # successful requests are not logged
UNQUOTED = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without space, quote, = and backslash


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


def configure_logging(log_format: LogFormat) -> None:
    """Send localllm's log and warnings of libraries to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("localllm").setLevel(logging.WARNING if log_format is LogFormat.OFF else logging.INFO)


class LogFormatter(logging.Formatter):
    """One line per record: its attribute `fields`, a mapping, otherwise its message."""

    def __init__(self, log_format: LogFormat):
        super().__init__()
        self.log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        fields |= getattr(record, "fields", None) or {"message": record.getMessage()}
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        if self.log_format is LogFormat.JSON:
            return json.dumps(fields | ({"trace": trace} if trace else {}))
        return "\n    ".join([format_fields(fields), *(escape(line)[1:-1] for line in trace)])


def format_fields(fields: Mapping[str, Any]) -> str:
    """`key=value key="two words"`, without values that are None."""
    return " ".join(f"{name}={quote_value(value)}" for name, value in fields.items() if value is not None)


def quote_value(value: Any) -> str:
    """A plain word as it is, anything else as JSON."""
    return value if isinstance(value, str) and UNQUOTED.fullmatch(value) else escape(value)


def escape(value: Any) -> str:
    """JSON in printable ASCII; DEL is the one control character that JSON leaves alone."""
    return json.dumps(value).replace("\x7f", "\\u007f")


class RequestLogger:
    """Outermost middleware: gives each request an id and statistics, and logs it at the end."""

    def __init__(self, app: ASGIApp, metrics: RequestCounter, *, log_prompts: bool = False, strict: bool = False):
        """strict: refuse fields that have no effect."""
        self.app = app
        self.metrics = metrics
        self.log_prompts = log_prompts
        self.strict = strict
        self.reported: OrderedDict[tuple[str, str], set[str]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        stats = RequestStats(secrets.token_hex(8), self.metrics, self.log_prompts)
        start, status, is_complete = time.perf_counter(), 500, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = stats.id
                if stats.ignored.names:
                    headers[IGNORED_HEADER] = ignored_header(stats.ignored)
                if stats.template:
                    headers[TEMPLATE_HEADER] = stats.template
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        CURRENT_REQUEST.set(stats)
        IGNORED_FIELDS.set(None if self.strict or scope["path"].startswith(OWN_PREFIX) else stats.ignored)
        try:
            await self.app(scope, receive, send_with_id)
            status = status if is_complete or status >= 500 else CLIENT_CLOSED_STATUS
        except Exception:
            status = 500  # even if a response had started
            raise
        finally:
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", None)
            self.metrics.request_ended(scope["method"], route, status, seconds)
            self.report_ignored(scope, stats)
            level = logging.DEBUG if route in QUIET_ROUTES and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": request_fields(scope, stats, status, seconds)})

    def report_ignored(self, scope: Scope, stats: RequestStats) -> None:
        """Log fields that had no effect, once per client, which is an address and a user agent."""
        if not stats.ignored.names:
            return
        client = scope["client"][0] if scope.get("client") else ""
        program = Headers(scope=scope).get("user-agent", "")[:MAX_VALUE_LEN]
        known = self.reported.setdefault((client, program), set())
        self.reported.move_to_end((client, program))
        if len(self.reported) > MAX_CLIENTS:
            self.reported.popitem(last=False)
        if len(known) > MAX_CLIENTS or not (new := stats.ignored.names.keys() - known):
            return
        known |= new
        names = {name: changes for name, changes in stats.ignored.names.items() if name in new}
        fields = {
            "event": "ignored",
            "id": stats.id,
            "client": client,
            "program": program or None,
            "path": scope["path"][:MAX_VALUE_LEN],
            "fields": ignored_header(IgnoredFields(names)),
        }
        changed = any(names.values())
        fields |= {"note": "the answer would differ if these fields had an effect"} if changed else {}
        log.log(logging.WARNING if changed else logging.INFO, "ignored", extra={"fields": fields})


def ignored_header(ignored: IgnoredFields) -> str:
    """The fields as a header value, with unsafe characters replaced."""
    shown = {name: UNSAFE_IN_HEADER.sub("?", name[:MAX_HEADER_NAME_LEN]) or "?" for name in ignored.names}
    return ", ".join(
        shown[name] + (CHANGES_ANSWER_SUFFIX if changes else "") for name, changes in ignored.names.items()
    )


def request_fields(scope: Scope, stats: RequestStats, status: int, seconds: float) -> dict[str, Any]:
    """Fields of a request's log line. Tokens are of all its answers, times of the first."""
    metrics_list = stats.metrics_list
    client = scope.get("client")
    fields: dict[str, Any] = {
        "event": "request",
        "id": stats.id,
        "client": client[0] if client else None,
        "method": scope["method"][:MAX_VALUE_LEN],
        "path": scope["path"][:MAX_VALUE_LEN],
        "status": status,
        "seconds": round(seconds, 4),
        "error": stats.error and stats.error[:MAX_VALUE_LEN],
        "model": stats.model,
        "template": stats.template,
        "replica": stats.replica,
    }
    if stats.finish_reasons:
        fields |= {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": sum(metrics.cached_tokens for metrics in metrics_list),
            "output_tokens": stats.output_tokens,
            "ttft": round_or_none(metrics_list[0].ttft_s) if metrics_list else None,
            "tokens_per_s": round_or_none(metrics_list[0].tokens_per_s) if metrics_list else None,
            "finish": ",".join(dict.fromkeys(stats.finish_reasons)),
        }
    if stats.prompts:
        fields["prompts"] = stats.prompts
    return fields


def round_or_none(value: float) -> float | None:
    """Four decimals; None for NaN, which JSON does not have."""
    return round(value, 4) if value == value else None
