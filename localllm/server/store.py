"""Routes of Ollama's API for models on disk: `/api/tags`, `show`, `pull`, `push`, `create`, `copy`, `delete`,
`blobs`. `localllm.api.ollama` has the formats."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.body import validate
from localllm.api.ollama.bodies import (
    CopyBody,
    CreateBody,
    NameBody,
    PullBody,
    ShowBody,
    model_name,
    parse_create_request,
)
from localllm.api.ollama.responses import error_object
from localllm.checkpoint.kept_layouts import kept_files_of
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
from localllm.server.inventory import Inventory
from localllm.server.models import ModelPool, run_in_daemon_thread
from localllm.server.routing import JsonObject, RouteDocs, Router, read_json_body
from localllm.server.streaming import NDJSON, StreamResponse, ndjson_line, run_until_disconnect
from localllm.settings import Settings

PROGRESS_INTERVAL_S = 0.1  # between two lines about one file

BackgroundWork = Callable[["ProgressReporter"], object]


def router(models: ModelPool, inventory: Inventory) -> Router:
    routes = Router("/api")

    @routes.get("/tags")
    async def tags(_: Request) -> JsonObject:
        return {"models": [model.listed_object() for model in await asyncio.to_thread(inventory.list_models)]}

    @routes.post("/show", RouteDocs(ShowBody))
    async def show(request: Request) -> JsonObject:
        body = validate(ShowBody, await read_json_body(request))
        describe = partial(inventory.show, model_name(body), body.system or "", body.template or "")
        return await asyncio.to_thread(describe, verbose=bool(body.verbose))

    @routes.post("/pull", RouteDocs(PullBody, stream_type=NDJSON))
    async def pull(request: Request) -> Response:
        body = validate(PullBody, await read_json_body(request))
        if body.insecure:
            raise UsageError("insecure is not supported", "leave it out")
        repo = repo_to_pull(model_name(body))
        return await progress_response(request, partial(pull_model, repo), stream=body.stream)

    @routes.post("/push")
    async def push(_: Request) -> Response:
        raise NotSupported("push is not supported", "publish models with the tools of the Hub")

    @routes.post("/create", RouteDocs(CreateBody, stream_type=NDJSON))
    async def create_edition(request: Request) -> Response:
        plan, stream = parse_create_request(await read_json_body(request), models.aliases)
        return await progress_response(request, lambda progress: create(plan, progress.report), stream=stream)

    @routes.post("/copy", RouteDocs(CopyBody, media_type=None))
    async def copy(request: Request) -> Response:
        body = validate(CopyBody, await read_json_body(request))
        source = body.source if body.source in models.aliases else strip_latest(body.source)
        inventory.path_of(source, body.source)
        await asyncio.to_thread(copy_name, body.destination, models.aliases.get(body.source, source))
        return Response()

    @routes.delete("/delete", RouteDocs(NameBody, media_type=None))
    async def delete(request: Request) -> Response:
        name = model_name(validate(NameBody, await read_json_body(request)))
        if removal := await asyncio.to_thread(removal_of, name):
            await models.unload_for_removal(name)
            await asyncio.to_thread(remove_download, removal)
        else:
            await asyncio.to_thread(remove_name, strip_latest(name))
        return Response()

    @routes.head("/blobs/{digest}", RouteDocs(media_type=None))
    async def has_blob(request: Request) -> Response:
        return Response(status_code=200 if blob_file(request.path_params["digest"]).is_file() else 404)

    @routes.post("/blobs/{digest}", RouteDocs(media_type=None))
    async def send_blob(request: Request) -> Response:
        digest = request.path_params["digest"]
        if blob_file(digest).is_file():
            return Response()
        announced = request.headers.get("content-length", "")
        with BlobUpload(digest, int(announced) if announced.isdecimal() else None) as upload:
            async for content in request.stream():
                await asyncio.to_thread(upload.write, content)
            await asyncio.to_thread(upload.finish)
        return Response(status_code=201)

    return routes


class ProgressReporter:
    """Progress of work in a thread, as lines for a reader on the event loop. Implements `PullProgress`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        self.is_abandoned = threading.Event()
        self.lock = threading.Lock()
        self.received_bytes: dict[str, int] = {}  # by digest
        self.reported_at: dict[str, float] = {}  # monotonic time by digest

    def report(self, status: str, **fields: Any) -> None:
        """Raises ClientLeft if the client has disconnected."""
        self.check_reader()
        self.put_line({"status": status, **fields})

    def check_reader(self) -> None:
        if self.is_abandoned.is_set():
            raise ClientLeft("the client has disconnected")

    def put_line(self, line: JsonObject | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.lines.put_nowait, line)

    def begin(self, order: PullPlan) -> None:
        self.received_bytes = dict(order.cached_bytes)
        for file in order.files:
            self.report_file(file)

    def advance(self, file: RemoteFile, count: int) -> None:
        """Add `count` received bytes. Raises ClientLeft if the client has disconnected."""
        with self.lock:
            self.received_bytes[file.digest] = self.received_bytes.get(file.digest, 0) + count
            now = time.monotonic()
            is_due = now - self.reported_at.get(file.digest, 0.0) >= PROGRESS_INTERVAL_S
            if is_due:
                self.reported_at[file.digest] = now
        self.check_reader()
        if is_due:
            self.report_file(file)

    def finish(self, file: RemoteFile) -> None:
        self.received_bytes[file.digest] = file.size
        self.report_file(file)

    def say(self, text: str) -> None:
        self.report(text)

    def report_file(self, file: RemoteFile) -> None:
        algorithm = "sha256" if SHA256.fullmatch(file.digest) else "sha1"
        completed = min(self.received_bytes.get(file.digest, 0), file.size)
        digest = f"{algorithm}:{file.digest}"
        self.report(f"pulling {file.digest[:12]}", digest=digest, total=file.size, completed=completed)


