"""The body of a request, which has to come in time."""

import asyncio
from typing import Any

from starlette.requests import Request

from localllm.api.body import parse
from localllm.errors import LocalLLMError

BODY_S = 60.0  # in which a body must have come


class TooSlow(LocalLLMError):
    """A body that does not come."""

    http_status = 408


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that it is, whatever its content type says. Raises TooSlow, and UsageError as `parse`."""
    try:
        async with asyncio.timeout(BODY_S):
            return parse(await request.body())
    except TimeoutError:
        raise TooSlow(f"the body did not come within {BODY_S:.0f} s", "send it faster") from None
