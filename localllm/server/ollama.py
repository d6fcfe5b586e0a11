"""Ollama's API, where models answer: `/api/generate`, `/api/chat`, `/api/ps`, `/api/version`, `/`. What is done
with models that lie on the disk is in `store.py`; `localllm.api.ollama` reads and writes the bodies."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localllm.api.ollama.bodies import ChatBody, GenerateBody
from localllm.api.ollama.requests import Chat, Generate, read_chat, read_generate
from localllm.api.ollama.responses import Clock, Object, Writer, error_object, rfc3339, whole, without_answer
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.llm import collect
from localllm.request import GenerationEvent
from localllm.request import Request as Prepared
from localllm.server.answers import Answers
from localllm.server.body import body_of
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease, Loaded
from localllm.server.models import Models
from localllm.server.ndjson import line, lines
from localllm.server.openapi import documented
from localllm.server.sse import unless_gone
from localllm.text.grammar.result import check_answer

VERSION = "0.33.0"
"""Of the Ollama whose API this is: clients look here for what they may ask."""

LINES = "application/x-ndjson"

Asked = Chat | Generate


def router(models: Models, inventory: Inventory) -> APIRouter:
    routes = APIRouter()

    @routes.post("/api/generate", **documented(GenerateBody, {"model": "demo", "prompt": "Hello"}, streams=LINES))
    async def generate(request: Request) -> Response:
        return await answer(models, inventory, request, read_generate)

    @routes.post("/api/chat", **documented(ChatBody, {"model": "demo", "messages": []}, streams=LINES))
    async def chat(request: Request) -> Response:
        return await answer(models, inventory, request, read_chat)

    @routes.get("/api/ps")
    async def ps() -> Object:
        return {"models": await asyncio.to_thread(running, list(models.loaded.values()), inventory)}

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def version() -> Object:
        return {"version": VERSION}

    @routes.head("/", include_in_schema=False)
    @routes.get("/", **documented(media="text/plain"))
    async def root() -> Response:
        return PlainTextResponse("Ollama is running")

    return routes


def running(loaded: Sequence[Loaded], inventory: Inventory) -> list[Object]:
    """The models in memory, as `/api/ps` lists them; but for those whose files are gone, which tell nothing."""
    found: list[Object] = []
    for one in loaded:
        with suppress(LocalLLMError):
            llm = one.llm
            found.append(
                {
                    **inventory.described(one.name, llm.path).as_running(),
                    "size": llm.memory.total,
                    "size_vram": 0 if llm.device == "cpu" else llm.memory.total,
                    "expires_at": rfc3339(one.expires_at),
                    "context_length": llm.context,
                }
            )
    return found


async def answer(
    models: Models, inventory: Inventory, request: Request, read: Callable[[Mapping[str, Any]], Asked]
) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    came = time.perf_counter()
    asked = read(await body_of(request))
    if asked.only_loads and asked.keep_alive == 0:
        await let_go(models, asked.model)
        return JSONResponse(without_answer(asked, "unload"))
    lease = await leased(models, inventory, asked.model, asked.keep_alive, asked.room)
    with lease:
        if asked.only_loads:
            return JSONResponse(without_answer(asked, "load"))
        clock = Clock(came, time.perf_counter())
        # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
        llm, prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        writer = Writer(asked, prepared, lease.texts, clock)
        with ExitStack() as held:  # what is refused now has a status of its own
            held.enter_context(lease.kept())
            answers = held.enter_context(Answers(llm, [prepared]))
            if asked.stream:
                return lines(streamed(answers, writer), held.pop_all())
            return JSONResponse(await unless_gone(request, gathered(answers, writer, prepared)))


async def leased(
    models: Models, inventory: Inventory, name: str, keep_alive: float | None, wanted: int | None
) -> Lease:
    """With the room that is asked for, as far as the model knows so many tokens. Raises ModelNotFound in Ollama's
    words, which its clients look for."""
    try:
        room = await asyncio.to_thread(inventory.room, name, wanted)
        return await models.lease(name, keep_alive, room)
    except ModelNotFound as error:
        raise not_found(name, error) from error


async def let_go(models: Models, name: str) -> None:
    """Of a model that nobody uses; of one that somebody does once they have ended."""
    try:
        held = models.holds(name)
    except ModelNotFound as error:
        raise not_found(name, error) from error
    if held:
        with await models.lease(name, 0):
            pass


def not_found(name: str, error: ModelNotFound) -> ModelNotFound:
    return ModelNotFound(f"model '{name}' not found", error.remedy)


async def gathered(answers: Answers, writer: Writer, prepared: Prepared) -> Object:
    """Raises OutputInvalid as `check_answer`; of an answer that was cut, `done_reason` says so."""
    pieces, chunks = list[GenerationEvent](), list[Object]()
    async for _, piece in answers:
        pieces.append(piece)
        chunks += writer.push(piece, time.perf_counter())
    await asyncio.to_thread(check_answer, prepared, collect(prepared, pieces), of_stranger=True)
    return whole(chunks)


async def streamed(answers: Answers, writer: Writer) -> AsyncGenerator[bytes]:
    """Lines up to the one that is done; or up to one with an error, which is the last."""
    try:
        async for _, piece in answers:
            for chunk in writer.push(piece, time.perf_counter()):
                yield line(chunk)
    except LocalLLMError as error:
        yield line(error_object(error))
