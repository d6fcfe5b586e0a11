"""The application: the guard before it, a router an API, and what becomes of errors."""

from typing import Any, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from localllm import __version__
from localllm.errors import LocalLLMError
from localllm.server import admin, anthropic, embeddings, ollama, openai, overview, own, responses, store, web
from localllm.server.access import Access
from localllm.server.guard import Guard
from localllm.server.inventory import Inventory
from localllm.server.limits import Limits
from localllm.server.logs import Logged
from localllm.server.models import Models
from localllm.server.openapi import serve_document
from localllm.server.refusals import answer_of
from localllm.server.sums import Sums

CLIENT_CLOSED = 499  # nobody reads it; the logs of other servers have the number


class NoSuchRoute(LocalLLMError):
    """A path or a method that is not served. `http_status` as the router has it."""

    def __init__(self, message: str, remedy: str, http_status: int):
        super().__init__(message, remedy)
        self.http_status = http_status


def create_app(
    models: Models,
    access: Access = Access(),  # noqa: B008 - frozen, as the next
    limits: Limits = Limits(),  # noqa: B008
    *,
    with_prompts: bool = False,
) -> FastAPI:
    """Pages that describe the API are left out: they load scripts from elsewhere. with_prompts: log what is
    asked, too."""
    app = FastAPI(
        title="localllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Guard, access=access, limits=limits)
    sums = Sums(models)
    app.add_middleware(Logged, sums=sums, with_prompts=with_prompts)
    app.include_router(openai.router(models))
    app.include_router(responses.router(models))
    app.include_router(anthropic.router(models))
    inventory = Inventory(models.given)
    app.include_router(embeddings.router(models, inventory))
    app.include_router(ollama.router(models, inventory))
    app.include_router(store.router(models, inventory))
    app.include_router(admin.router(models, sums))
    app.include_router(own.router(models))
    app.include_router(overview.router(models, sums.recent))
    app.include_router(web.router())
    serve_document(app)
    app.add_exception_handler(LocalLLMError, refused)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, broken)
    return app


async def refused(request: Request, error: Any) -> Response:
    return answer_of(cast(LocalLLMError, error), request.url.path)


async def not_routed(request: Request, error: Any) -> Response:
    path = request.url.path
    if allowed := (error.headers or {}).get("Allow"):
        what, remedy = f"{path} does not take {request.method}", f"send {allowed}"
    else:
        what, remedy = f"{request.method} {path} is not served here", "GET /openapi.json lists what is"
    return answer_of(NoSuchRoute(what, remedy, error.status_code), path, error.headers)


async def left(_: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def broken(request: Request, error: Any) -> Response:
    """The log has the trace; strangers are not told it."""
    return answer_of(LocalLLMError("a fault of localllm", "its log has more"), request.url.path)
