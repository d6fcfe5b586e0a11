"""OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. `localllm.api.openai` reads and writes
it."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.asked import Asked
from localllm.api.openai.requests import read_chat, read_completion
from localllm.api.openai.responses import Object, Stamp, chat_completion, error_object, text_completion
from localllm.api.openai.streams import ChatStream, TextStream, usage_chunk
from localllm.errors import LocalLLMError
from localllm.llm import collect
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import Answers
from localllm.server.body import body_of
from localllm.server.models import Lease, Loaded, Models
from localllm.server.sse import DONE, EventStream, event, unless_gone
from localllm.text.grammar.result import check_answer

Read = Callable[[Mapping[str, Any], SamplingParams], Asked]


def router(models: Models) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(models, request, read_chat)

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(models, request, read_completion)

    @routes.get("/models")
    async def list_models() -> Object:
        return {"object": "list", "data": [described(loaded) for loaded in models.loaded.values()]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> Object:
        with await models.lease(name) as lease:
            return described(lease.loaded)

    return routes


def described(loaded: Loaded) -> Object:
    head = {"id": loaded.name, "object": "model", "created": int(loaded.since), "owned_by": "localllm"}
    return {**head, "context_length": loaded.llm.context}


async def answer(models: Models, request: Request, read: Read) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await body_of(request)
    # What makes no sense loads no model; whose own parameters stand where the body has none.
    lease = await models.lease(read(body, SamplingParams()).model)
    with lease:
        asked = read(body, lease.llm.default_params)
        name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        stamp = Stamp(name, int(time.time()), lease.loaded.name)
        # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
        prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        if asked.stream:
            return EventStream(streamed(lease, asked, stamp, prepared), lease.kept())
        return JSONResponse(await unless_gone(request, whole(lease, asked, stamp, prepared)))


async def whole(lease: Lease, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]) -> Object:
    said: list[list[GenerationEvent]] = [[] for _ in prepared]
    with Answers(lease.llm, prepared) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    dones = [collect(request, pieces) for request, pieces in zip(prepared, said, strict=True)]
    for request, done in zip(prepared, dones, strict=True):
        await asyncio.to_thread(check_answer, request, done, of_stranger=True)
    if asked.is_chat:
        return chat_completion(stamp, asked, dones[0], lease.texts)
    return text_completion(stamp, asked, dones, lease.texts)


async def streamed(
    lease: Lease, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to [DONE]; or up to an error object, which is the last."""
    measured: list[Metrics] = []
    writers = [
        ChatStream(stamp, asked, lease.texts)
        if asked.is_chat
        else TextStream(stamp, asked, request, lease.texts, place)
        for place, request in enumerate(prepared)
    ]
    try:
        with Answers(lease.llm, prepared) as answers:
            async for place, piece in answers:
                for chunk in writers[place].push(piece):
                    yield event(chunk)
                measured += [piece.metrics] if piece.metrics else []
    except LocalLLMError as error:
        yield event(error_object(error))
        return
    if asked.include_usage:
        yield event(usage_chunk(stamp, asked, measured))
    yield DONE
