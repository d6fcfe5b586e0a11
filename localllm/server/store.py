"""Ollama's API, where models lie on the disk: `/api/tags`, `show`, `pull`, `push`, `create`, `copy`, `delete`,
`blobs`. `localllm.api.ollama` reads and writes the bodies."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.ollama.bodies import CopyBody, CreateBody, NameBody, PullBody, ShowBody, model_name, parse_body
from localllm.api.ollama.creating import parse_create_request
from localllm.api.ollama.responses import JsonObject, error_object
from localllm.errors import LocalLLMError, ModelNotFound, NotSupported, UsageError
from localllm.hardware.device import resolve_device, total_bytes
from localllm.hub.blobs import BlobUpload, blob_file
from localllm.hub.catalog import CatalogEntry
from localllm.hub.names import RepoName, is_path, parse_name, strip_latest
from localllm.hub.naming import assigned_target, copy_name, remove_name
from localllm.hub.remove import Removal, plan_removal, removable_repo
from localllm.llm.create import create
from localllm.plan.fit import FreeMemory, LoadOptions
from localllm.server.body import read_json_body
from localllm.server.inventory import Inventory
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.pulls import BackgroundWork, ProgressReporter, progress_lines
from localllm.server.sse import ndjson_line, ndjson_response, run_until_disconnect
from localllm.settings import Settings


def router(models: ModelPool, inventory: Inventory) -> APIRouter:
    routes = APIRouter(prefix="/api")

    @routes.head("/tags", include_in_schema=False)
    @routes.get("/tags")
    async def tags() -> JsonObject:
        return {"models": [one.listed_object() for one in await asyncio.to_thread(inventory.list_models)]}

    @routes.post("/show", **route_docs(ShowBody))
    async def show(request: Request) -> JsonObject:
        body = parse_body(ShowBody, await read_json_body(request))
        tell = partial(inventory.show, model_name(body), body.system or "", body.template or "")
        return await asyncio.to_thread(tell, verbose=bool(body.verbose))

    @routes.post("/pull", **route_docs(PullBody, stream_type="application/x-ndjson"))
    async def pull(request: Request) -> Response:
        body = parse_body(PullBody, await read_json_body(request))
        if body.insecure:
            raise UsageError("insecure is not supported", "leave it out")
        meant = repo_to_pull(model_name(body))
        return await progress_response(request, partial(pull_model, meant), stream=body.stream)

    @routes.post("/push")
    async def push() -> None:
        raise NotSupported("nothing is sent anywhere from here", "publish models with the tools of the Hub")

    @routes.post("/create", **route_docs(CreateBody, stream_type="application/x-ndjson"))
    async def create_edition(request: Request) -> Response:
        plan, stream = parse_create_request(await read_json_body(request), models.aliases)
        return await progress_response(request, lambda told: create(plan, told.report), stream=stream)

    @routes.post("/copy", **route_docs(CopyBody))
    async def copy(request: Request) -> Response:
        body = parse_body(CopyBody, await read_json_body(request))
        name = strip_latest(body.source)
        inventory.path_of(name if body.source not in models.aliases else body.source, body.source)
        await asyncio.to_thread(copy_name, body.destination, models.aliases.get(body.source, name))
        return Response()

    @routes.delete("/delete", **route_docs(NameBody))
    async def delete(request: Request) -> Response:
        name = model_name(parse_body(NameBody, await read_json_body(request)))
        if removal := await asyncio.to_thread(removal_of, name):
            await models.unload_for_removal(name)
            await asyncio.to_thread(removal.execute)
        else:
            await asyncio.to_thread(remove_name, strip_latest(name))
        return Response()

    @routes.head("/blobs/{digest}")
    async def has_blob(digest: str) -> Response:
        return Response(status_code=200 if blob_file(digest).is_file() else 404)

    @routes.post("/blobs/{digest}")
    async def send_blob(digest: str, request: Request) -> Response:
        if blob_file(digest).is_file():
            return Response()
        announced = request.headers.get("content-length", "")
        with BlobUpload(digest, int(announced) if announced.isdecimal() else None) as incoming:
            async for content in request.stream():
                await asyncio.to_thread(incoming.write, content)
            await asyncio.to_thread(incoming.finish)
        return Response(status_code=201)

    return routes


async def progress_response(request: Request, work: BackgroundWork, *, stream: bool | None) -> Response:
    """What takes its time, told as it is done, or its last status alone. Raises what `work` raises, where it is
    not streamed."""
    if stream is not False:
        return ndjson_response(stream_progress(work), nullcontext())
    return JSONResponse(await run_until_disconnect(request, last_status(work)))


async def stream_progress(work: BackgroundWork) -> AsyncGenerator[bytes]:
    """Lines up to `success`, or to one with an error. Raises what keeps it from beginning."""
    begun = False
    try:
        async with aclosing(progress_lines(work)) as made:
            async for status in made:
                begun = True
                yield ndjson_line(status)
    except LocalLLMError as error:
        if not begun:
            raise
        yield ndjson_line(error_object(error))


async def last_status(work: BackgroundWork) -> JsonObject:
    async with aclosing(progress_lines(work)) as made:
        return [status async for status in made][-1]


def repo_to_pull(name: str) -> RepoName | None:
    """None for the model that is here by itself. Raises UsageError for what is no model of the Hub."""
    if is_path(name) and assigned_target(strip_latest(name)) is None:
        raise UsageError("invalid model name", "name ORG/REPO, or a model of the catalogue")
    match parse_name(name):
        case RepoName() as repo:
            return repo
        case CatalogEntry():
            return None
    raise UsageError(f"{name} was made here", "there is nothing to pull")


def pull_model(repo: RepoName | None, progress: ProgressReporter) -> None:
    progress.report("pulling manifest")
    if repo:
        from localllm.llm.fetch import fetch  # with the Hub's library

        settings = Settings.from_environment()
        place = resolve_device(settings.device)
        wish = LoadOptions(dtype=settings.dtype, kv_dtype=settings.kv_dtype)
        fetch(repo, progress, lambda: FreeMemory(place.type, total_bytes(place)), wish, force=False)
    progress.report("verifying sha256 digest")
    progress.report("writing manifest")
    progress.report("success")


def removal_of(client_name: str) -> Removal | None:
    """What goes of a download; None of a name that was given, which goes alone. Raises ModelNotFound, and
    UsageError for what stays."""
    name = strip_latest(client_name)
    if assigned_target(name) is not None:
        return None
    try:
        if is_path(name):
            raise ModelNotFound("it is a path", "remove models by name")
        return plan_removal(removable_repo(name))
    except ModelNotFound as error:
        raise ModelNotFound(f"model '{client_name}' not found", error.remedy) from error
