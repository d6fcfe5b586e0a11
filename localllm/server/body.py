"""The body of a request; `guard.py` counts it, and sees to it that it comes in time."""

from typing import Any

from starlette.requests import Request

from localllm.api.body import parse_json_object


async def read_json_body(request: Request) -> dict[str, Any]:
    """The JSON object that it is, whatever its content type says. Raises UsageError as `parse`, and as the guard's
    `Body` does."""
    return parse_json_object(await request.body())
