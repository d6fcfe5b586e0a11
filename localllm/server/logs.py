"""The server's log: one line an event on stderr, as `key=value` or as JSON, and the middleware that writes one for
each request.

Whatever strangers sent (paths, names of models) is shown so that it stays inside its value: control characters,
line ends and odd letters are escaped. Prompts are in it only where whoever started the server asked for that.
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
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.api.body import IGNORED_FIELDS, IgnoredFields
from localllm.server.request_stats import CURRENT_REQUEST, RequestStats

if TYPE_CHECKING:
    from localllm.server.prometheus import ServerMetrics  # torch, for which a wrong flag need not wait

log = logging.getLogger("localllm.requests")
CLIENT_CLOSED_STATUS = 499  # the status of an answer that nobody waited for, as other servers write it
MAX_VALUE_LEN = 256  # characters of a path or a name
IGNORED_HEADER = "X-Localllm-Ignored"
TEMPLATE_HEADER = "X-Localllm-Template"  # with the name of the chat template that stands in for a missing one
CHANGES_ANSWER_SUFFIX = ";changes-answer"
HEADER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # that a name in a header does not have
MAX_HEADER_NAME_LEN = 80  # characters of a field's name in a header
MAX_CLIENTS = 1024  # of whom is known which fields they were told of
OWN_PREFIX = "/localllm/"  # of routes whose client is of the same version: what it does not know is a fault
QUIET_ROUTES = frozenset(("/metrics", "/ui/{name:path}"))  # routes that go without a line while they go well
QUOTED_CHARACTERS = frozenset(' "=\\')  # words with one of these stand in quotes


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


def configure_logging(log_format: LogFormat) -> None:
    """Send this program's log, and what its libraries warn of, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("localllm").setLevel(logging.WARNING if log_format is LogFormat.OFF else logging.INFO)


class LogFormatter(logging.Formatter):
    """One line a record, with the mapping `fields` where it has one."""

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
    """`key=value key="two words"`; what is None is left out."""
    return " ".join(f"{name}={quote_value(value)}" for name, value in fields.items() if value is not None)


def quote_value(value: Any) -> str:
    """As it is where it is one plain word, else as a string of JSON, which has no control characters."""
    if (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value
        and not set(value) & QUOTED_CHARACTERS
    ):
        return value
    return escape(value)


def escape(value: Any) -> str:
    """JSON in ASCII that a terminal does not obey: the one control character that JSON lets through is DEL."""
    return json.dumps(value).replace("\x7f", "\\u007f")


class RequestLogger:
    """Middleware around all others: gives each request an id and an account, and writes its line at the end."""

    def __init__(self, app: ASGIApp, metrics: "ServerMetrics", *, log_prompts: bool = False, strict: bool = False):
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
        account, start, status, whole = (
            RequestStats(secrets.token_hex(8), self.metrics, self.log_prompts),
            now(),
            500,
            False,
        )

        async def send_with_id(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = account.id
                if account.ignored.names:
                    headers[IGNORED_HEADER] = ignored_header(account.ignored)
                if account.template:
                    headers[TEMPLATE_HEADER] = account.template
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        CURRENT_REQUEST.set(account)
        IGNORED_FIELDS.set(None if self.strict or scope["path"].startswith(OWN_PREFIX) else account.ignored)
        try:
            await self.app(scope, receive, send_with_id)
            status = status if whole or status >= 500 else CLIENT_CLOSED_STATUS
        except Exception:
            status = 500  # also where an answer had begun, which now breaks off
            raise
        finally:
            seconds = now() - start
            route = getattr(scope.get("route"), "path", None)
            self.metrics.request_ended(scope["method"], route, status, seconds)
            self.report_ignored(scope, account)
            level = logging.DEBUG if route in QUIET_ROUTES and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": request_fields(scope, account, status, seconds)})

    def report_ignored(self, scope: Scope, account: RequestStats) -> None:
        """A line with the fields that had no effect, once a client, which is an address and a program."""
        if not account.ignored.names:
            return
        client = scope["client"][0] if scope.get("client") else ""
        program = Headers(scope=scope).get("user-agent", "")[:MAX_VALUE_LEN]
        known = self.reported.setdefault((client, program), set())
        self.reported.move_to_end((client, program))
        if len(self.reported) > MAX_CLIENTS:
            self.reported.popitem(last=False)
        if len(known) > MAX_CLIENTS or not (new := account.ignored.names.keys() - known):
            return
        known |= new
        names = {name: changes for name, changes in account.ignored.names.items() if name in new}
        fields = {
            "event": "ignored",
            "id": account.id,
            "client": client,
            "program": program or None,
            "path": scope["path"][:MAX_VALUE_LEN],
            "fields": ignored_header(IgnoredFields(names)),
        }
        changed = any(names.values())
        fields |= {"note": "the answer is not what these ask for"} if changed else {}
        log.log(logging.WARNING if changed else logging.INFO, "ignored", extra={"fields": fields})


def ignored_header(ignored: IgnoredFields) -> str:
    """Names as a header can have them, whoever chose them."""
    shown = {name: HEADER_CHARACTERS.sub("?", name[:MAX_HEADER_NAME_LEN]) or "?" for name in ignored.names}
    return ", ".join(
        shown[name] + (CHANGES_ANSWER_SUFFIX if changes else "") for name, changes in ignored.names.items()
    )


def request_fields(scope: Scope, account: RequestStats, status: int, seconds: float) -> dict[str, Any]:
    """The line of one request. Tokens are of all its answers, times of the first."""
    measured = account.metrics_list
    client = scope.get("client")
    fields: dict[str, Any] = {
        "event": "request",
        "id": account.id,
        "client": client[0] if client else None,
        "method": scope["method"][:MAX_VALUE_LEN],
        "path": scope["path"][:MAX_VALUE_LEN],
        "status": status,
        "seconds": round(seconds, 4),
        "error": account.error and account.error[:MAX_VALUE_LEN],
        "model": account.model,
        "template": account.template,
    }
    if account.finish_reasons:
        fields |= {
            "prompt_tokens": account.prompt_tokens,
            "cached_tokens": sum(metrics.cached_tokens for metrics in measured),
            "output_tokens": account.output_tokens,
            "ttft": round_or_none(measured[0].ttft_s) if measured else None,
            "tokens_per_s": round_or_none(measured[0].tokens_per_s) if measured else None,
            "finish": ",".join(dict.fromkeys(account.finish_reasons)),
        }
    if account.prompts:
        fields["prompts"] = account.prompts
    return fields


def round_or_none(value: float) -> float | None:
    """None for NaN: JSON has none."""
    return round(value, 4) if value == value else None


def now() -> float:
    return time.perf_counter()
