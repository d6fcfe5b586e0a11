"""The body of a request; `guard.py` counts it, and sees to it that it comes in time."""

from typing import Any

from starlette.requests import Request

from localllm.api.body import parse


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that it is, whatever its content type says. Raises UsageError as `parse`, and as the guard's
    `Body` does."""
    return parse(await request.body())
