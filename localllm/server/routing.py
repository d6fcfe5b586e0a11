"""Routers on top of Starlette's routes, and the JSON bodies that their handlers read."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from localllm.api.body import parse_json_object
from localllm.errors import BadField
from localllm.server.models import ModelPool

JSON = "application/json"

JsonObject = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response | JsonObject]]
Decorator = Callable[[Handler], Handler]


@dataclass(frozen=True)
class RouteDocs:
    """OpenAPI description of a route; `openapi.py` adds path, method, and the handler's name and docstring."""

    body: type[BaseModel] | None = None
    example: Mapping[str, Any] | None = None
    _: KW_ONLY
    media_type: str | None = JSON
    """Content type of the response; None for an empty response."""

    json_type: str | list[str] = "object"
    """JSON type or types of a JSON response."""

    stream_type: str | None = None
    """Content type of the response if the body requests a stream."""

    query: tuple[str, ...] = ()
    """Names of optional query parameters, all of them strings."""

    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Errors of this route besides those of all, by status."""


DEFAULT_DOCS = RouteDocs()


class ApiRoute(Route):
    """A route whose handler returns a response, or an object to be sent as JSON. GET routes answer HEAD as
    well."""

    def __init__(self, method: str, path: str, handler: Handler, docs: RouteDocs | None):
        async def endpoint(request: Request) -> Response:
            result = await handler(request)
            return result if isinstance(result, Response) else JSONResponse(result)

        super().__init__(
            path, endpoint, methods=[method], name=handler.__name__, include_in_schema=docs is not None
        )
        self.method = method
        self.handler = handler
        self.docs = docs

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as Starlette does, and name the route in the scope for the request log and the metrics."""
        match, child_scope = super().matches(scope)
        return match, child_scope if match is Match.NONE else {**child_scope, "route": self}


class Router:
    """Routes of one API, collected by the decorators `get`, `head`, `post` and `delete`."""

    def __init__(self, prefix: str = "", *, in_schema: bool = True):
        """prefix: start of every path; in_schema: whether `/openapi.json` lists the routes."""
        self.prefix = prefix
        self.in_schema = in_schema
        self.routes: list[ApiRoute] = []

    def add(self, method: str, path: str, docs: RouteDocs, *, in_schema: bool = True) -> Decorator:
        def decorate(handler: Handler) -> Handler:
            shown = docs if in_schema and self.in_schema else None
            self.routes.append(ApiRoute(method, self.prefix + path, handler, shown))
            return handler

        return decorate

    def get(self, path: str, docs: RouteDocs = DEFAULT_DOCS, *, in_schema: bool = True) -> Decorator:
        return self.add("GET", path, docs, in_schema=in_schema)

    def head(self, path: str, docs: RouteDocs = DEFAULT_DOCS) -> Decorator:
        return self.add("HEAD", path, docs)

    def post(self, path: str, docs: RouteDocs = DEFAULT_DOCS, *, in_schema: bool = True) -> Decorator:
        return self.add("POST", path, docs, in_schema=in_schema)

    def delete(self, path: str, docs: RouteDocs = DEFAULT_DOCS) -> Decorator:
        return self.add("DELETE", path, docs)


async def read_json_body(request: Request) -> JsonObject:
    """The body as a JSON object, whatever its content type. Raises UsageError like `parse_json_object`, and
    BodyTooLarge and BodyTooSlow like `guard.GuardedBody`."""
    return parse_json_object(await request.body())


async def read_model_body(request: Request, models: ModelPool) -> JsonObject:
    """The body as `read_json_body` returns it; `model` defaults to the only loaded model. Raises BadField if there
    is none, or more than one."""
    body = await read_json_body(request)
    if body.get("model") in (None, ""):
        body["model"] = only_model(models)
    return body


def only_model(models: ModelPool) -> str:
    """Name of the only loaded model. Raises BadField if there is none, or more than one."""
    names = [loaded.name for loaded in models.loaded.values()]
    if len(names) != 1:
        loaded = f"{', '.join(names)} are loaded" if names else "no model is loaded"
        raise BadField("model", f"model is missing, and {loaded}", "send the name of one")
    return names[0]
