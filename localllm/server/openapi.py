"""The OpenAPI document at `/openapi.json`, made from the routes: bodies from the pydantic models that validate
them, errors in the format of each API. There is no page at `/docs`: it would load scripts from other hosts."""

import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from localllm import __version__
from localllm.server.routing import JSON, ApiRoute, RouteDocs, Router

Schema = dict[str, Any]

COMPONENTS = "#/components/schemas/"
COMMON_ERRORS = {
    400: "The request is malformed.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin header is not accepted.",
    404: "There is no such model, or no such route.",
    500: "Internal error, or an answer that does not match its schema.",
    503: "Busy: retry after the seconds in Retry-After.",
}
BODY_ERRORS = {
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    507: "The model does not fit into memory.",
}
RETRY_AFTER = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}

_TEXT_OR_NULL = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}}
ERROR_SCHEMAS: Schema = {
    "OpenAIError": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {**_FIELDS, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "OllamaError": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)},
        },
        "required": ["type", "error"],
    },
}
ERROR_BY_PREFIX = {
    "/api/": "OllamaError",
    "/v1/messages": "AnthropicError",
    "/": "OpenAIError",
}  # first match wins


def router(described: Sequence[ApiRoute]) -> Router:
    """The route of the document that describes the given routes."""
    routes = Router(in_schema=False)
    document = functools.cache(lambda: openapi_document(described))  # made once, on the first request

    @routes.get("/openapi.json")
    async def openapi(_: Request) -> Schema:
        return document()

    return routes


def openapi_document(routes: Sequence[ApiRoute]) -> Schema:
    """All routes that have a description, with the errors that each may return."""
    paths: Schema = {}
    schemas = dict(ERROR_SCHEMAS)
    for route in routes:
        if route.docs:
            paths.setdefault(route.path_format, {})[route.method.lower()] = operation(route, route.docs, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def operation(route: ApiRoute, docs: RouteDocs, schemas: Schema) -> Schema:
    """The operation object of a route. Adds the definitions that its body refers to to `schemas`."""
    path_parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    query_parameters = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string", "default": ""}}
        for name in docs.query
    ]
    identifier = re.sub(r"\W", "_", route.name + route.path_format)
    described: Schema = {
        "summary": route.name.replace("_", " ").title(),
        "operationId": f"{identifier}_{route.method.lower()}",
        "responses": responses(route, docs),
    }
    if text := inspect.getdoc(route.handler):
        described["description"] = text
    if parameters := path_parameters + query_parameters:
        described["parameters"] = parameters
    if docs.body:
        content: Schema = {"schema": body_schema(docs.body, schemas)}
        if docs.example is not None:
            content["example"] = dict(docs.example)
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    return described


def responses(route: ApiRoute, docs: RouteDocs) -> Schema:
    """Responses of a route by status: 200, and the errors of its API."""
    content: Schema = {}
    if docs.media_type:
        content[docs.media_type] = {"schema": {"type": docs.json_type if docs.media_type == JSON else "string"}}
    if docs.stream_type:  # without a schema: readers disagree whether it describes the text, a line or an event
        content[docs.stream_type] = {}
    ok: Schema = {"description": "The answer.", **({"content": content} if content else {})}
    error = next(name for prefix, name in ERROR_BY_PREFIX.items() if route.path_format.startswith(prefix))
    error_content = {JSON: {"schema": {"$ref": COMPONENTS + error}}}
    errors = {
        str(status): {
            "description": text,
            "content": error_content,
            **({"headers": RETRY_AFTER} if status == 503 else {}),
        }
        for status, text in (COMMON_ERRORS | (BODY_ERRORS if docs.body else {}) | dict(docs.errors)).items()
    }
    return {"200": ok, **errors}


def body_schema(body: type[BaseModel], schemas: Schema) -> Schema:
    """JSON schema of a body, which allows unknown fields and a missing `model`, without null defaults. Moves its
    `$defs` to `schemas`."""
    schema = body.model_json_schema(ref_template=COMPONENTS + "{model}")
    schema["required"] = [name for name in schema.get("required", ()) if name != "model"]
    definitions = schema.pop("$defs", {})
    for part in (schema, *definitions.values()):
        if part.get("additionalProperties") is False:
            del part["additionalProperties"]
        for field in part.get("properties", {}).values():
            if field.get("default", "") is None:
                del field["default"]
    schemas.update(definitions)
    return schema
