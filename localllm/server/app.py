"""The application: the guard before it, a router an API, and what becomes of errors."""

from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm import __version__
from localllm.errors import LocalLLMError, NoSuchRoute
from localllm.server import (
    admin,
    anthropic,
    embeddings,
    llama_server,
    native_api,
    ollama,
    openai,
    responses,
    store,
    web,
)
from localllm.server.access import AccessPolicy
from localllm.server.guard import ConnectionLimits, Guard, error_response
from localllm.server.inventory import Inventory
from localllm.server.logs import RequestLogger
from localllm.server.models import ModelPool
from localllm.server.openapi import add_openapi_route
from localllm.server.prometheus import ServerMetrics

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
CLIENT_CLOSED_STATUS = 499  # nobody reads it; the logs of other servers have the number


def create_app(
    models: ModelPool,
    access: AccessPolicy = AccessPolicy(),  # noqa: B008 - frozen, as the next
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    *,
    log_prompts: bool = False,
    strict: bool = False,
) -> FastAPI:
    """Pages that describe the API are left out: they load scripts from elsewhere. log_prompts: log what is
    asked, too; strict: refuse fields that have no effect."""
    app = FastAPI(
        title="localllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(HeadRequests, routes=app.router.routes)
    app.add_middleware(Guard, access=access, limits=limits)
    sums = ServerMetrics(models)
    app.add_middleware(RequestLogger, metrics=sums, log_prompts=log_prompts, strict=strict)
    app.include_router(openai.router(models))
    app.include_router(responses.responses_router(models))
    app.include_router(anthropic.router(models))
    inventory = Inventory(models.aliases)
    app.include_router(embeddings.router(models, inventory))
    app.include_router(ollama.router(models, inventory))
    app.include_router(store.router(models, inventory))
    app.include_router(llama_server.router(models))
    app.include_router(admin.router(models, sums))
    app.include_router(native_api.router(models))
    app.include_router(native_api.status_router(models, sums.recent_latencies))
    app.include_router(web.router())
    add_openapi_route(app)
    app.add_exception_handler(LocalLLMError, handle_error)
    app.add_exception_handler(HTTPException, handle_no_route)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_fault)
    return app


async def handle_error(request: Request, error: Any) -> Response:
    return error_response(cast(LocalLLMError, error), request.url.path)


class HeadRequests:
    """Middleware: answers HEAD as GET without the content, where no route answers HEAD itself."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]):
        self.app = app
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if not is_head or is_routed(self.routes, scope):
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, send_head)


def allowed_methods(request: Request) -> list[str]:
    """Those that routes of this path take."""
    routes = request.app.router.routes
    taken = {method for method in METHODS if is_routed(routes, {**request.scope, "method": method})}
    return sorted(taken | ({"HEAD"} if "GET" in taken else set()))


def is_routed(routes: Sequence[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


async def handle_no_route(request: Request, error: Any) -> Response:
    path = request.url.path
    methods = allowed_methods(request)
    if methods and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": ", ".join([*methods, "OPTIONS"])})
    if allowed := ", ".join(methods):
        error.headers = {**(error.headers or {}), "Allow": allowed}
        what, remedy = f"{path} does not take {request.method}", f"send {allowed}"
    else:
        what, remedy = f"{request.method} {path} is not served here", "GET /openapi.json lists what is"
    return error_response(NoSuchRoute(what, remedy, error.status_code), path, error.headers)


async def handle_disconnect(_: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def handle_fault(request: Request, error: Any) -> Response:
    """The log has the trace; strangers are not told it."""
    return error_response(LocalLLMError("a fault of localllm", "its log has more"), request.url.path)
