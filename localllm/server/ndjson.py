"""Streams of JSON objects, one a line, as Ollama's API sends them."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from localllm.server.sse import EventStream

MEDIA_TYPE = "application/x-ndjson"


def line(value: Mapping[str, Any]) -> bytes:
    """JSON has no line ends of its own."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def lines(made: AsyncGenerator[bytes], lease: AbstractContextManager[Any]) -> EventStream:
    """lease: as of `EventStream`."""
    return EventStream(made, lease, MEDIA_TYPE)
