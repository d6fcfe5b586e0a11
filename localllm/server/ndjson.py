"""Streams of JSON objects, one a line, as Ollama's API sends them."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from localllm.server.sse import StreamResponse

NDJSON = "application/x-ndjson"


def ndjson_line(value: Mapping[str, Any]) -> bytes:
    """JSON has no line ends of its own."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def ndjson_response(made: AsyncGenerator[bytes], lease: AbstractContextManager[Any]) -> StreamResponse:
    """lease: as of `EventStream`."""
    return StreamResponse(made, lease, NDJSON)
