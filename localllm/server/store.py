"""Ollama's API, where models lie on the disk: `/api/tags`, `show`, `pull`, `push`, `create`, `copy`, `delete`,
`blobs`. `localllm.api.ollama` reads and writes the bodies."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.ollama.bodies import CopyBody, CreateBody, NameBody, PullBody, ShowBody, name_of, read
from localllm.api.ollama.creating import read_create
from localllm.api.ollama.responses import Object, error_object
from localllm.device import resolve_device, total_bytes
from localllm.errors import LocalLLMError, ModelNotFound, UsageError
from localllm.hub.blobs import Incoming, blob_file
from localllm.hub.catalog import CatalogEntry
from localllm.hub.names import RepoName, is_path, known_as, parse
from localllm.hub.naming import give, given, take
from localllm.hub.remove import Removal, plan_removal, removable
from localllm.making import create
from localllm.plan.fit import Space, Wish
from localllm.server.body import body_of
from localllm.server.inventory import Inventory
from localllm.server.models import Models
from localllm.server.ndjson import line, lines
from localllm.server.openapi import documented
from localllm.server.pulls import Told, Work, told
from localllm.server.sse import unless_gone
from localllm.settings import Settings


class NotServed(LocalLLMError):
    http_status = 501


def router(models: Models, inventory: Inventory) -> APIRouter:
    routes = APIRouter(prefix="/api")

    @routes.head("/tags", include_in_schema=False)
    @routes.get("/tags")
    async def tags() -> Object:
        return {"models": [one.as_listed() for one in await asyncio.to_thread(inventory.all)]}

    @routes.post("/show", **documented(ShowBody))
    async def show(request: Request) -> Object:
        body = read(ShowBody, await body_of(request))
        tell = partial(inventory.shown, name_of(body), body.system or "", body.template or "")
        return await asyncio.to_thread(tell, verbose=bool(body.verbose))

    @routes.post("/pull", **documented(PullBody, streams="application/x-ndjson"))
    async def pull(request: Request) -> Response:
        body = read(PullBody, await body_of(request))
        if body.insecure:
            raise UsageError("insecure is not supported", "leave it out")
        meant = to_fetch(name_of(body))
        return await done(request, partial(fetched, meant), stream=body.stream)

    @routes.post("/push")
    async def push() -> None:
        raise NotServed("nothing is sent anywhere from here", "publish models with the tools of the Hub")

    @routes.post("/create", **documented(CreateBody, streams="application/x-ndjson"))
    async def create_edition(request: Request) -> Response:
        plan, stream = read_create(await body_of(request), models.given)
        return await done(request, lambda told: create(plan, told.tell), stream=stream)

    @routes.post("/copy", **documented(CopyBody))
    async def copy(request: Request) -> Response:
        body = read(CopyBody, await body_of(request))
        name = known_as(body.source)
        inventory.path_of(name if body.source not in models.given else body.source, body.source)
        await asyncio.to_thread(give, body.destination, models.given.get(body.source, name))
        return Response()

    @routes.delete("/delete", **documented(NameBody))
    async def delete(request: Request) -> Response:
        name = name_of(read(NameBody, await body_of(request)))
        if removal := await asyncio.to_thread(to_remove, name):
            await models.drop(name)
            await asyncio.to_thread(removal.execute)
        else:
            await asyncio.to_thread(take, known_as(name))
        return Response()

    @routes.head("/blobs/{digest}")
    async def has_blob(digest: str) -> Response:
        return Response(status_code=200 if blob_file(digest).is_file() else 404)

    @routes.post("/blobs/{digest}")
    async def send_blob(digest: str, request: Request) -> Response:
        if blob_file(digest).is_file():
            return Response()
        announced = request.headers.get("content-length", "")
        with Incoming(digest, int(announced) if announced.isdecimal() else None) as incoming:
            async for content in request.stream():
                await asyncio.to_thread(incoming.write, content)
            await asyncio.to_thread(incoming.finish)
        return Response(status_code=201)

    return routes


async def done(request: Request, work: Work, *, stream: bool | None) -> Response:
    """What takes its time, told as it is done, or its last status alone. Raises what `work` raises, where it is
    not streamed."""
    if stream is not False:
        return lines(streamed(work), nullcontext())
    return JSONResponse(await unless_gone(request, last(work)))


async def streamed(work: Work) -> AsyncGenerator[bytes]:
    """Lines up to `success`, or to one with an error. Raises what keeps it from beginning."""
    begun = False
    try:
        async with aclosing(told(work)) as made:
            async for status in made:
                begun = True
                yield line(status)
    except LocalLLMError as error:
        if not begun:
            raise
        yield line(error_object(error))


async def last(work: Work) -> Object:
    async with aclosing(told(work)) as made:
        return [status async for status in made][-1]


def to_fetch(name: str) -> RepoName | None:
    """None for the model that is here by itself. Raises UsageError for what is no model of the Hub."""
    if is_path(name) and given(known_as(name)) is None:
        raise UsageError("invalid model name", "name ORG/REPO, or a model of the catalogue")
    match parse(name):
        case RepoName() as repo:
            return repo
        case CatalogEntry():
            return None
    raise UsageError(f"{name} was made here", "there is nothing to pull")


def fetched(repo: RepoName | None, told: Told) -> None:
    told.tell("pulling manifest")
    if repo:
        from localllm.fetch import fetch  # with the Hub's library

        settings = Settings.from_environment()
        place = resolve_device(settings.device)
        wish = Wish(dtype=settings.dtype, kv_dtype=settings.kv_dtype)
        fetch(repo, told, lambda: Space(place.type, total_bytes(place)), wish, force=False)
    told.tell("verifying sha256 digest")
    told.tell("writing manifest")
    told.tell("success")


def to_remove(asked: str) -> Removal | None:
    """What goes of a download; None of a name that was given, which goes alone. Raises ModelNotFound, and
    UsageError for what stays."""
    name = known_as(asked)
    if given(name) is not None:
        return None
    try:
        if is_path(name):
            raise ModelNotFound("it is a path", "remove models by name")
        return plan_removal(removable(name))
    except ModelNotFound as error:
        raise ModelNotFound(f"model '{asked}' not found", error.remedy) from error
