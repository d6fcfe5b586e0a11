"""The body of a request; `guard.py` counts it, and sees to it that it comes in time."""

from typing import Any

from starlette.requests import Request

from localllm.api.body import BadField, parse_json_object
from localllm.server.models import ModelPool


async def read_json_body(request: Request) -> dict[str, Any]:
    """The JSON object that it is, whatever its content type says. Raises UsageError as `parse_json_object`, and as
    the guard's `GuardedBody` does."""
    return parse_json_object(await request.body())


async def read_model_body(request: Request, models: ModelPool) -> dict[str, Any]:
    """As `read_json_body`; a body that names no model means the only one that is loaded. Raises BadField where
    none or several are."""
    body = await read_json_body(request)
    if body.get("model") in (None, ""):
        body["model"] = only_model(models)
    return body


def only_model(models: ModelPool) -> str:
    names = [loaded.name for loaded in models.loaded.values()]
    if len(names) != 1:
        loaded = f"{', '.join(names)} are loaded" if names else "no model is loaded"
        raise BadField("model", f"model is missing, and {loaded}", "send the name of one")
    return names[0]
