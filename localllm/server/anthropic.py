"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. `localllm.api.anthropic` reads and writes
it."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.anthropic.bodies import MessagesBody, MessagesPrompt
from localllm.api.anthropic.requests import read_count_request, read_message_request
from localllm.api.anthropic.responses import Object, error_object, message
from localllm.api.anthropic.streams import MessageStream
from localllm.errors import LocalLLMError
from localllm.llm import collect
from localllm.request import Request as Prepared
from localllm.request import SamplingParams
from localllm.server.answers import Answers
from localllm.server.body import body_of
from localllm.server.lease import Lease
from localllm.server.models import Models
from localllm.server.openapi import documented
from localllm.server.sse import EventStream, event, unless_gone
from localllm.text.grammar.result import check_answer

COUNTED = {"model": "demo", "messages": [{"role": "user", "content": "What is a cat?"}]}
EXAMPLE = {**COUNTED, "max_tokens": 32}


def router(models: Models) -> APIRouter:
    routes = APIRouter(prefix="/v1/messages")

    @routes.post("", **documented(MessagesBody, EXAMPLE, streams="text/event-stream"))
    async def messages(request: Request) -> Response:
        return await answer(models, request)

    @routes.post("/count_tokens", **documented(MessagesPrompt, COUNTED))
    async def count_tokens(request: Request) -> Object:
        body = await body_of(request)
        with await models.lease(read_count_request(body, SamplingParams()).model) as lease:
            asked = read_count_request(body, lease.llm.default_params)
            return {"input_tokens": await asyncio.to_thread(asked.count, lease.llm)}

    return routes


async def answer(models: Models, request: Request) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await body_of(request)
    lease = await models.lease(read_message_request(body, SamplingParams()).model)
    with lease:
        asked = read_message_request(body, lease.llm.default_params)
        [prepared] = await asyncio.to_thread(asked.prepare, lease.llm)
        headers = {"request-id": request_id()}
        if asked.stream:
            events = EventStream(streamed(lease, prepared, headers["request-id"]), lease.kept())
            events.headers.update(headers)
            return events
        return JSONResponse(await unless_gone(request, whole(lease, prepared)), headers=headers)


async def whole(lease: Lease, prepared: Prepared) -> Object:
    with Answers(lease.llm, [prepared]) as answers:
        done = collect(prepared, [piece async for _, piece in answers])
    await asyncio.to_thread(check_answer, prepared, done, of_stranger=True)
    return message(message_id(), lease.loaded.name, prepared.params, done)


async def streamed(lease: Lease, prepared: Prepared, request: str) -> AsyncGenerator[bytes]:
    """Events up to message_stop; or up to an error, which is the last. Raises what keeps it from beginning."""
    stream = MessageStream(message_id(), lease.loaded.name, prepared)
    with Answers(lease.llm, [prepared]) as answers:
        for each in stream.begin():
            yield event(each, each["type"])
        try:
            async for _, piece in answers:
                for each in stream.push(piece):
                    yield event(each, each["type"])
        except LocalLLMError as error:
            yield event(error_object(error, request), "error")


def message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
