"""OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. `localllm.api.openai` reads and writes
it."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm import __version__
from localllm.api.openai.bodies import ChatBody, CompletionBody
from localllm.api.openai.requests import parse_chat_request, parse_completion_request
from localllm.api.openai.responses import (
    JsonObject,
    ResponseHeader,
    chat_completion_object,
    error_object,
    text_completion_object,
)
from localllm.api.openai.streams import ChatStream, TextStream, usage_chunk
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import LocalLLMError
from localllm.hub.resolve import installed_models
from localllm.llm.llm import LLM, collect_completion
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import AnswerReader
from localllm.server.body import read_model_body
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.sse import SSE_DONE, StreamResponse, run_until_disconnect, sse_event
from localllm.text.grammar.result import check_answer

EVENT_STREAM = "text/event-stream"
EXAMPLES: dict[str, JsonObject] = {
    "chat": {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    "text": {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8},
}

RequestParser = Callable[[Mapping[str, Any], SamplingParams], ParsedRequest]


def router(models: ModelPool) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **route_docs(ChatBody, EXAMPLES["chat"], stream_type=EVENT_STREAM))
    @routes.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        return await answer(models, request, parse_chat_request)

    @routes.post("/v1/completions", **route_docs(CompletionBody, EXAMPLES["text"], stream_type=EVENT_STREAM))
    async def completions(request: Request) -> Response:
        return await answer(models, request, parse_completion_request)

    @routes.get("/v1/models", **route_docs())
    @routes.get("/models", include_in_schema=False)
    async def list_models() -> JsonObject:
        """All of this machine, and those that were named at the start."""
        return {"object": "list", "data": await asyncio.to_thread(all_models, models)}

    @routes.get("/v1/models/{name:path}", **route_docs())
    async def model(name: str) -> JsonObject:
        return model_object(models, name)

    return routes


def all_models(models: ModelPool) -> list[JsonObject]:
    """One that has gone meanwhile does not hide the others."""
    found: list[JsonObject] = []
    for name in dict.fromkeys([*models.aliases, *(ref.name for ref in installed_models())]):
        with suppress(LocalLLMError, OSError):
            found.append(model_object(models, name))
    return found


def model_object(models: ModelPool, name: str) -> JsonObject:
    """Raises ModelNotFound where it is not here."""
    ref = models.resolve(name)
    loaded, created = models.loaded.get(ref.key), ref.path.stat().st_mtime
    head = {"id": name, "object": "model", "created": int(created), "owned_by": "localllm"}
    return {**head, "loaded": loaded is not None, "context_length": loaded.llm.context if loaded else None}


def system_fingerprint(llm: LLM) -> str:
    """What answers depend on beside the request: who asks with one seed twice may compare."""
    setup = (llm.name, llm.origin.quant, llm.device, llm.dtype, llm.kv_dtype, llm.deterministic, __version__)
    return f"fp_{hashlib.sha256(repr(setup).encode()).hexdigest()[:12]}"


async def answer(models: ModelPool, request: Request, parse: RequestParser) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await read_model_body(request, models)
    # What makes no sense loads no model; whose own parameters stand where the body has none.
    lease = await models.lease(parse(body, SamplingParams()).model)
    with lease:
        if parse is parse_chat_request:
            lease.ensure_chat_template()
        asked = parse(body, lease.llm.default_params)
        name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        stamp = ResponseHeader(name, int(time.time()), lease.name, system_fingerprint(lease.llm))
        # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
        prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        if asked.stream:
            return StreamResponse(stream_answer(lease, asked, stamp, prepared), lease.renew())
        return JSONResponse(await run_until_disconnect(request, complete_answer(lease, asked, stamp, prepared)))


async def complete_answer(
    lease: Lease, parsed: ParsedRequest, stamp: ResponseHeader, prepared: Sequence[Prepared]
) -> JsonObject:
    said: list[list[GenerationEvent]] = [[] for _ in prepared]
    with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    dones = [collect_completion(request, pieces) for request, pieces in zip(prepared, said, strict=True)]
    for request, done in zip(prepared, dones, strict=True):
        await asyncio.to_thread(check_answer, request, done, untrusted=True)
    if parsed.is_chat:
        return chat_completion_object(stamp, parsed, dones, lease.token_texts)
    return text_completion_object(stamp, parsed, dones, lease.token_texts)


async def stream_answer(
    lease: Lease, parsed: ParsedRequest, stamp: ResponseHeader, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to [DONE]; or up to an error object, which is the last."""
    measured: dict[int, Metrics] = {}
    made: list[bytes] = []
    begun = False
    writers = [
        ChatStream(stamp, parsed, lease.token_texts, place)
        if parsed.is_chat
        else TextStream(stamp, parsed, request, lease.token_texts, place)
        for place, request in enumerate(prepared)
    ]
    try:
        with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
            async for place, piece in answers:
                made += map(sse_event, writers[place].chunks_for(piece))
                if piece.metrics:
                    measured[place] = piece.metrics
                if made and not answers.has_more:
                    begun = True
                    yield b"".join(made)
                    made.clear()
    except LocalLLMError as error:
        if not begun and not made:  # `EventStream` gives it a status of its own
            raise
        yield b"".join([*made, sse_event(error_object(error))])
        return
    if parsed.include_usage:
        yield sse_event(usage_chunk(stamp, parsed, [measured[place] for place in sorted(measured)]))
    yield SSE_DONE
