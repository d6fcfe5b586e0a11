"""The server's log: one line an event on stderr, as `key=value` or as JSON, and the middleware that writes one for
each request.

Whatever strangers sent (paths, names of models) is shown so that it stays inside its value: control characters,
line ends and odd letters are escaped. Prompts are in it only where whoever started the server asked for that.
"""

import json
import logging
import secrets
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.account import CURRENT, Account

if TYPE_CHECKING:
    from localllm.server.sums import Sums  # torch, for which a wrong flag need not wait

log = logging.getLogger("localllm.requests")
LEFT = 499  # the status of an answer that nobody waited for, as other servers write it
LONGEST = 256  # characters of a path or a name
OFTEN = frozenset(("/metrics", "/ui/{name:path}"))  # routes that go without a line while they go well
QUOTED = frozenset(' "=\\')  # words with one of these stand in quotes


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


def set_up(form: Format) -> None:
    """Send this program's log, and what its libraries warn of, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("localllm").setLevel(logging.WARNING if form is Format.OFF else logging.INFO)


class Lines(logging.Formatter):
    """One line a record, with the mapping `fields` where it has one."""

    def __init__(self, form: Format):
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        fields |= getattr(record, "fields", None) or {"message": record.getMessage()}
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        if self.form is Format.JSON:
            return json.dumps(fields | ({"trace": trace} if trace else {}))
        return "\n    ".join([in_words(fields), *(escaped(line)[1:-1] for line in trace)])


def in_words(fields: Mapping[str, Any]) -> str:
    """`key=value key="two words"`; what is None is left out."""
    return " ".join(f"{name}={shown(value)}" for name, value in fields.items() if value is not None)


def shown(value: Any) -> str:
    """As it is where it is one plain word, else as a string of JSON, which has no control characters."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and value and not set(value) & QUOTED:
        return value
    return escaped(value)


def escaped(value: Any) -> str:
    """JSON in ASCII that a terminal does not obey: the one control character that JSON lets through is DEL."""
    return json.dumps(value).replace("\x7f", "\\u007f")


class Logged:
    """Middleware around all others: gives each request an id and an account, and writes its line at the end."""

    def __init__(self, app: ASGIApp, sums: "Sums", *, with_prompts: bool = False):
        self.app = app
        self.sums = sums
        self.with_prompts = with_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account, start, status, whole = (
            Account(secrets.token_hex(8), self.sums, self.with_prompts),
            now(),
            500,
            False,
        )

        async def send_with_id(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = account.id
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        CURRENT.set(account)
        try:
            await self.app(scope, receive, send_with_id)
            status = status if whole or status >= 500 else LEFT
        except Exception:
            status = 500  # also where an answer had begun, which now breaks off
            raise
        finally:
            seconds = now() - start
            route = getattr(scope.get("route"), "path", None)
            self.sums.requested(scope["method"], route, status, seconds)
            level = logging.DEBUG if route in OFTEN and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": fields_of(scope, account, status, seconds)})


def fields_of(scope: Scope, account: Account, status: int, seconds: float) -> dict[str, Any]:
    """The line of one request. Tokens are of all its answers, times of the first."""
    measured = account.measured
    client = scope.get("client")
    fields: dict[str, Any] = {
        "event": "request",
        "id": account.id,
        "client": client[0] if client else None,
        "method": scope["method"][:LONGEST],
        "path": scope["path"][:LONGEST],
        "status": status,
        "seconds": round(seconds, 4),
        "error": account.error and account.error[:LONGEST],
        "model": account.model,
    }
    if account.reasons:
        fields |= {
            "prompt_tokens": account.prompt_tokens,
            "cached_tokens": sum(metrics.cached_tokens for metrics in measured),
            "output_tokens": account.output_tokens,
            "ttft": rounded(measured[0].ttft_s) if measured else None,
            "tokens_per_s": rounded(measured[0].tokens_per_s) if measured else None,
            "finish": ",".join(dict.fromkeys(account.reasons)),
        }
    if account.prompts:
        fields["prompts"] = account.prompts
    return fields


def rounded(value: float) -> float | None:
    """None for NaN: JSON has none."""
    return round(value, 4) if value == value else None


def now() -> float:
    return time.perf_counter()