async def progress_response(request: Request, work: BackgroundWork, *, stream: bool | None) -> Response:
    """The progress of `work` as a stream, or its last status alone. Raises LocalLLMError from `work` if it is not
    streamed."""
    if stream is not False:
        return StreamResponse(stream_progress(work), nullcontext(), NDJSON)
    return JSONResponse(await run_until_disconnect(request, last_status(work)))


async def stream_progress(work: BackgroundWork) -> AsyncGenerator[bytes]:
    """Lines up to `success`, or up to an error. Raises LocalLLMError if the work fails before the first line."""
    started = False
    try:
        async with aclosing(progress_lines(work)) as lines:
            async for line in lines:
                started = True
                yield ndjson_line(line)
    except LocalLLMError as error:
        if not started:
            raise
        yield ndjson_line(error_object(error))


async def last_status(work: BackgroundWork) -> JsonObject:
    async with aclosing(progress_lines(work)) as lines:
        return [line async for line in lines][-1]


async def progress_lines(work: BackgroundWork) -> AsyncGenerator[JsonObject]:
    """Run `work` in a thread and yield the lines that it reports. Raises its error at the end.

    If the reader stops early, `work` gets ClientLeft at its next report, and is waited for.
    """
    progress = ProgressReporter()

    def run() -> None:
        try:
            work(progress)
        finally:
            progress.put_line(None)

    # Not in the loop's thread pool, which prepares prompts: a pull takes minutes.
    running = asyncio.ensure_future(run_in_daemon_thread(run))
    try:
        while (line := await progress.lines.get()) is not None:
            yield line
        await running
    finally:
        progress.is_abandoned.set()
        if not running.done():
            with suppress(LocalLLMError):
                await asyncio.shield(running)


def repo_to_pull(name: str) -> RepoName | None:
    """Repository of a model name; None for the built-in model. Raises UsageError for other names."""
    if is_path(name) and assigned_target(strip_latest(name)) is None:
        raise UsageError("invalid model name", "send ORG/REPO or a name of the catalogue")
    match parse_name(name):
        case RepoName() as repo:
            return repo
        case CatalogEntry():
            return None
    raise UsageError(f"{name} was created on this machine", "there is nothing to pull")


def pull_model(repo: RepoName | None, progress: ProgressReporter) -> None:
    """Download a repository, reporting the same statuses as Ollama."""
    progress.report("pulling manifest")
    if repo:
        from localllm.llm.fetch import fetch  # imports huggingface_hub

        settings = Settings.from_environment()
        device = resolve_device(settings.device)
        options = LoadOptions(dtype=settings.dtype, kv_dtype=settings.kv_dtype)
        fetch(repo, progress, lambda: memory_of(device, total_bytes(device), settings), options, force=False)
    progress.report("verifying sha256 digest")
    progress.report("writing manifest")
    progress.report("success")


def remove_download(removal: Removal) -> None:
    """Remove a download, and its weights that `--keep-layout` has kept. Raises the errors of `Removal.execute`."""
    paths = (file.path for file in removal.files)
    for layout in kept_files_of(removal.repo, paths, Settings.from_environment().cache):
        layout.remove()
    removal.execute()


def removal_of(client_name: str) -> Removal | None:
    """The files of a download to remove; None for an alias or edition, which is removed alone. Raises
    ModelNotFound, and UsageError for a model that cannot be removed."""
    name = strip_latest(client_name)
    if assigned_target(name) is not None:
        return None
    try:
        if is_path(name):
            raise ModelNotFound("it is a path", "remove models by name")
        return plan_removal(removable_repo(name))
    except ModelNotFound as error:
        raise ModelNotFound(f"model '{client_name}' not found", error.remedy) from error
