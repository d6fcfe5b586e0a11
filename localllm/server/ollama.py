"""Routes of Ollama's API that run models: `/api/generate`, `/api/chat`, `/api/ps`, `/api/version`, `/`.

`store.py` has those for models on disk; `localllm.api.ollama` has the formats.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localllm.api.ollama.bodies import ChatBody, GenerateBody
from localllm.api.ollama.requests import OllamaChat, OllamaGenerate, parse_chat_request, parse_generate_request
from localllm.api.ollama.responses import (
    ChunkWriter,
    RequestTimes,
    empty_answer,
    error_object,
    format_rfc3339,
    merge_chunks,
)
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.request import GenerationEvent
from localllm.server.answers import AnswerReader
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease, LoadedModel
from localllm.server.models import ModelPool
from localllm.server.routing import JsonObject, RouteDocs, Router, read_model_body
from localllm.server.streaming import NDJSON, StreamResponse, ndjson_line, run_until_disconnect

OLLAMA_VERSION = "0.33.0"
"""The version of Ollama whose API this is; clients decide by it what they may send."""

GENERATE_EXAMPLE = {"model": "demo", "prompt": "Hello"}

ParsedBody = OllamaChat | OllamaGenerate


def router(models: ModelPool, inventory: Inventory) -> Router:
    routes = Router()

    @routes.post("/api/generate", RouteDocs(GenerateBody, GENERATE_EXAMPLE, stream_type=NDJSON))
    async def generate(request: Request) -> Response:
        return await answer(models, inventory, request, parse_generate_request)

    @routes.post("/api/chat", RouteDocs(ChatBody, {"model": "demo", "messages": []}, stream_type=NDJSON))
    async def chat(request: Request) -> Response:
        return await answer(models, inventory, request, parse_chat_request)

    @routes.get("/api/ps")
    async def ps(_: Request) -> JsonObject:
        return {"models": await asyncio.to_thread(running_models, list(models.loaded.values()), inventory)}

    @routes.get("/api/version")
    async def version(_: Request) -> JsonObject:
        return {"version": OLLAMA_VERSION}

    @routes.get("/", RouteDocs(media_type="text/plain"))
    async def root(_: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    return routes


async def answer(
    models: ModelPool, inventory: Inventory, request: Request, parse: Callable[[Mapping[str, Any]], ParsedBody]
) -> Response:
    """Raises LocalLLMError for an invalid body, and for any failure before the first chunk is sent."""
    arrived_at = time.perf_counter()
    parsed = parse(await read_model_body(request, models))
    if parsed.is_load_only and parsed.keep_alive == 0:
        await unload_model(models, parsed.model)
        return JSONResponse(empty_answer(parsed, "unload"))
    lease = await lease_model(models, inventory, parsed.model, parsed.keep_alive, parsed.num_ctx)
    with lease:
        if parsed.is_load_only:
            return JSONResponse(empty_answer(parsed, "load"))
        if isinstance(parsed, OllamaChat):
            lease.ensure_chat_template()
        times = RequestTimes(arrived_at, time.perf_counter())
        # Rendering and encoding a long prompt takes time, during which other answers must continue.
        llm, prepared = await asyncio.to_thread(parsed.prepare, lease.llm)
        writer = ChunkWriter(parsed, prepared, lease.token_texts, times)
        with ExitStack() as stack:  # submit now, so that a refusal gets its own status
            stack.enter_context(lease.renew())
            answers = stack.enter_context(AnswerReader(llm, [prepared]))
            if parsed.stream:
                return StreamResponse(stream_answer(answers, writer), stack.pop_all(), NDJSON)
            return JSONResponse(await run_until_disconnect(request, complete_answer(answers, writer)))


async def complete_answer(answers: AnswerReader, writer: ChunkWriter) -> JsonObject:
    """Raises OutputInvalid for an answer that does not match its grammar, unless it was cut off."""
    chunks: list[JsonObject] = []

    def write(_: int, event: GenerationEvent) -> None:
        chunks.extend(writer.chunks_for(event, time.perf_counter()))

    await answers.completions(write)
    return merge_chunks(chunks)


async def stream_answer(answers: AnswerReader, writer: ChunkWriter) -> AsyncGenerator[bytes]:
    """Lines up to the one with `done`, or up to an error."""
    try:
        while events := await answers.next_events():
            chunks = [each for _, event in events for each in writer.chunks_for(event, time.perf_counter())]
            if chunks:
                yield b"".join(map(ndjson_line, chunks))
    except LocalLLMError as error:
        yield ndjson_line(error_object(error))


async def lease_model(
    models: ModelPool, inventory: Inventory, name: str, keep_alive: float | None, context: int | None
) -> Lease:
    """Lease a model. context: requested tokens, which the model's own maximum limits. Raises ModelNotFound in
    Ollama's words, which its clients parse."""
    try:
        ref = models.resolve(name)
        context = await asyncio.to_thread(inventory.context_for, ref, context)
        return await models.lease(name, keep_alive, context, ref=ref)
    except ModelNotFound as error:
        raise model_not_found(name, error) from error


async def unload_model(models: ModelPool, name: str) -> None:
    """Unload a model, now or when its running requests have ended. Raises ModelNotFound in Ollama's words."""
    try:
        ref = models.resolve(name)
    except ModelNotFound as error:
        raise model_not_found(name, error) from error
    if ref.key in models.loaded:
        with await models.lease(name, 0, ref=ref):
            pass


def model_not_found(name: str, error: ModelNotFound) -> ModelNotFound:
    return ModelNotFound(f"model '{name}' not found", error.remedy)


def running_models(models: Sequence[LoadedModel], inventory: Inventory) -> list[JsonObject]:
    """Loaded models as `/api/ps` lists them, without those whose files are gone."""
    objects: list[JsonObject] = []
    for loaded in models:
        llm = loaded.llm
        with suppress(LocalLLMError):
            objects.append(
                {
                    **inventory.details_of(loaded.name, llm.path).running_object(),
                    "size": llm.memory.total,
                    "size_vram": 0 if llm.device == "cpu" else llm.memory.total,
                    "expires_at": format_rfc3339(loaded.expires_at),
                    "context_length": llm.context,
                }
            )
    return objects
