"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. `localllm.api.anthropic` reads and writes
it."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.anthropic.requests import (
    CountTokensBody,
    MessagesBody,
    parse_count_request,
    parse_message_request,
)
from localllm.api.anthropic.responses import JsonObject, MessageStream, error_object, message_object
from localllm.errors import LocalLLMError
from localllm.llm.llm import collect_completion
from localllm.request import Request as Prepared
from localllm.request import SamplingParams
from localllm.server.answers import AnswerReader
from localllm.server.body import read_model_body
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.sse import StreamResponse, run_until_disconnect, sse_event
from localllm.text.grammar.result import check_answer

COUNT_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is a cat?"}]}
EXAMPLE = {**COUNT_EXAMPLE, "max_tokens": 32}


def router(models: ModelPool) -> APIRouter:
    routes = APIRouter(prefix="/v1/messages")

    @routes.post("", **route_docs(MessagesBody, EXAMPLE, stream_type="text/event-stream"))
    async def messages(request: Request) -> Response:
        return await answer(models, request)

    @routes.post("/count_tokens", **route_docs(CountTokensBody, COUNT_EXAMPLE))
    async def count_tokens(request: Request) -> JsonObject:
        body = await read_model_body(request, models)
        with await models.lease(parse_count_request(body, SamplingParams()).model) as lease:
            lease.ensure_chat_template()
            asked = parse_count_request(body, lease.llm.default_params)
            return {"input_tokens": await asyncio.to_thread(asked.count_prompt_tokens, lease.llm)}

    return routes


async def answer(models: ModelPool, request: Request) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await read_model_body(request, models)
    lease = await models.lease(parse_message_request(body, SamplingParams()).model)
    with lease:
        lease.ensure_chat_template()
        asked = parse_message_request(body, lease.llm.default_params)
        [prepared] = await asyncio.to_thread(asked.prepare, lease.llm)
        headers = {"request-id": request_id()}
        if asked.stream:
            events = StreamResponse(stream_answer(lease, prepared, headers["request-id"]), lease.renew())
            events.headers.update(headers)
            return events
        return JSONResponse(await run_until_disconnect(request, complete_answer(lease, prepared)), headers=headers)


async def complete_answer(lease: Lease, prepared: Prepared) -> JsonObject:
    with AnswerReader(lease.llm, [prepared]) as answers:
        done = collect_completion(prepared, [piece async for _, piece in answers])
    await asyncio.to_thread(check_answer, prepared, done, untrusted=True)
    return message_object(message_id(), lease.loaded.name, prepared.params, done)


async def stream_answer(lease: Lease, prepared: Prepared, request: str) -> AsyncGenerator[bytes]:
    """Events up to message_stop; or up to an error, which is the last. Raises what keeps it from beginning."""
    stream = MessageStream(message_id(), lease.loaded.name, prepared)
    with AnswerReader(lease.llm, [prepared]) as answers:
        for each in stream.start_events():
            yield sse_event(each, each["type"])
        try:
            async for _, piece in answers:
                for each in stream.events_for(piece):
                    yield sse_event(each, each["type"])
        except LocalLLMError as error:
            yield sse_event(error_object(error, request), "error")


def message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
