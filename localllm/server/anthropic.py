"""Routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. `localllm.api.anthropic` has the
formats."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.anthropic.requests import (
    CountTokensBody,
    MessagesBody,
    parse_count_request,
    parse_message_request,
)
from localllm.api.anthropic.responses import MessageStream, error_object, message_object
from localllm.errors import LocalLLMError
from localllm.request import Request as Prepared
from localllm.request import SamplingParams
from localllm.server.answers import AnswerReader
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.routing import JsonObject, RouteDocs, Router, read_model_body
from localllm.server.streaming import EVENT_STREAM, StreamResponse, run_until_disconnect, sse_event

COUNT_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is a cat?"}]}
EXAMPLE = {**COUNT_EXAMPLE, "max_tokens": 32}


def router(models: ModelPool) -> Router:
    routes = Router("/v1/messages")

    @routes.post("", RouteDocs(MessagesBody, EXAMPLE, stream_type=EVENT_STREAM))
    async def messages(request: Request) -> Response:
        return await answer(models, request)

    @routes.post("/count_tokens", RouteDocs(CountTokensBody, COUNT_EXAMPLE))
    async def count_tokens(request: Request) -> JsonObject:
        body = await read_model_body(request, models)
        with await models.lease(parse_count_request(body, SamplingParams()).model) as lease:
            lease.ensure_chat_template()
            parsed = parse_count_request(body, lease.llm.default_params)
            return {"input_tokens": await asyncio.to_thread(parsed.count_prompt_tokens, lease.llm)}

    return routes


async def answer(models: ModelPool, request: Request) -> Response:
    """Raises LocalLLMError for an invalid body, and for any failure before the first event is sent."""
    body = await read_model_body(request, models)
    lease = await models.lease(parse_message_request(body, SamplingParams()).model)
    with lease:
        lease.ensure_chat_template()
        parsed = parse_message_request(body, lease.llm.default_params)
        [prepared] = await asyncio.to_thread(parsed.prepare, lease.llm)
        request_id = f"req_{secrets.token_hex(12)}"
        if parsed.stream:
            response = StreamResponse(stream_answer(lease, prepared, request_id), lease.renew())
        else:
            response = JSONResponse(await run_until_disconnect(request, complete_answer(lease, prepared)))
        response.headers["request-id"] = request_id
        return response


async def complete_answer(lease: Lease, prepared: Prepared) -> JsonObject:
    """Raises OutputInvalid for an answer that does not match its grammar."""
    with AnswerReader(lease.llm, [prepared]) as answers:
        [completion] = await answers.completions()
    return message_object(message_id(), lease.loaded.name, prepared.params, completion)


async def stream_answer(lease: Lease, prepared: Prepared, request_id: str) -> AsyncGenerator[bytes]:
    """Events up to message_stop, or up to an error. Raises LocalLLMError if the answer cannot start."""
    stream = MessageStream(message_id(), lease.loaded.name, prepared)
    with AnswerReader(lease.llm, [prepared]) as answers:
        for event_object in stream.start_events():
            yield sse_event(event_object, event_object["type"])
        try:
            while events := await answers.next_events():
                objects = [each for _, event in events for each in stream.events_for(event)]
                if objects:
                    yield b"".join(sse_event(each, each["type"]) for each in objects)
        except LocalLLMError as error:
            yield sse_event(error_object(error, request_id), "error")


def message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"
