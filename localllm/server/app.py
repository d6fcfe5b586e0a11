"""The application: the guard before it, a router an API, and what becomes of errors."""

from typing import Any, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from localllm import __version__
from localllm.errors import LocalLLMError, NoSuchRoute
from localllm.server import (
    admin,
    anthropic,
    embeddings,
    native_api,
    ollama,
    openai,
    overview,
    responses,
    store,
    web,
)
from localllm.server.access import AccessPolicy
from localllm.server.errors import error_response
from localllm.server.guard import Guard
from localllm.server.inventory import Inventory
from localllm.server.limits import ConnectionLimits
from localllm.server.logs import RequestLogger
from localllm.server.models import ModelPool
from localllm.server.openapi import add_openapi_route
from localllm.server.prometheus import ServerMetrics

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
    app.include_router(admin.router(models, sums))
    app.include_router(native_api.router(models))
    app.include_router(overview.status_router(models, sums.recent_latencies))
    app.include_router(web.router())
    add_openapi_route(app)
    app.add_exception_handler(LocalLLMError, handle_error)
    app.add_exception_handler(HTTPException, handle_no_route)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_fault)
    return app


async def handle_error(request: Request, error: Any) -> Response:
    return error_response(cast(LocalLLMError, error), request.url.path)


async def handle_no_route(request: Request, error: Any) -> Response:
    path = request.url.path
    if allowed := (error.headers or {}).get("Allow"):
        what, remedy = f"{path} does not take {request.method}", f"send {allowed}"
    else:
        what, remedy = f"{request.method} {path} is not served here", "GET /openapi.json lists what is"
    return error_response(NoSuchRoute(what, remedy, error.status_code), path, error.headers)


async def handle_disconnect(_: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def handle_fault(request: Request, error: Any) -> Response:
    """The log has the trace; strangers are not told it."""
    return error_response(LocalLLMError("a fault of localllm", "its log has more"), request.url.path)
