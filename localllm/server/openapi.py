"""Our own OpenAPI document, made of what the routes are: bodies from the pydantic models that read them, errors in
the shape of each API. A router gives each route what `documented` makes:

    @routes.post("/chat/completions", **documented(ChatBody, EXAMPLE, streams="text/event-stream"))
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import JSONResponse

Schema = dict[str, Any]

JSON = "application/json"
COMPONENTS = "#/components/schemas/"
COMMON_ERRORS = {
    400: "The request makes no sense.",
    401: "A key is needed, or this one is wrong.",
    403: "The Host or the Origin is a stranger's.",
    404: "There is no such model, or no such route.",
    500: "A fault of localllm, or an answer that is not what its schema asks for.",
    503: "Busy: ask again after the seconds in Retry-After.",
}
BODY_ERRORS = {
    408: "The body did not come in time.",
    413: "The body is too large.",
    507: "The model does not fit into the memory.",
}
RETRY_AFTER = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}

_TEXT_OR_NULL = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}}
OPENAI_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {**_FIELDS, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
OLLAMA_ERROR: Schema = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)},
    },
    "required": ["type", "error"],
}
ERROR_SCHEMAS: Schema = {
    "OpenAIError": OPENAI_ERROR,
    "OllamaError": OLLAMA_ERROR,
    "AnthropicError": ANTHROPIC_ERROR,
}
ERROR_BY_PREFIX = {
    "/api/": "OllamaError",
    "/v1/messages": "AnthropicError",
    "/": "OpenAIError",
}  # the first that fits


def route_docs(
    body: type[BaseModel] | None = None,
    example: Mapping[str, Any] | None = None,
    *,
    media_type: str = JSON,
    stream_type: str | None = None,
    json_type: str | list[str] = "object",
) -> dict[str, Any]:
    """Arguments of a route. body: what it reads, with an example; media_type: the type of its answers, and
    json_type what they are in JSON; stream_type: that of its other way of answering."""
    answers: Schema = {media_type: {"schema": {"type": json_type if media_type == JSON else "string"}}}
    if stream_type:  # of what a schema says readers differ: whole text, line, or event
        answers[stream_type] = {}
    found: dict[str, Any] = {"responses": {200: {"description": "The answer.", "content": answers}}}
    if body:
        content: Schema = {"schema": body_schema(body)}
        if example is not None:
            content["example"] = dict(example)
        found["openapi_extra"] = {"requestBody": {"required": True, "content": {JSON: content}}}
    return found


def body_schema(body: type[BaseModel]) -> Schema:
    """Whose `$defs` `openapi_document` puts where its references look for them. Unknown fields may be sent."""
    schema = body.model_json_schema(ref_template=COMPONENTS + "{model}")
    schema["required"] = [name for name in schema.get("required", ()) if name != "model"]  # the only one loaded
    for part in (schema, *schema.get("$defs", {}).values()):
        if part.get("additionalProperties") is False:
            del part["additionalProperties"]
    return schema


def add_openapi_route(app: FastAPI) -> None:
    """At `/openapi.json`. Pages that show it would load scripts from elsewhere: there are none."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(openapi_document(app))


def openapi_document(app: FastAPI) -> Schema:
    """All routes of the application, with the errors that each may answer with."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = dict(ERROR_SCHEMAS)
    for path, item in made["paths"].items():
        error = next(name for prefix, name in ERROR_BY_PREFIX.items() if path.startswith(prefix))
        for operation in item.values():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own; ours is 400
            answers = responses["200"]["content"]
            if answers.get(JSON) == {"schema": {}} and len(answers) > 1:
                del answers[JSON]  # FastAPI's own, too: the route gives something else
            contents = operation.get("requestBody", {}).get("content", {})
            for status, why in (COMMON_ERRORS | BODY_ERRORS if contents else COMMON_ERRORS).items():
                told: Schema = {"description": why, "content": {JSON: {"schema": {"$ref": COMPONENTS + error}}}}
                responses.setdefault(str(status), told | ({"headers": RETRY_AFTER} if status == 503 else {}))
            for content in contents.values():
                schema = dict(content["schema"])  # the route's own stays as it is
                components.update(schema.pop("$defs", {}))
                content["schema"] = schema
    made["components"] = {"schemas": components}
    return made
