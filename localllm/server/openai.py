"""Routes of OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. `localllm.api.openai` has the
formats."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm import __version__
from localllm.api.openai.bodies import ChatBody, CompletionBody
from localllm.api.openai.requests import parse_chat_request, parse_completion_request
from localllm.api.openai.responses import (
    ChatStream,
    ResponseHeader,
    TextStream,
    chat_completion_object,
    error_object,
    text_completion_object,
    usage_chunk,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import LocalLLMError
from localllm.hub.resolve import installed_models
from localllm.llm.llm import LLM
from localllm.metrics import Metrics
from localllm.request import EventType, GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import AnswerReader
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.routing import JsonObject, RouteDocs, Router, read_model_body
from localllm.server.streaming import (
    EVENT_STREAM,
    SSE_DONE,
    StreamResponse,
    TextTemplate,
    run_until_disconnect,
    sse_event,
)

CHAT_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
COMPLETION_EXAMPLE = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}

RequestParser = Callable[[Mapping[str, Any], SamplingParams], ParsedRequest]


def router(models: ModelPool) -> Router:
    routes = Router()

    @routes.post("/v1/chat/completions", RouteDocs(ChatBody, CHAT_EXAMPLE, stream_type=EVENT_STREAM))
    @routes.post("/chat/completions", in_schema=False)
    async def chat(request: Request) -> Response:
        return await answer(models, request, parse_chat_request)

    @routes.post("/v1/completions", RouteDocs(CompletionBody, COMPLETION_EXAMPLE, stream_type=EVENT_STREAM))
    async def completions(request: Request) -> Response:
        return await answer(models, request, parse_completion_request)

    @routes.get("/v1/models")
    @routes.get("/models", in_schema=False)
    async def list_models(_: Request) -> JsonObject:
        """Installed models, and those named at start-up."""
        return {"object": "list", "data": await asyncio.to_thread(model_objects, models)}

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request) -> JsonObject:
        return model_object(models, request.path_params["name"])

    return routes


def model_objects(models: ModelPool) -> list[JsonObject]:
    """All models; one that was removed in the meantime is left out."""
    objects: list[JsonObject] = []
    for name in dict.fromkeys([*models.aliases, *(ref.name for ref in installed_models())]):
        with suppress(LocalLLMError, OSError):
            objects.append(model_object(models, name))
    return objects


def model_object(models: ModelPool, name: str) -> JsonObject:
    """Raises ModelNotFound if the model is not installed."""
    ref = models.resolve(name)
    loaded, created = models.loaded.get(ref.key), ref.path.stat().st_mtime
    head = {"id": name, "object": "model", "created": int(created), "owned_by": "localllm"}
    return {**head, "loaded": loaded is not None, "context_length": loaded.llm.context if loaded else None}


def system_fingerprint(llm: LLM) -> str:
    """Hash of everything but the request that an answer depends on. Equal fingerprints and seeds give equal
    answers."""
    setup = (llm.name, llm.origin.quant, llm.device, llm.dtype, llm.kv_dtype, llm.deterministic, __version__)
    return f"fp_{hashlib.sha256(repr(setup).encode()).hexdigest()[:12]}"


async def answer(models: ModelPool, request: Request, parse: RequestParser) -> Response:
    """Raises LocalLLMError for an invalid body, and for any failure before the first event is sent."""
    body = await read_model_body(request, models)
    # Parsed twice: an invalid body must not load a model, whose own parameters are the defaults.
    lease = await models.lease(parse(body, SamplingParams()).model)
    with lease:
        if parse is parse_chat_request:
            lease.ensure_chat_template()
        parsed = parse(body, lease.llm.default_params)
        response_id = f"{'chatcmpl' if parsed.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        header = ResponseHeader(response_id, int(time.time()), lease.name, system_fingerprint(lease.llm))
        # Rendering and encoding a long prompt takes time, during which other answers must continue.
        prepared = await asyncio.to_thread(parsed.prepare, lease.llm)
        if parsed.stream:
            return StreamResponse(stream_answer(lease, parsed, header, prepared), lease.renew())
        return JSONResponse(await run_until_disconnect(request, complete_answer(lease, parsed, header, prepared)))


async def complete_answer(
    lease: Lease, parsed: ParsedRequest, header: ResponseHeader, prepared: Sequence[Prepared]
) -> JsonObject:
    """Raises OutputInvalid for an answer that does not match its grammar."""
    with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
        completions = await answers.completions()
    completion_object = chat_completion_object if parsed.is_chat else text_completion_object
    return completion_object(header, parsed, completions, lease.token_texts)


async def stream_answer(
    lease: Lease, parsed: ParsedRequest, header: ResponseHeader, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to [DONE], or up to an error object. Raises LocalLLMError if the answer cannot start."""
    metrics: dict[int, Metrics] = {}
    started = False
    writers = [
        ChunkWriter(
            ChatStream(header, parsed, lease.token_texts, index)
            if parsed.is_chat
            else TextStream(header, parsed, request, lease.token_texts, index)
        )
        for index, request in enumerate(prepared)
    ]
    try:
        with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
            while events := await answers.next_events():
                metrics |= {index: event.metrics for index, event in events if event.metrics}
                if chunks := b"".join([writers[index].write(event) for index, event in events]):
                    started = True
                    yield chunks
    except LocalLLMError as error:
        if not started:  # nothing was sent: the response gets the error's status
            raise
        yield sse_event(error_object(error))
        return
    if parsed.include_usage:
        yield sse_event(usage_chunk(header, parsed, [metrics[index] for index in sorted(metrics)]))
    yield SSE_DONE


class ChunkWriter:
    """The chunks of one choice as server-sent events."""

    def __init__(self, stream: ChatStream | TextStream):
        self.stream = stream
        self.templates: dict[EventType, TextTemplate] = {}

    def write(self, event: GenerationEvent) -> bytes:
        """The chunks of an event, usually one; b"" if it has none."""
        kind = event.kind
        if not self.stream.has_text_alone(event):
            return b"".join(map(sse_event, self.stream.chunks_for(event)))
        if kind not in self.templates:
            self.templates[kind] = TextTemplate(partial(self.stream.text_chunk, kind))
        return self.templates[kind].fill(event.text)
