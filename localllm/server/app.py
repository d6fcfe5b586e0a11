"""The ASGI application, from the options of a server: middleware, one router per API, and error handlers.

Built on Starlette alone. Bodies are validated in `localllm.api`, whose errors name the field in each API's own
format, so FastAPI would add routing and an OpenAPI listing only, at 90 ms of import time.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from localllm.errors import LocalLLMError, NoSuchRoute, QueueFull, UsageError
from localllm.hub.resolve import ModelRef
from localllm.llm.embedder import Embedder
from localllm.llm.llm import LLM
from localllm.server import (
    admin,
    anthropic,
    embeddings,
    llama_server,
    native_api,
    ollama,
    openai,
    openapi,
    responses,
    simulation,
    store,
    web,
)
from localllm.server.access import AccessPolicy
from localllm.server.guard import ConnectionLimits, Guard, error_response
from localllm.server.inventory import Inventory
from localllm.server.logs import CLIENT_CLOSED_STATUS, RequestLogger
from localllm.server.models import DEFAULT_KEEP_ALIVE_S, ModelPool, run_in_daemon_thread
from localllm.server.prometheus import ServerMetrics, TokenPrice
from localllm.server.request_stats import RequestCounter
from localllm.server.routing import Router
from localllm.server.simulation import SimulationPool
from localllm.server.slots import SlotFiles
from localllm.settings import Settings

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


@dataclass(frozen=True)
class ServerSetup:
    """Configuration of a server process, as data: `localllm serve` builds its application from it, and so does
    every replica, in a process of its own."""

    models: Sequence[str]  # loaded at the start
    load: Callable[[str | ModelRef, int | None], LLM | Embedder]
    access: AccessPolicy
    _: KW_ONLY
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    max_models: int | None = None
    log_prompts: bool = False
    strict: bool = False
    slot_folder: Path | None = None
    token_price: TokenPrice | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables to set before the first model is loaded."""

    def behind_front(self, environment: Mapping[str, str]) -> "ServerSetup":
        """The setup of a replica. environment: variables that it sets"""
        return replace(self, access=self.access.behind_front(), environment=environment)

    def build(self) -> tuple[Starlette, ModelPool]:
        """Load the models and build the application. Raises what `load` raises, and UsageError for a folder of
        slots that cannot be used."""
        os.environ.update(self.environment)
        settings = Settings.from_environment()
        slot_files = SlotFiles(self.slot_folder) if self.slot_folder else None
        warn: Callable[..., Any] = logging.getLogger("localllm.models").warning
        pool = ModelPool(
            self.load,
            keep_alive=self.keep_alive_s,
            max_models=self.max_models,
            record_steps=lambda llm: llm.record_steps(settings.home, warn),
        )
        for model in self.models:
            pool.add_preloaded(self.load(model, None), model)
        app = create_app(
            pool,
            self.access,
            log_prompts=self.log_prompts,
            strict=self.strict,
            slot_files=slot_files,
            token_price=self.token_price,
        )
        return app, pool


def create_app(
    models: ModelPool,
    access: AccessPolicy = AccessPolicy(),  # noqa: B008 - frozen, as the next
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    *,
    log_prompts: bool = False,
    strict: bool = False,
    slot_files: SlotFiles | None = None,
    token_price: TokenPrice | None = None,
) -> Starlette:
    """Build the application that serves `models`.

    log_prompts: write prompts to the log as well; strict: refuse fields that have no effect; slot_files: where
    slots are saved; token_price: counts the cost of each key.
    """
    metrics = ServerMetrics(models, token_price)
    inventory = Inventory(models.aliases)
    simulations = SimulationPool(models.aliases)
    routers = (
        openai.router(models),
        responses.router(models),
        anthropic.router(models),
        embeddings.router(models, inventory),
        ollama.router(models, inventory),
        store.router(models, inventory),
        llama_server.router(models, slot_files),
        admin.router(models, metrics),
        native_api.router(models, metrics.recent_latencies, access),
        simulation.router(simulations),
        web.router(),
    )
    app = assemble(routes_of(routers), metrics, access, limits, log_prompts=log_prompts, strict=strict)
    app.state.simulations = simulations  # whose owner closes it
    return app


def create_simulation_app(aliases: Mapping[str, str]) -> Starlette:
    """Build the application of `localllm simulate --ui`: the page of simulations alone, for this machine.

    aliases: as in SimulationPool
    """
    simulations = SimulationPool(aliases)
    metrics = ServerMetrics(ModelPool(refuse_to_load))
    routers = (simulation.router(simulations, has_chat=False), web.router(has_chat=False))
    app = assemble(routes_of(routers), metrics, AccessPolicy(), ConnectionLimits())
    app.state.simulations = simulations
    return app


def refuse_to_load(name: Any, context: int | None) -> NoReturn:
    raise UsageError("this server answers no prompts", "start one with `localllm serve`")


def routes_of(routers: Sequence[Router]) -> list[BaseRoute]:
    """All routes, and the one that describes them."""
    routes = [route for router in routers for route in router.routes]
    return [*routes, *openapi.router(routes).routes]


def assemble(
    routes: Sequence[BaseRoute],
    metrics: RequestCounter,
    access: AccessPolicy,
    limits: ConnectionLimits,
    *,
    log_prompts: bool = False,
    strict: bool = False,
) -> Starlette:
    """Build an application with these routes and the middleware of every server."""
    app = Starlette(
        routes=list(routes),
        middleware=[
            Middleware(RequestLogger, metrics=metrics, log_prompts=log_prompts, strict=strict),
            Middleware(Guard, access=access, limits=limits),
        ],
        exception_handlers={
            LocalLLMError: handle_error,
            HTTPException: handle_no_route,
            ClientDisconnect: handle_disconnect,
            Exception: handle_fault,
        },
    )
    app.router.redirect_slashes = False
    return app


async def handle_error(request: Request, error: Any) -> Response:
    if isinstance(error, QueueFull):
        if not error.forecast.is_fresh:
            await run_in_daemon_thread(error.forecast.refresh)
        error.retry_after = error.forecast.retry_after()
    return error_response(cast(LocalLLMError, error), request.url.path)


async def handle_no_route(request: Request, error: Any) -> Response:
    """404 for an unknown path, 405 with Allow for a known one, 204 with Allow for OPTIONS."""
    path, methods = request.url.path, allowed_methods(request)
    if methods and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": ", ".join([*methods, "OPTIONS"])})
    if allowed := ", ".join(methods):
        error.headers = {**(error.headers or {}), "Allow": allowed}
        message, remedy = f"{path} does not accept {request.method}", f"send {allowed}"
    else:
        message, remedy = f"there is no route {request.method} {path}", "GET /openapi.json lists all routes"
    return error_response(NoSuchRoute(message, remedy, error.status_code), path, error.headers)


def allowed_methods(request: Request) -> list[str]:
    """Methods for which some route matches the path, in alphabetical order."""
    routes = request.app.router.routes
    scopes = [{**request.scope, "method": method} for method in METHODS]
    return [scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in routes)]


async def handle_disconnect(_: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def handle_fault(request: Request, error: Any) -> Response:
    """500 for an exception that no handler expects; the traceback goes to the log, not to the client."""
    fault = LocalLLMError("internal error", "see the server's log for the traceback")
    return error_response(fault, request.url.path)
