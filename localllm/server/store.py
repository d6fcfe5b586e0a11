"""Ollama's API, where models lie on the disk: `/api/tags`, `show`, `pull`, `push`, `create`, `copy`, `delete`,
`blobs`. `localllm.api.ollama` reads and writes the bodies."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.ollama.bodies import (
    CopyBody,
    CreateBody,
    NameBody,
    PullBody,
    ShowBody,
    model_name,
    parse_body,
    parse_create_request,
)
from localllm.api.ollama.responses import JsonObject, error_object
from localllm.errors import ClientLeft, LocalLLMError, ModelNotFound, NotSupported, UsageError
from localllm.hardware.device import resolve_device, total_bytes
from localllm.hub.assign_name import assigned_target, copy_name, remove_name
from localllm.hub.catalog import CatalogEntry
from localllm.hub.hf_cache import SHA256
from localllm.hub.listing import RemoteFile
from localllm.hub.names import RepoName, is_path, parse_name, strip_latest
from localllm.hub.pull import PullPlan
from localllm.hub.remove import Removal, plan_removal, removable_repo
from localllm.hub.uploaded_blobs import BlobUpload, blob_file
from localllm.llm.create import create
from localllm.plan.expected import memory_of
from localllm.plan.fit import LoadOptions
from localllm.server.body import read_json_body
from localllm.server.inventory import Inventory
from localllm.server.models import ModelPool, run_in_daemon_thread
from localllm.server.openapi import route_docs
from localllm.server.sse import ndjson_line, ndjson_response, run_until_disconnect
from localllm.settings import Settings

# A pull as Ollama's API tells it: a status a line, and how far each file has come.

BackgroundWork = Callable[["ProgressReporter"], object]

PROGRESS_INTERVAL_S = 0.1  # between two lines about one file


class ProgressReporter:
    """Follows what a thread does, for a reader on the event loop. `Show` of a pull."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        self.is_abandoned = threading.Event()
        self.lock = threading.Lock()
        self.received_bytes: dict[str, int] = {}  # bytes, by digest
        self.reported_at: dict[str, float] = {}

    def report(self, status: str, **more: Any) -> None:
        """Raises Left where nobody listens."""
        if self.is_abandoned.is_set():
            raise ClientLeft("nobody waits for it any more")
        self.put_line({"status": status, **more})

    def put_line(self, line: JsonObject | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.lines.put_nowait, line)

    def begin(self, order: PullPlan) -> None:
        self.received_bytes = dict(order.cached_bytes)
        for file in order.files:
            self.report_file(file)

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.received_bytes[file.digest] = self.received_bytes.get(file.digest, 0) + count
            now = time.monotonic()
            due = now - self.reported_at.get(file.digest, 0.0) >= PROGRESS_INTERVAL_S
            if due:
                self.reported_at[file.digest] = now
        if self.is_abandoned.is_set():
            raise ClientLeft("nobody waits for it any more")
        if due:
            self.report_file(file)

    def finish(self, file: RemoteFile) -> None:
        self.received_bytes[file.digest] = file.size
        self.report_file(file)

    def say(self, text: str) -> None:
        self.report(text)

    def report_file(self, file: RemoteFile) -> None:
        kind = "sha256" if SHA256.fullmatch(file.digest) else "sha1"
        completed = min(self.received_bytes.get(file.digest, 0), file.size)
        self.report(
            f"pulling {file.digest[:12]}", digest=f"{kind}:{file.digest}", total=file.size, completed=completed
        )


async def progress_lines(work: BackgroundWork) -> AsyncGenerator[JsonObject]:
    """What a thread tells, as it does; at last the error that ended it is raised. Where the reader leaves, `work`
    hears of it the next time that it says something, and is waited for."""
    told = ProgressReporter()

    def run() -> None:
        try:
            work(told)
        finally:
            told.put_line(None)

    running = asyncio.ensure_future(
        run_in_daemon_thread(run)
    )  # for minutes: prompts are prepared by those of the loop
    try:
        while (line := await told.lines.get()) is not None:
            yield line
        await running
    finally:
        told.is_abandoned.set()
        if not running.done():
            with suppress(LocalLLMError):
                await asyncio.shield(running)


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
        fetch(repo, progress, lambda: memory_of(place, total_bytes(place), settings), wish, force=False)
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
