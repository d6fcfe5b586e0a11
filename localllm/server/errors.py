"""Errors as the API that was asked tells them: which one, its path says."""

import secrets
from collections.abc import Mapping

from starlette.responses import JSONResponse

from localllm.api.anthropic import responses as anthropic
from localllm.api.openai.responses import error_object
from localllm.errors import LocalLLMError, PromptRefused
from localllm.protocol.events import error_to_json
from localllm.server.request_stats import current_request_stats


def error_response(error: LocalLLMError, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """With Retry-After where the error knows when to ask again. The account of the request has it, too,
    unless it is a fault of ours, or may have words of a prompt."""
    account = current_request_stats()
    if account and 400 <= error.http_status < 500 and not isinstance(error, PromptRefused):
        account.error = str(error)
    found = dict(headers or {})
    if after := getattr(error, "retry_after", None):
        found["Retry-After"] = str(after)
    if path.startswith("/v1/messages"):
        found["request-id"] = f"req_{secrets.token_hex(12)}"
        body = anthropic.error_object(error, found["request-id"])
    elif path.startswith("/localllm/"):
        body = error_to_json(error)
    else:
        body = {"error": str(error)} if path.startswith("/api/") else error_object(error)
    return JSONResponse(body, error.http_status, found)
