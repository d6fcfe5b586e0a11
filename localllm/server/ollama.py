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
from localllm.api.ollama.requests import OllamaChat, OllamaGenerate, parse_chat_request, parse_generate_request
from localllm.api.ollama.responses import (
    ChunkWriter,
    JsonObject,
    RequestTimes,
    empty_answer,
    error_object,
    format_rfc3339,
    merge_chunks,
)
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.llm.llm import collect_completion
from localllm.request import GenerationEvent
from localllm.request import Request as Prepared
from localllm.server.answers import AnswerReader
from localllm.server.body import read_model_body
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease, LoadedModel
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.sse import ndjson_line, ndjson_response, run_until_disconnect
from localllm.text.grammar.result import check_answer

OLLAMA_VERSION = "0.33.0"
"""Of the Ollama whose API this is: clients look here for what they may ask."""

NDJSON_TYPE = "application/x-ndjson"

ParsedBody = OllamaChat | OllamaGenerate


def router(models: ModelPool, inventory: Inventory) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/api/generate", **route_docs(GenerateBody, {"model": "demo", "prompt": "Hello"}, stream_type=NDJSON_TYPE)
    )
    async def generate(request: Request) -> Response:
        return await answer(models, inventory, request, parse_generate_request)

    @routes.post("/api/chat", **route_docs(ChatBody, {"model": "demo", "messages": []}, stream_type=NDJSON_TYPE))
    async def chat(request: Request) -> Response:
        return await answer(models, inventory, request, parse_chat_request)

    @routes.get("/api/ps")
    async def ps() -> JsonObject:
        return {"models": await asyncio.to_thread(running_models, list(models.loaded.values()), inventory)}

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def version() -> JsonObject:
        return {"version": OLLAMA_VERSION}

    @routes.head("/", include_in_schema=False)
    @routes.get("/", **route_docs(media_type="text/plain"))
    async def root() -> Response:
        return PlainTextResponse("Ollama is running")

    return routes


def running_models(loaded: Sequence[LoadedModel], inventory: Inventory) -> list[JsonObject]:
    """The models in memory, as `/api/ps` lists them; but for those whose files are gone, which tell nothing."""
    found: list[JsonObject] = []
    for one in loaded:
        with suppress(LocalLLMError):
            llm = one.llm
            found.append(
                {
                    **inventory.details_of(one.name, llm.path).running_object(),
                    "size": llm.memory.total,
                    "size_vram": 0 if llm.device == "cpu" else llm.memory.total,
                    "expires_at": format_rfc3339(one.expires_at),
                    "context_length": llm.context,
                }
            )
    return found


async def answer(
    models: ModelPool, inventory: Inventory, request: Request, parse: Callable[[Mapping[str, Any]], ParsedBody]
) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    came = time.perf_counter()
    asked = parse(await read_model_body(request, models))
    if asked.is_load_only and asked.keep_alive == 0:
        await unload_model(models, asked.model)
        return JSONResponse(empty_answer(asked, "unload"))
    lease = await lease_model(models, inventory, asked.model, asked.keep_alive, asked.num_ctx)
    with lease:
        if asked.is_load_only:
            return JSONResponse(empty_answer(asked, "load"))
        if isinstance(asked, OllamaChat):
            lease.ensure_chat_template()
        clock = RequestTimes(came, time.perf_counter())
        # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
        llm, prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        writer = ChunkWriter(asked, prepared, lease.token_texts, clock)
        with ExitStack() as held:  # what is refused now has a status of its own
            held.enter_context(lease.renew())
            answers = held.enter_context(AnswerReader(llm, [prepared]))
            if asked.stream:
                return ndjson_response(stream_answer(answers, writer), held.pop_all())
            return JSONResponse(await run_until_disconnect(request, complete_answer(answers, writer, prepared)))


async def lease_model(
    models: ModelPool, inventory: Inventory, name: str, keep_alive: float | None, wanted: int | None
) -> Lease:
    """With the room that is asked for, as far as the model knows so many tokens. Raises ModelNotFound in Ollama's
    words, which its clients look for."""
    try:
        ref = models.resolve(name)
        context = await asyncio.to_thread(inventory.context_for, ref, wanted)
        return await models.lease(name, keep_alive, context, ref=ref)
    except ModelNotFound as error:
        raise model_not_found(name, error) from error


async def unload_model(models: ModelPool, name: str) -> None:
    """Of a model that nobody uses; of one that somebody does once they have ended."""
    try:
        ref = models.resolve(name)
    except ModelNotFound as error:
        raise model_not_found(name, error) from error
    if ref.key in models.loaded:
        with await models.lease(name, 0, ref=ref):
            pass


def model_not_found(name: str, error: ModelNotFound) -> ModelNotFound:
    return ModelNotFound(f"model '{name}' not found", error.remedy)


async def complete_answer(answers: AnswerReader, writer: ChunkWriter, prepared: Prepared) -> JsonObject:
    """Raises OutputInvalid as `check_answer`; of an answer that was cut, `done_reason` says so."""
    pieces, chunks = list[GenerationEvent](), list[JsonObject]()
    async for _, piece in answers:
        pieces.append(piece)
        chunks += writer.chunks_for(piece, time.perf_counter())
    await asyncio.to_thread(check_answer, prepared, collect_completion(prepared, pieces), untrusted=True)
    return merge_chunks(chunks)


async def stream_answer(answers: AnswerReader, writer: ChunkWriter) -> AsyncGenerator[bytes]:
    """Lines up to the one that is done; or up to one with an error, which is the last."""
    try:
        async for _, piece in answers:
            for chunk in writer.chunks_for(piece, time.perf_counter()):
                yield ndjson_line(chunk)
    except LocalLLMError as error:
        yield ndjson_line(error_object(error))
