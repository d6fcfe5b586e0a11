"""OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. `localllm.api.openai` reads and writes
it."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm import __version__
from localllm.api.asked import Asked
from localllm.api.openai.bodies import ChatBody, CompletionBody
from localllm.api.openai.requests import read_chat, read_completion
from localllm.api.openai.responses import Object, Stamp, chat_completion, error_object, text_completion
from localllm.api.openai.streams import ChatStream, TextStream, usage_chunk
from localllm.errors import LocalLLMError
from localllm.hub.installed import installed
from localllm.llm import LLM, collect
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import Answers
from localllm.server.body import body_of
from localllm.server.lease import Lease
from localllm.server.models import Models
from localllm.server.openapi import documented
from localllm.server.sse import DONE, EventStream, event, unless_gone
from localllm.text.grammar.result import check_answer

EVENTS = "text/event-stream"
EXAMPLES: dict[str, Object] = {
    "chat": {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    "text": {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8},
}

Read = Callable[[Mapping[str, Any], SamplingParams], Asked]


def router(models: Models) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", **documented(ChatBody, EXAMPLES["chat"], streams=EVENTS))
    async def chat(request: Request) -> Response:
        return await answer(models, request, read_chat)

    @routes.post("/completions", **documented(CompletionBody, EXAMPLES["text"], streams=EVENTS))
    async def completions(request: Request) -> Response:
        return await answer(models, request, read_completion)

    @routes.get("/models", **documented())
    async def list_models() -> Object:
        """All of this machine, and those that were named at the start."""
        return {"object": "list", "data": await asyncio.to_thread(listed, models)}

    @routes.get("/models/{name:path}", **documented())
    async def model(name: str) -> Object:
        models.source_of(name)
        return described(models, name)

    return routes


def listed(models: Models) -> list[Object]:
    """One that has gone meanwhile does not hide the others."""
    found: list[Object] = []
    for name in dict.fromkeys([*models.given, *(ref.name for ref in installed())]):
        with suppress(LocalLLMError, OSError):
            found.append(described(models, name))
    return found


def described(models: Models, name: str) -> Object:
    """Raises ModelNotFound where it is not here."""
    loaded, created = models.find(name), Path(models.key_of(name)).stat().st_mtime
    head = {"id": name, "object": "model", "created": int(created), "owned_by": "localllm"}
    return {**head, "loaded": loaded is not None, "context_length": loaded.llm.context if loaded else None}


def fingerprint(llm: LLM) -> str:
    """What answers depend on beside the request: who asks with one seed twice may compare."""
    setup = (llm.name, llm.origin.quant, llm.device, llm.dtype, llm.kv_dtype, llm.deterministic, __version__)
    return f"fp_{hashlib.sha256(repr(setup).encode()).hexdigest()[:12]}"


async def answer(models: Models, request: Request, read: Read) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await body_of(request)
    # What makes no sense loads no model; whose own parameters stand where the body has none.
    lease = await models.lease(read(body, SamplingParams()).model)
    with lease:
        asked = read(body, lease.llm.default_params)
        name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        stamp = Stamp(name, int(time.time()), lease.name, fingerprint(lease.llm))
        # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
        prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        if asked.stream:
            return EventStream(streamed(lease, asked, stamp, prepared), lease.kept())
        return JSONResponse(await unless_gone(request, whole(lease, asked, stamp, prepared)))


async def whole(lease: Lease, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]) -> Object:
    said: list[list[GenerationEvent]] = [[] for _ in prepared]
    with Answers(lease.llm, prepared, asked.each) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    dones = [collect(request, pieces) for request, pieces in zip(prepared, said, strict=True)]
    for request, done in zip(prepared, dones, strict=True):
        await asyncio.to_thread(check_answer, request, done, of_stranger=True)
    if asked.is_chat:
        return chat_completion(stamp, asked, dones, lease.texts)
    return text_completion(stamp, asked, dones, lease.texts)


async def streamed(
    lease: Lease, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to [DONE]; or up to an error object, which is the last."""
    measured: dict[int, Metrics] = {}
    made: list[bytes] = []
    begun = False
    writers = [
        ChatStream(stamp, asked, lease.texts, place)
        if asked.is_chat
        else TextStream(stamp, asked, request, lease.texts, place)
        for place, request in enumerate(prepared)
    ]
    try:
        with Answers(lease.llm, prepared, asked.each) as answers:
            async for place, piece in answers:
                made += map(event, writers[place].push(piece))
                if piece.metrics:
                    measured[place] = piece.metrics
                if made and not answers.more:
                    begun = True
                    yield b"".join(made)
                    made.clear()
    except LocalLLMError as error:
        if not begun and not made:  # `EventStream` gives it a status of its own
            raise
        yield b"".join([*made, event(error_object(error))])
        return
    if asked.include_usage:
        yield event(usage_chunk(stamp, asked, [measured[place] for place in sorted(measured)]))
    yield DONE
