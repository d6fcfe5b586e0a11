"""OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. `localllm.openai` reads and writes it."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.errors import LocalLLMError
from localllm.llm import collect
from localllm.metrics import Metrics
from localllm.openai.body import parse
from localllm.openai.requests import Asked, read_chat, read_completion
from localllm.openai.responses import Object, Stamp, chat_completion, error_object, text_completion
from localllm.openai.streams import ChatStream, TextStream, usage_chunk
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import Answers
from localllm.server.served import Served
from localllm.server.sse import DONE, EventStream, event, unless_gone
from localllm.text.grammar.result import check_finished

BODY_S = 60.0  # in which a body must have come

Read = Callable[[Mapping[str, Any], SamplingParams], Asked]


class TooSlow(LocalLLMError):
    """A body that does not come."""

    http_status = 408


def router(served: Served) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(served, request, read_chat)

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(served, request, read_completion)

    @routes.get("/models")
    async def models() -> Object:
        return {"object": "list", "data": [described(served)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> Object:
        served.named(name)
        return described(served)

    return routes


def described(served: Served) -> Object:
    llm = served.llm
    head = {"id": llm.name, "object": "model", "created": served.since, "owned_by": "localllm"}
    return {**head, "context_length": llm.context}


async def answer(served: Served, request: Request, read: Read) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    asked = read(parse(await body_of(request)), served.llm.default_params)
    llm = served.named(asked.model)
    stamp = Stamp(f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time()), llm.name)
    # A long prompt takes its time to be rendered and encoded; answers go on meanwhile.
    prepared = await asyncio.to_thread(asked.prepare, llm)
    if asked.stream:
        return EventStream(streamed(served, asked, stamp, prepared))
    return JSONResponse(await unless_gone(request, whole(served, asked, stamp, prepared)))


async def body_of(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError:
        raise TooSlow(f"the body did not come within {BODY_S:.0f} s", "send it faster") from None


async def whole(served: Served, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]) -> Object:
    said: list[list[GenerationEvent]] = [[] for _ in prepared]
    with Answers(served.llm, prepared) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    dones = [collect(request, pieces) for request, pieces in zip(prepared, said, strict=True)]
    for done in dones:
        await asyncio.to_thread(check_finished, asked.params.grammar, done, of_stranger=True)
    if asked.is_chat:
        return chat_completion(stamp, asked, dones[0], served.texts)
    return text_completion(stamp, asked, dones, served.texts)


async def streamed(
    served: Served, asked: Asked, stamp: Stamp, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to [DONE]; or up to an error object, which is the last."""
    measured: list[Metrics] = []
    writers = [
        ChatStream(stamp, asked, served.texts)
        if asked.is_chat
        else TextStream(stamp, asked, request, served.texts, place)
        for place, request in enumerate(prepared)
    ]
    try:
        with Answers(served.llm, prepared) as answers:
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
